"""Checks that each operation of a traced model treats every sample by itself, by trying it.

Ranks hold rows of a batch, so no sample's result may depend on the others, on their number, or on
its place among them. An operation whose kind (`layers.py`) does not promise that is run on small
batches of real values. With samples 0, 1, 2, and 1' and NaN in the place of 1:

    batch        what must hold
    0  1  2      the reference for the others
    0  1' 2      the results of 0 and 2 are the same bit by bit
    0 NaN 2      the same
       1  2      each result is as before, to rounding: neither the number of samples nor the
       1         places of 1 and 2 matter
    none         if it fails without rows, or with one, the layer needs at least one, or two

A number that depends on the batch size may define a shape, and nothing else: with another number in
its place, results of the same shape must have the same values. A user's function is also run on
many samples, since it may compute with their number.

The inputs of an operation are made up (`probe.py`). If it fails on random numbers (it needs
probabilities, for example), it gets numbers of other kinds, or those that the operations before it
compute. An operation that cannot be tried is refused.

The backward pass of an operation is tried as well (`gradients.py`).
"""

import operator
import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.fx
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_arg

from workbench.model.build import code_of
from workbench.model.errors import OperationError
from workbench.model.record.batch import (
    NUMBER,
    REMEDY,
    MovedModule,
    is_users_function,
    name_of,
    shape_for,
    tensors,
)
from workbench.model.record.layers import kind_of
from workbench.model.trials.gradients import needs_trial, show_backward
from workbench.model.trials.probe import (
    BATCH,
    CHANGED,
    NAN,
    Draw,
    Probe,
    Samples,
    Traced,
    alike,
    by_sample,
    has_rows,
    of_samples,
)
from workbench.plan.graph.graph import Input

_MANY = BATCH * 6
_MOVED = ((0, CHANGED, 2), (0, NAN, 2))
_SEEDS = range(4)  # of a random permutation, one may well leave the changed sample in its place

_DRAWS = (
    Draw("normal", midst=True),
    Draw("normal", midst=False),
    Draw("positive", midst=True),
    Draw("positive", midst=False),
    Draw("binary", midst=False),
)

_HALVES = (torch.bfloat16, torch.float16)


class _Undecided(Exception):
    """With these numbers, the operation shows nothing."""


def show_independence(
    graph: torch.fx.Graph,
    root: nn.Module,
    constants: dict[str, Tensor] | None = None,
    inputs: Mapping[str, Input] = MappingProxyType({}),
) -> Traced:
    """Tries every operation that could mix samples, and finds the fewest rows that each takes.

    Sets `meta["least_rows"]` and `meta["least_rows_half"]` of every node (see `plan.graph.Layer`).

    Returns:
        What is known of the nodes now.

    Raises:
        OperationError: an operation mixes samples, or cannot be tried.
    """
    trials = _Trials(Traced(root, constants or {}, inputs))
    returned = next(node for node in graph.nodes if node.op == "output").all_input_nodes
    with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of made-up values
        for node in graph.nodes:
            least = trials.least_rows(node, node in returned)
            node.meta["least_rows"], node.meta["least_rows_half"] = least
    return trials.traced


def constants_of(module: nn.Module) -> dict[str, Tensor]:
    """The values of a module's parameters and buffers that hold integers, such as indices."""
    return {
        name: tensor.detach().cpu()
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        if not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta)
    }


class Least(NamedTuple):
    """The fewest rows that an operation takes: in any precision, and under autocast."""

    rows: int
    half: int


ANY = Least(0, 0)


class _Trials:
    """Tries operations, each kind of call once."""

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.shown: dict[Any, Least] = {}

    def least_rows(self, node: Node, returned: bool) -> Least:
        """The fewest rows that an operation takes, after checking that it mixes none."""
        if node.op in ("placeholder", "output", "get_attr"):
            self.traced.varies[node] = False
            return ANY
        module = (
            self.traced.root.get_submodule(str(node.target)) if node.op == "call_module" else None
        )
        self.traced.kinds[node] = kind_of(node, module)
        self.traced.varies[node] = not node.meta["depends"] and any(
            source.meta["depends"] or self.traced.varies[source] for source in node.all_input_nodes
        )
        numbers = [n for n in node.all_input_nodes if _is_number(n)]
        made = node.meta["rows"] > 0 and bool(numbers)
        if self.traced.kinds[node] == "size" or not (node.meta["depends"] or returned or made):
            return ANY
        if node.meta["depends"] and self._promised(node):
            return ANY
        call = self._call(node)
        if call is None or call not in self.shown:
            least = self._try(node, numbers, only_numbers=not (node.meta["depends"] or returned))
            if call is None:
                return least
            self.shown[call] = least
        return self.shown[call]

    def _promised(self, node: Node) -> bool:
        """Whether the node's kind suffices as a promise: it reads activations and parameters."""
        if _is_part(node):
            return True  # of a value that was checked as a whole
        # Of an embedding it is tried, too, whether its table has all the numbers that it is given.
        return self.traced.kinds[node] not in ("op", "embedding") and all(
            source.op == "get_attr" or source.meta["depends"] for source in node.all_input_nodes
        )

    def _try(self, node: Node, numbers: list[Node], *, only_numbers: bool) -> Least:
        errors: list[Exception] = []
        for draw in _DRAWS:
            trial = _Trial(node, draw, self.traced)
            try:
                trial.show_numbers(numbers)
                return ANY if only_numbers else trial.show()
            except _Undecided as error:
                errors.append(error)
            finally:
                trial.forget()
        raise OperationError(
            node,
            f"{trial.name} was tried on random values, to see whether it treats each sample by "
            f"itself, and it {errors[0]}. What cannot be tried is not distributed: use an "
            "operation that takes any values, or a layer of nn that does the same",
        )

    def _call(self, node: Node) -> Any:
        """A key of equal calls; None where there is none."""
        target: Any = node.target
        if node.op == "call_module":
            target = code_of(self.traced.root.get_submodule(str(target)))
            if target is None:
                return None
        places: dict[Node, int] = {}

        def described(source: Node) -> str:
            place = places.setdefault(source, len(places))
            if self.traced.kinds.get(source) == "size" and not tensors(source.meta["values"][0]):
                values = [Probe(node, _DRAWS[0], self.traced).size(source, n) for n in range(4)]
                return f"<{place} {values}>"
            if not self.traced.made_up(source):
                raise _Undecided
            shapes = [(tuple(v.shape), v.dtype) for v in source.meta["values"]]
            return f"<{place} {shapes} {source.meta['depends']}>"

        try:
            arguments = map_arg((node.args, node.kwargs), described)
        except Exception:  # a size that no sample has, or values that have to be computed
            return None
        return node.op, target, repr(arguments)


class _Trial(Probe):
    """One operation with one kind of numbers."""

    def __init__(self, node: Node, draw: Draw, traced: Traced) -> None:
        super().__init__(node, draw, traced)
        module = traced.root.get_submodule(str(node.target)) if node.op == "call_module" else None
        called = module.inner if isinstance(module, MovedModule) else module
        self.name = name_of(node) if called is None else type(called).__name__

    def show(self) -> Least:
        """The fewest rows that the operation takes.

        Raises:
            OperationError: the operation mixes samples.
            _Undecided: these numbers show nothing.
        """
        first = self._all_samples()
        for seed in _SEEDS if self.node.meta["draws"] else _SEEDS[:1]:
            self._show_others_stay(seed)
        self._same((1, 2), first)
        if is_users_function(self.node.target):
            self._same(_MANY, first)
        if needs_trial(self):
            self._show_backward()
        try:
            alone = self.value(self.node, (1,))
        except Exception:  # whatever it is that an operation raises for one sample
            return Least(2, 2)
        self._same_values((1,), alone, first)
        try:
            none = self.value(self.node, ())
        except Exception:
            return Least(1, 1)
        if _shapes(none) != [shape_for(pair, 0) for pair in self.leaves()]:
            return Least(1, 1)
        return Least(0, int(any(map(self._types_differ, _HALVES))))

    def _show_backward(self) -> None:
        try:
            show_backward(self, self.name)
        except OperationError:
            raise
        except Exception as error:  # whatever it is that these numbers were wrong for
            raise _Undecided(f"failed in its backward pass ({_one_line(error)})") from None

    def _types_differ(self, half: torch.dtype) -> bool:
        """Whether no rows give another type than some under autocast, as in torch's LSTM.

        The operations before it may give it either type.
        """
        for dtype in (torch.float32, half):

            def types(rows: Samples, dtype: torch.dtype = dtype) -> list[torch.dtype]:
                given = {
                    source: value.to(dtype)
                    for source in self.node.all_input_nodes
                    if isinstance(value := self.value(source, rows, 1), Tensor)
                    and source.meta["depends"]
                    and value.dtype == torch.float32
                }
                with torch.autocast("cpu", half):
                    return [leaf.dtype for leaf in tensors(self.run(self.node, rows, given))]

            try:
                if types(()) != types(BATCH):
                    return True
            except RuntimeError:  # no kernel for these types: here, or, as autocast is, at all
                continue
        return False

    def show_numbers(self, numbers: Sequence[Node]) -> None:
        """Checks that other numbers of the batch give no other values of the same shape.

        Raises:
            OperationError: they do.
        """
        if not numbers:
            return
        first = self._all_samples()
        for number in numbers:
            for other in (number.meta["values"][1] + 1, 2 * number.meta["values"][1] + 5):
                try:
                    value = self.run(self.node, BATCH, {number: other})
                except Exception:  # the number is a size, and this one is not the batch's
                    continue
                if _shapes(value) == _shapes(first) and not alike(value, first, rounded=True):
                    raise OperationError(
                        self.node,
                        f"{self.name} takes a number that depends on the batch size, "
                        f"which differs between ranks. {REMEDY}",
                    )

    def _all_samples(self) -> Any:
        try:
            value = self.of_all()
        except Exception as error:  # whatever it is that these numbers were wrong for
            raise _Undecided(f"failed ({_one_line(error)})") from None
        floats = [leaf for leaf in tensors(value) if leaf.is_floating_point() and leaf.numel()]
        if floats and all(leaf.isnan().all() for leaf in floats):
            raise _Undecided("gave NaN alone")
        return value

    def _show_others_stay(self, seed: int) -> None:
        """Checks that samples 0 and 2 do not change when sample 1 does."""
        first = self.run(self.node, BATCH, {}, seed=seed) if seed else self.value(self.node, BATCH)
        for samples in _MOVED:
            try:
                moved = self.run(self.node, samples, {}, seed=seed)
            except Exception as error:
                if NAN in samples:
                    continue
                raise _Undecided(f"failed ({_one_line(error)})") from None
            for a, b, (small, large) in zip(
                tensors(first), tensors(moved), self.leaves(), strict=True
            ):
                if not has_rows(small, large):
                    continue  # if it is read, it is refused
                a, b = by_sample(a, 3), by_sample(b, 3)
                if not (alike(a[0], b[0]) and alike(a[2], b[2])):
                    self._refuse_mixing(seed, first)

    def _refuse_mixing(self, seed: int, first: Any) -> None:
        if not alike(self.run(self.node, BATCH, {}, seed=seed), first):
            raise OperationError(
                self.node,
                f"{self.name} gives other results for the same values and the same state "
                "of torch's generator: random numbers have to be torch's own",
            )
        raise OperationError(
            self.node,
            f"{self.name} mixes samples: as one of three was changed, the results of "
            f"the others changed. {self._remedy()}",
        )

    def _same(self, samples: Samples, first: Any) -> None:
        try:
            value = self.value(self.node, samples)
        except Exception as error:
            raise OperationError(
                self.node,
                f"{self.name} takes a batch of {len(BATCH)} samples, and fails for one "
                f"of {len(samples)} ({_one_line(error)}). {self._remedy()}",
            ) from None
        self._same_values(samples, value, first)

    def _same_values(self, samples: Samples, value: Any, first: Any) -> None:
        """Checks that the results for some samples are those that were among `first`."""
        for part, whole, (small, large) in zip(
            tensors(value), tensors(first), self.leaves(), strict=True
        ):
            if not has_rows(small, large):
                continue
            due = shape_for((small, large), len(samples))
            if tuple(part.shape) != due:
                hint = (
                    "name the dimensions, squeeze((2, 3)), or use flatten(1)"
                    if "squeeze" in self.name
                    else self._remedy()
                )
                raise OperationError(
                    self.node,
                    f"{self.name} gives shape {tuple(part.shape)} for a batch of {len(samples)}, "
                    f"where {due} is due, and a rank may have so few rows: {hint}",
                )
            expected = of_samples(by_sample(whole, 3), samples).reshape(part.shape)
            if not alike(part, expected, rounded=True):
                raise OperationError(
                    self.node,
                    f"{self.name} gives a sample other results where other samples, or fewer, are "
                    "in the batch: they depend on the batch size or on the sample's place. "
                    f"{self._remedy()}",
                )

    def _remedy(self) -> str:
        if self.node.op == "call_module":
            module = self.traced.root.get_submodule(str(self.node.target))
            if any(getattr(part, "batch_first", True) is False for part in module.modules()):
                return "It takes the batch as its second dimension: build it with batch_first=True"
        if any(_is_number(source) for source in self.node.all_input_nodes):
            return f"{REMEDY}. {NUMBER}"
        return REMEDY


def _is_number(node: Node) -> bool:
    """Whether a node's value is a number, which may depend on the number of samples."""
    value = node.meta.get("values", (None,))[0]
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return plain and not node.meta["of_type"]


def _is_part(node: Node) -> bool:
    """Whether a node takes one value out of several that an operation gave."""
    if node.target is not operator.getitem or not isinstance(node.args[0], Node):
        return False
    return not isinstance(node.args[0].meta["values"][0], Tensor)


def _shapes(value: Any) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors(value)]


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
