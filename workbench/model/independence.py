"""Shows that each operation of a traced model treats every sample by itself, by trying it.

Ranks hold rows of a batch, so no sample's result may depend on the others, on their number, or on
its place among them. An operation whose kind (`kinds.py`) does not promise that is run on small
batches of real values. With samples 0, 1, 2, and 1' and NaN in the place of 1:

    batch        what has to be so
    0  1  2      is what the others are compared with
    0  1' 2      the results of 0 and 2 are the same bit by bit
    0 NaN 2      the same
       1  2      each result is as before, to rounding: neither the number of samples nor the
       1         places of 1 and 2 mattered
    none         there is a result without rows

What an operation reads is made up, as its shape says: an activation of random numbers for each
sample. Only what cannot be made up is computed: indices, masks, and what depends on the number
of samples (`torch.arange(len(x))`, which may well pick each sample's own rows). Where an operation
fails on random numbers (of a bank of probabilities, say), it gets numbers of other kinds, and then
such as the operations before it give. What cannot be tried is refused.

Assumed and not checked: the backward pass of a function marked by `torch.fx.wrap` also treats each
sample by itself.
"""

import math
import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from workbench.model.batch import (
    BATCHES,
    NUMBER,
    REMEDY,
    called,
    is_users_function,
    name_of,
    tensors,
)
from workbench.model.errors import TraceError
from workbench.model.kinds import kind_of
from workbench.model.structure import with_tensors

Samples = tuple[int, ...]

_CHANGED, _NAN = 3, 4  # what may stand in the place of sample 1
_BATCH = (0, 1, 2)
_MANY = _BATCH * 6
_MOVED = ((0, _CHANGED, 2), (0, _NAN, 2))
_SEEDS = range(4)  # of a random permutation, one may well leave the changed sample in its place

# Cheap to run, so that what they give need not be made up; of the others it is.
_CHEAP = {"elementwise", "pool", "flatten", "add", "mul", "op"}
_AS_IT_IS = {"dropout", "stochastic_depth"}
_FURTHEST = 40  # operations that are looked back through


@dataclass(frozen=True)
class _Draw:
    """Which numbers are made up, and whether for activations in the midst of the model."""

    kind: str
    midst: bool


_DRAWS = (
    _Draw("normal", midst=True),
    _Draw("normal", midst=False),
    _Draw("positive", midst=True),
    _Draw("positive", midst=False),
    _Draw("binary", midst=False),
)


class MixedError(TraceError):
    """An operation that mixes samples, or that nothing could be shown of.

    Attributes:
        node: the operation.
    """

    def __init__(self, node: Node, text: str) -> None:
        super().__init__(text)
        self.node = node


class _Undecided(Exception):
    """With these numbers, the operation shows nothing."""


def show_independence(
    graph: torch.fx.Graph, root: nn.Module, constants: dict[str, Tensor] | None = None
) -> None:
    """Tries every operation that could mix samples, and notes the fewest rows that each takes.

    Sets `meta["least_rows"]` of every node (see `plan.graph.Layer`).

    Args:
        graph: of a `ValueTracer`, with its values.
        root: the module that was traced.
        constants: values of parameters and buffers that hold integers, such as indices, by name;
            those that are missing are taken to be zeros.

    Raises:
        MixedError: an operation mixes samples, or cannot be tried.
    """
    trials = _Trials(root, constants or {})
    returned = next(node for node in graph.nodes if node.op == "output").all_input_nodes
    with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of values that nobody gave
        for node in graph.nodes:
            node.meta["least_rows"] = trials.least_rows(node, node in returned)


def constants_of(module: nn.Module) -> dict[str, Tensor]:
    """The values of a module's parameters and buffers that hold integers, such as indices."""
    return {
        name: tensor.detach().cpu()
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        if not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta)
    }


class _Trials:
    """Tries operations, each kind of call once."""

    def __init__(self, root: nn.Module, constants: dict[str, Tensor]) -> None:
        self.root, self.constants = root, constants
        self.noise = _Noise()
        self.kinds: dict[Node, str] = {}
        self.varies: dict[Node, bool] = {}
        self.shown: dict[Any, int] = {}

    def least_rows(self, node: Node, returned: bool) -> int:
        """The fewest rows that an operation takes, once it is shown not to mix any."""
        if node.op in ("placeholder", "output", "get_attr"):
            self.varies[node] = False
            return 0
        module = self.root.get_submodule(str(node.target)) if node.op == "call_module" else None
        self.kinds[node] = kind_of(node, module)
        self.varies[node] = not node.meta["depends"] and any(
            source.meta["depends"] or self.varies[source] for source in node.all_input_nodes
        )
        numbers = [n for n in node.all_input_nodes if _is_number(n)]
        made = node.meta["rows"] > 0 and bool(numbers)
        if self.kinds[node] == "size" or not (node.meta["depends"] or returned or made):
            return 0
        if node.meta["depends"] and self._promised(node):
            return 0
        call = self._call(node)
        if call is None or call not in self.shown:
            least = self._try(node, numbers, only_numbers=not (node.meta["depends"] or returned))
            if call is None:
                return least
            self.shown[call] = least
        return self.shown[call]

    def _promised(self, node: Node) -> bool:
        """Whether the node's kind says all: it reads activations and parameters alone."""
        if _is_part(node):
            return True  # of what was shown as a whole
        return self.kinds[node] != "op" and all(
            source.op == "get_attr" or source.meta["depends"] for source in node.all_input_nodes
        )

    def _try(self, node: Node, numbers: list[Node], *, only_numbers: bool) -> int:
        errors: list[Exception] = []
        for draw in _DRAWS:
            trial = _Trial(node, draw, self)
            try:
                trial.show_numbers(numbers)
                return 0 if only_numbers else trial.show()
            except _Undecided as error:
                errors.append(error)
            finally:
                trial.forget()
        raise MixedError(
            node,
            f"{trial.name} was tried on random values, to see whether it treats each sample by "
            f"itself, and it {errors[0]}. What cannot be tried is not distributed: use an "
            "operation that takes any values, or a layer of nn that does the same",
        )

    def _call(self, node: Node) -> Any:
        """What equal calls have in common; None where that cannot be said."""
        if node.op == "call_module":
            return None
        places: dict[Node, int] = {}

        def described(source: Node) -> str:
            place = places.setdefault(source, len(places))
            if self.kinds.get(source) == "size" and not tensors(source.meta["values"][0]):
                values = [_Trial(node, _DRAWS[0], self).size(source, n) for n in range(4)]
                return f"<{place} {values}>"
            if not self.made_up(source):
                raise _Undecided
            shapes = [(tuple(v.shape), v.dtype) for v in source.meta["values"]]
            return f"<{place} {shapes} {source.meta['depends']}>"

        try:
            arguments = map_arg((node.args, node.kwargs), described)
        except Exception:  # a size that no sample has, or values that have to be computed
            return None
        return node.op, node.target, repr(arguments)

    def made_up(self, source: Node) -> bool:
        """Whether any numbers will do for what a node gives."""
        value = source.meta["values"][0]
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            return False
        return source.meta["depends"] or not self.varies[source]


class _Trial:
    """One operation under one kind of numbers."""

    def __init__(self, node: Node, draw: _Draw, trials: _Trials) -> None:
        self.node, self.draw, self.trials = node, draw, trials
        self.made: dict[Node, Tensor] = {}
        self.given: dict[tuple[Node, Samples], Any] = {}
        self.modules: dict[str, nn.Module] = {}
        self.random: set[Node] = set()
        self.changes: set[Node] = set()  # those that write into what they read
        module = trials.root.get_submodule(str(node.target)) if node.op == "call_module" else None
        self.name = name_of(node) if module is None else type(module).__name__

    def forget(self) -> None:
        """Lets go of all values, which a caught error might keep alive."""
        self.made.clear()
        self.given.clear()
        self.modules.clear()

    def show(self) -> int:
        """The fewest rows that the operation takes.

        Raises:
            MixedError: it mixes samples.
            _Undecided: these numbers show nothing.
        """
        first = self._all_samples()
        for seed in _SEEDS if self.node in self.random else _SEEDS[:1]:
            self._show_others_stay(seed)
        self._same((1, 2), first)
        if is_users_function(self.node.target) and self.node not in self.random:
            self._same(_MANY, first)
        try:
            alone = self.value(self.node, (1,))
        except Exception:  # whatever it is that an operation raises for one sample
            return 2
        self._same_values((1,), alone, first)
        try:
            none = self.value(self.node, ())
        except Exception:
            return 1
        return 0 if _shapes(none) == [_shape_for(pair, 0) for pair in self._leaves()] else 1

    def show_numbers(self, numbers: Sequence[Node]) -> None:
        """Refuses what gives other values, of the same shape, for other numbers of the batch."""
        if not numbers:
            return
        first = self._all_samples()
        for number in numbers:
            for other in (number.meta["values"][1] + 1, 2 * number.meta["values"][1] + 5):
                try:
                    value = self._run(self.node, _BATCH, {number: other})
                except Exception:  # it says a size, and this one is not the batch's
                    continue
                if _shapes(value) == _shapes(first) and not _alike(value, first, rounded=True):
                    raise MixedError(
                        self.node,
                        f"{self.name} takes a number that depends on the batch size, "
                        f"which differs between ranks. {REMEDY}",
                    )

    def value(self, node: Node, samples: Samples, back: int = 0) -> Any:
        """What a node gives for these samples."""
        if (node, samples) in self.given:
            return self.given[node, samples]
        if node.op == "get_attr":
            if node not in self.made:
                self.made[node] = self._real(str(node.target), node.meta["values"][0])
            value: Any = self.made[node]
        elif self.trials.kinds.get(node) == "size":
            value = self.size(node, len(samples))
        elif self._to_be_made_up(node, back):
            value = self._made_up(node, samples)
        elif self.trials.kinds[node] in _AS_IT_IS:
            value = self.value(node.all_input_nodes[0], samples, back + 1)
        else:
            value = self._run(node, samples, {}, back)
            if node in self.random:
                value = self._as_drawn_for_all(node, samples, value, back)
        self.given[node, samples] = value
        return value

    def size(self, node: Node, count: int) -> Any:
        """A value that is no tensor, for a batch of so many samples."""
        if count in BATCHES:
            return node.meta["values"][BATCHES.index(count)]
        arguments = map_arg((node.args, node.kwargs), lambda source: self._hollow(source, count))
        return called(node.op, node.target, self.trials.root, *arguments)

    def _all_samples(self) -> Any:
        try:
            value = self.value(self.node, _BATCH)
        except Exception as error:  # whatever it is that these numbers were wrong for
            raise _Undecided(f"failed ({_one_line(error)})") from None
        floats = [leaf for leaf in tensors(value) if leaf.is_floating_point() and leaf.numel()]
        if floats and all(leaf.isnan().all() for leaf in floats):
            raise _Undecided("gave NaN alone")
        return value

    def _show_others_stay(self, seed: int) -> None:
        """That samples 0 and 2 do not move when sample 1 does."""
        first = self._run(self.node, _BATCH, {}, seed=seed)
        for samples in _MOVED:
            try:
                moved = self._run(self.node, samples, {}, seed=seed)
            except Exception as error:
                if _NAN in samples:
                    continue
                raise _Undecided(f"failed ({_one_line(error)})") from None
            for a, b, (small, large) in zip(
                tensors(first), tensors(moved), self._leaves(), strict=True
            ):
                if not _has_rows(small, large):
                    continue  # if it is read, it is refused
                a, b = _by_sample(a, 3), _by_sample(b, 3)
                if not (_alike(a[0], b[0]) and _alike(a[2], b[2])):
                    self._refuse_mixing(seed, first)

    def _refuse_mixing(self, seed: int, first: Any) -> None:
        if not _alike(self._run(self.node, _BATCH, {}, seed=seed), first):
            raise MixedError(
                self.node,
                f"{self.name} gives other results for the same values and the same state "
                "of torch's generator: random numbers have to be torch's own",
            )
        drawn = ", or draws as many random numbers as the values say" * (self.node in self.random)
        raise MixedError(
            self.node,
            f"{self.name} mixes samples{drawn}: as one of three was changed, the results of "
            f"the others changed. {self._remedy()}",
        )

    def _same(self, samples: Samples, first: Any) -> None:
        try:
            value = self.value(self.node, samples)
        except Exception as error:
            raise MixedError(
                self.node,
                f"{self.name} takes a batch of {len(_BATCH)} samples, and fails for one "
                f"of {len(samples)} ({_one_line(error)}). {self._remedy()}",
            ) from None
        self._same_values(samples, value, first)

    def _same_values(self, samples: Samples, value: Any, first: Any) -> None:
        """Refuses results for some samples that are not those that were among `first`."""
        for part, whole, (small, large) in zip(
            tensors(value), tensors(first), self._leaves(), strict=True
        ):
            if not _has_rows(small, large):
                continue
            due = _shape_for((small, large), len(samples))
            if tuple(part.shape) != due:
                hint = (
                    "name the dimensions, squeeze((2, 3)), or use flatten(1)"
                    if "squeeze" in self.name
                    else self._remedy()
                )
                raise MixedError(
                    self.node,
                    f"{self.name} gives shape {tuple(part.shape)} for a batch of {len(samples)}, "
                    f"where {due} is due, and a rank may have so few rows: {hint}",
                )
            expected = _by_sample(whole, 3)[list(samples)].reshape(part.shape)
            if not _alike(part, expected, rounded=True):
                raise MixedError(
                    self.node,
                    f"{self.name} gives a sample other results where other samples, or fewer, are "
                    "in the batch: they depend on the batch size or on the sample's place. "
                    f"{self._remedy()}",
                )

    def _remedy(self) -> str:
        if self.node.op == "call_module":
            module = self.trials.root.get_submodule(str(self.node.target))
            if any(getattr(part, "batch_first", True) is False for part in module.modules()):
                return "It takes the batch as its second dimension: build it with batch_first=True"
        if any(_is_number(source) for source in self.node.all_input_nodes):
            return f"{REMEDY}. {NUMBER}"
        return REMEDY

    def _leaves(self) -> list[tuple[Tensor, Tensor]]:
        """The fake tensors that the operation gives, at both batch sizes."""
        small, large = self.node.meta["values"]
        return list(zip(tensors(small), tensors(large), strict=True))

    def _to_be_made_up(self, node: Node, back: int) -> bool:
        if node.op == "placeholder":
            return True
        if node is self.node or not self.trials.made_up(node):
            return False
        given = self.trials.kinds[node] in _CHEAP | _AS_IT_IS
        return self.draw.midst or not given or back > _FURTHEST

    def _made_up(self, node: Node, samples: Samples) -> Tensor:
        small, large = node.meta["values"]
        if not node.meta["depends"]:
            if node not in self.made:
                self.made[node] = self.trials.noise.values(
                    tuple(small.shape), small.dtype, "normal"
                )
            return self.made[node]
        if node not in self.made:
            rows, *shape = _shape_for((small, large), 1)
            made = self.trials.noise.values((5, rows, *shape), small.dtype, self.draw.kind)
            if self.draw.kind == "normal":
                made[_CHANGED].mul_(3).add_(1)
            elif self.draw.kind == "binary":
                made[_CHANGED] = 1 - made[1]
            made[_NAN] = math.nan
            self.made[node] = made
        made = self.made[node]
        return made[list(samples)].reshape(-1, *made.shape[2:]) if samples else made[0, :0]

    def _real(self, name: str, like: Tensor) -> Tensor:
        """A value for a parameter or buffer of the model."""
        if not (like.is_floating_point() or like.is_complex()):
            known = self.trials.constants.get(name)
            if known is not None:
                return known.clone()
            return torch.full(like.shape, self.draw.kind != "normal", dtype=like.dtype)
        kind = "normal" if self.draw.kind == "binary" else self.draw.kind
        value = self.trials.noise.values(tuple(like.shape), like.dtype, kind)
        return value.mul_(like.shape[-1] ** -0.5) if like.ndim > 1 and like.numel() else value

    def _module(self, path: str) -> nn.Module:
        """The module with real values instead of fake ones."""
        if path not in self.modules:
            module = self.trials.root.get_submodule(path)
            held = [*module.named_parameters(), *module.named_buffers()]
            names = {id(tensor): f"{path}.{name}" for name, tensor in held}

            def real(tensor: Tensor) -> Tensor:
                return self._real(names.get(id(tensor), ""), tensor)

            self.modules[path] = with_tensors(module, real).train(module.training)
        return self.modules[path]

    def _run(
        self,
        node: Node,
        samples: Samples,
        instead: dict[Node, Any],
        back: int = 0,
        *,
        seed: int = 0,
    ) -> Any:
        """What an operation gives; notes whether it drew, and whether it wrote."""

        def read(source: Node) -> Any:
            if source in instead:
                return instead[source]
            return self.value(source, samples, back + 1)

        arguments = map_arg((node.args, node.kwargs), read)
        unknown = node not in self.changes and (node, _BATCH) not in self.given
        if unknown or node in self.changes:
            arguments = pytree.tree_map_only(Tensor, torch.clone, arguments)
        before = [tensor._version for tensor in tensors(arguments)]
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        root = self._module(str(node.target)) if node.op == "call_module" else self.trials.root
        value = called("" if node.op == "call_module" else node.op, node.target, root, *arguments)
        if not torch.equal(torch.get_rng_state(), state):
            self.random.add(node)
        if [tensor._version for tensor in tensors(arguments)] != before:
            self.changes.add(node)
        return value

    def _as_drawn_for_all(self, node: Node, samples: Samples, value: Any, back: int) -> Any:
        """A random value as if each sample's draws were its own, whoever else is in the batch."""
        if samples == _BATCH or not set(samples) <= set(_BATCH):
            return value
        whole = iter(tensors(self.value(node, _BATCH, back)))
        pairs = iter(zip(*(tensors(v) for v in node.meta["values"]), strict=True))

        def drawn(part: Tensor) -> Tensor:
            of_all, pair = next(whole), next(pairs)
            if not _has_rows(*pair) or tuple(part.shape) != _shape_for(pair, len(samples)):
                return of_all if of_all.shape == part.shape else part
            return _by_sample(of_all, 3)[list(samples)].reshape(part.shape)

        return pytree.tree_map_only(Tensor, drawn, value)

    def _hollow(self, node: Node, count: int) -> Any:
        """Something of the type and shape of what a node gives; its values are not to be read."""
        if not tensors(node.meta["values"][0]):
            return self.size(node, count)
        large = iter(tensors(node.meta["values"][1]))

        def hollow(small: Tensor) -> Tensor:
            return torch.empty(_shape_for((small, next(large)), count), dtype=small.dtype)

        return pytree.tree_map_only(Tensor, hollow, node.meta["values"][0])


class _Noise:
    """Random numbers, as many as asked for, at the cost of copying them."""

    _PERIOD = 65_521  # a prime, so that no two samples are equal

    def __init__(self) -> None:
        self.pools: dict[str, Tensor] = {}
        self.used = 0

    def values(self, shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> Tensor:
        """Fresh numbers: "normal", "positive" (0.05 to 0.95), or "binary" (0 or 1)."""
        if dtype.is_complex:
            real = self.values((*shape, 2), dtype.to_real(), kind)
            return torch.view_as_complex(real).clone()
        count = math.prod(shape)
        self.used = (self.used + 7919) % self._PERIOD
        pool, start = self._pool(kind), self.used
        if start + count > self._PERIOD:
            pool = pool.repeat((start + count) // self._PERIOD + 1)
        return pool[start : start + count].reshape(shape).to(dtype, copy=True)

    def _pool(self, kind: str) -> Tensor:
        if kind not in self.pools:
            generator = torch.Generator().manual_seed(1)
            if kind == "normal":
                pool = torch.randn(self._PERIOD, generator=generator)
            else:
                pool = torch.rand(self._PERIOD, generator=generator)
                pool = pool.round() if kind == "binary" else pool * 0.9 + 0.05
            self.pools[kind] = pool
        return self.pools[kind]


def _is_number(node: Node) -> bool:
    """Whether it is a number that is another one for another number of samples."""
    value = node.meta.get("values", (None,))[0]
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_part(node: Node) -> bool:
    """Whether it takes one value out of several that an operation gave."""
    if node.target is not operator.getitem or not isinstance(node.args[0], Node):
        return False
    return not isinstance(node.args[0].meta["values"][0], Tensor)


def _has_rows(small: Tensor, large: Tensor) -> bool:
    """Whether dimension 0, and no other, grows with the batch; of fake tensors."""
    if small.ndim == 0 or small.ndim != large.ndim or small.shape[1:] != large.shape[1:]:
        return False
    few, many = BATCHES
    return small.shape[0] > 0 and small.shape[0] * many == large.shape[0] * few


def _shape_for(pair: tuple[Tensor, Tensor], count: int) -> tuple[int, ...]:
    """The shape for so many samples of what has these shapes at both batch sizes."""
    small, large = pair
    few, many = BATCHES
    return tuple(
        a + (count - few) * (b - a) // (many - few)
        for a, b in zip(small.shape, large.shape, strict=True)
    )


def _by_sample(value: Tensor, count: int) -> Tensor:
    """[samples, rows of each, ...] of a tensor whose dimension 0 holds the rows of all."""
    return value.reshape(count, -1, *value.shape[1:])


def _shapes(value: Any) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors(value)]


def _alike(first: Any, second: Any, *, rounded: bool = False) -> bool:
    """Whether values are equal, NaN to NaN; bit by bit, or but for rounding."""
    return all(
        a.shape == b.shape and (torch.equal(a, b) or _close(a, b, rounded=rounded))
        for a, b in zip(tensors(first), tensors(second), strict=True)
    )


def _close(a: Tensor, b: Tensor, *, rounded: bool) -> bool:
    if not (a.is_floating_point() or a.is_complex()):
        return False
    if not rounded:
        return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    finite = b[b.isfinite()].abs()
    atol = 1e-4 * finite.amax().item() if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=1e-3, atol=atol, equal_nan=True)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
