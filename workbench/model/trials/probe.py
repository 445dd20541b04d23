"""The results of a traced model's operations for real values, which are made up where possible.

The inputs of an operation are made up by their shape: an activation of random numbers for each
sample. Only values that cannot be made up are computed: indices, masks, and values that depend on
the number of samples (`torch.arange(len(x))`).
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from workbench.model.build import with_tensors
from workbench.model.record.batch import BATCHES, called, cleared, shape_for, tensors, versions
from workbench.model.record.draws import Draws, Held, drawing, placed_bits
from workbench.plan.graph.graph import Input

Samples = tuple[int, ...]

BATCH: Samples = (0, 1, 2)
CHANGED, NAN = 3, 4  # what may stand in the place of sample 1

# The kinds whose results are computed, since they are cheap; those of others are made up.
_CHEAP = {"elementwise", "pool", "flatten", "add", "mul", "op"}
_AS_IT_IS = {"dropout", "stochastic_depth"}
_FURTHEST = 40  # operations that are looked back through


@dataclass(frozen=True)
class Draw:
    """The kind of random numbers, and whether activations inside the model are made up too."""

    kind: str
    midst: bool


class Noise:
    """Random numbers, as many as needed, at the cost of copying them."""

    _PERIOD = 65_521  # a prime, so that no two samples are equal

    def __init__(self) -> None:
        self.pools: dict[str, Tensor] = {}
        self.used = 0

    def values(self, shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> Tensor:
        """New numbers: "normal", "positive" (0.05 to 0.95), or "binary" (0 or 1)."""
        if dtype.is_complex:
            real = self.values((*shape, 2), dtype.to_real(), kind)
            return torch.view_as_complex(real).clone()
        count = math.prod(shape)
        self.used = (self.used + 7919) % self._PERIOD
        pool, start = self._pool(kind), self.used
        if start + count > self._PERIOD:
            pool = pool.repeat((start + count) // self._PERIOD + 1)
        # Memory of its own begins where vectors do: elsewhere, kernels round otherwise.
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


@dataclass
class Traced:
    """A traced model, with what is known about its nodes so far.

    Attributes:
        root: the module that was traced.
        constants: the values of parameters and buffers that hold integers.
        inputs: what the model reads, by the names of forward's parameters.
        kinds: the kinds of nodes that are neither inputs nor parameters.
        varies: whether each node depends on the number of samples and on no sample.
        noise: the source of random numbers.
    """

    root: nn.Module
    constants: dict[str, Tensor]
    inputs: Mapping[str, Input]
    kinds: dict[Node, str] = field(default_factory=dict)
    varies: dict[Node, bool] = field(default_factory=dict)
    noise: Noise = field(default_factory=Noise)

    def made_up(self, source: Node) -> bool:
        """Whether any numbers may replace a node's value."""
        value = source.meta["values"][0]
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            return False
        return source.meta["depends"] or not self.varies[source]


class TrialDraws(Draws):
    """The draws of one operation in a trial, which depend on its seed and on the sample."""

    def __init__(
        self, dims: Sequence[int], samples: Samples, seed: int, held: Held | None = None
    ) -> None:
        super().__init__()
        self.seed, self.held, self._coming = seed, held, enumerate(dims)
        places = [1 if sample in (CHANGED, NAN) else sample for sample in samples]
        self.samples = torch.tensor(places, dtype=torch.int64)

    def bits(self, shape: torch.Size, device: torch.device) -> Tensor:
        """64 bits for each element of the next tensor drawn."""
        index, dim = next(self._coming)
        return placed_bits(1000 * self.seed + index, shape, dim, self.samples, self.held)


class Probe:
    """The results of one operation, and of those before it, for one kind of numbers."""

    def __init__(self, node: Node, draw: Draw, traced: Traced) -> None:
        self.node, self.draw, self.traced = node, draw, traced
        self._made: dict[Node, Tensor] = {}
        self._given: dict[tuple[Node, Samples], Any] = {}
        self._modules: dict[str, nn.Module] = {}
        self._changes: set[Node] = set()  # those that write into what they read

    def forget(self) -> None:
        """Releases all values, which a caught error might keep alive."""
        self._made.clear()
        self._given.clear()
        self._modules.clear()

    def value(self, node: Node, samples: Samples, back: int = 0) -> Any:
        """The value of a node for these samples."""
        if (node, samples) in self._given:
            return self._given[node, samples]
        if node.op == "get_attr":
            if node not in self._made:
                self._made[node] = self._real(str(node.target), node.meta["values"][0])
            value: Any = self._made[node]
        elif self.traced.kinds.get(node) == "size":
            value = self.size(node, len(samples))
        elif self._to_be_made_up(node, back):
            value = self._made_up(node, samples)
        elif self.traced.kinds[node] in _AS_IT_IS:
            value = self.value(node.all_input_nodes[0], samples, back + 1)
        else:
            value = self.run(node, samples, {}, back)
        self._given[node, samples] = value
        return value

    def of_all(self) -> Any:
        """The operation's value for all samples, once nothing writes into it any more."""
        while True:
            known = len(self._changes)
            value = self.value(self.node, BATCH)
            if len(self._changes) == known:
                return value
            self._given.clear()  # from now on they write into copies
            self._made.clear()

    def leaves(self) -> list[tuple[Tensor, Tensor]]:
        """The fake tensors that the operation gives, at both batch sizes."""
        small, large = self.node.meta["values"]
        return list(zip(tensors(small), tensors(large), strict=True))

    def module(self) -> nn.Module | None:
        """The module that the operation calls, with real values; None: it calls none."""
        return self._module(str(self.node.target)) if self.node.op == "call_module" else None

    def size(self, node: Node, count: int) -> Any:
        """A value that is no tensor, for a batch of so many samples."""
        if count in BATCHES:
            return node.meta["values"][BATCHES.index(count)]
        arguments = map_arg((node.args, node.kwargs), lambda source: self._hollow(source, count))
        return called(node.op, node.target, self.traced.root, *arguments)

    def _to_be_made_up(self, node: Node, back: int) -> bool:
        if node.op == "placeholder":
            return True
        if node is self.node or not self.traced.made_up(node):
            return False
        given = self.traced.kinds[node] in _CHEAP | _AS_IT_IS
        return self.draw.midst or not given or back > _FURTHEST

    def _made_up(self, node: Node, samples: Samples) -> Tensor:
        small, large = node.meta["values"]
        if not node.meta["depends"]:
            if node not in self._made:
                self._made[node] = self.traced.noise.values(
                    tuple(small.shape), small.dtype, "normal"
                )
            return self._made[node]
        if node not in self._made:
            self._made[node] = self._of_each_sample(node, tuple(shape_for((small, large), 1)))
        made = self._made[node]
        return of_samples(made, samples).flatten(0, 1)

    def _of_each_sample(self, node: Node, shape: tuple[int, ...]) -> Tensor:
        """The numbers of samples 0, 1 and 2, and of those that may stand in the place of 1."""
        dtype, noise = node.meta["values"][0].dtype, self.traced.noise
        given = self.traced.inputs.get(str(node.target)) if node.op == "placeholder" else None
        if given is not None and given.vocabulary is not None:
            return _tokens(noise.values((5, *shape), torch.float64, "positive"), given.vocabulary)
        if dtype == torch.bool:
            return _mask(noise.values((5, *shape), torch.float64, "positive"))
        made = noise.values((5, *shape), dtype, self.draw.kind)
        if self.draw.kind == "normal":
            made[CHANGED].mul_(3).add_(1)
        elif self.draw.kind == "binary":
            made[CHANGED] = 1 - made[1]
        made[NAN] = math.nan
        return made

    def _real(self, name: str, like: Tensor) -> Tensor:
        """A value for a parameter or buffer of the model."""
        if not (like.is_floating_point() or like.is_complex()):
            known = self.traced.constants.get(name)
            if known is not None:
                return known.clone()
            return torch.full(like.shape, self.draw.kind != "normal", dtype=like.dtype)
        kind = "normal" if self.draw.kind == "binary" else self.draw.kind
        value = self.traced.noise.values(tuple(like.shape), like.dtype, kind)
        return value.mul_(like.shape[-1] ** -0.5) if like.ndim > 1 and like.numel() else value

    def _module(self, path: str) -> nn.Module:
        """The module with real values instead of fake ones."""
        if path not in self._modules:
            module = self.traced.root.get_submodule(path)
            held = [*module.named_parameters(), *module.named_buffers()]
            names = {id(tensor): f"{path}.{name}" for name, tensor in held}

            def real(tensor: Tensor) -> Tensor:
                return self._real(names.get(id(tensor), ""), tensor)

            self._modules[path] = with_tensors(module, real)
        return self._modules[path]

    def run(
        self,
        node: Node,
        samples: Samples,
        instead: dict[Node, Any],
        back: int = 0,
        *,
        seed: int = 0,
    ) -> Any:
        """Runs an operation, and notes whether it wrote in place.

        Its draws depend on the seed and on the samples, as in training.
        """

        def read(source: Node) -> Any:
            if source in instead:
                return instead[source]
            return self.value(source, samples, back + 1)

        arguments = map_arg((node.args, node.kwargs), read)
        if node in self._changes:
            arguments = pytree.tree_map_only(Tensor, torch.clone, arguments)
        before = versions(arguments)
        root = self._module(str(node.target)) if node.op == "call_module" else self.traced.root
        kind = "" if node.op == "call_module" else node.op
        draws = TrialDraws(node.meta["draws"], samples, seed) if node.meta["draws"] else None
        with nullcontext() if draws is None else drawing(draws):
            value = called(kind, node.target, root, *arguments)
        value = cleared(node, arguments[0], value)
        written = versions(arguments) != before
        if written:
            self._changes.add(node)
        return value

    def _hollow(self, node: Node, count: int) -> Any:
        """A tensor of the type and shape of a node's value; its values must not be read."""
        if not tensors(node.meta["values"][0]):
            return self.size(node, count)
        large = iter(tensors(node.meta["values"][1]))

        def hollow(small: Tensor) -> Tensor:
            return torch.empty(shape_for((small, next(large)), count), dtype=small.dtype)

        return pytree.tree_map_only(Tensor, hollow, node.meta["values"][0])


def _tokens(drawn: Tensor, vocabulary: int) -> Tensor:
    """Whole numbers below `vocabulary`, of numbers between 0 and 1 [samples, ...]."""
    made = (drawn * vocabulary).long()
    made[CHANGED] = torch.where(made[CHANGED] == made[1], made[1] + 1, made[CHANGED]) % vocabulary
    made[2].view(-1)[0] = vocabulary - 1  # which every table has to have
    return made


def _mask(drawn: Tensor) -> Tensor:
    """Random truths, of numbers between 0 and 1 [samples, rows, ...].

    In each line of the last dimension the first is true: of a line of scores that are all masked,
    the softmax is no number. Only the single truth of a sample may be either.
    """
    made = drawn > drawn.mean()
    made[CHANGED] = ~made[1]
    if made.ndim > 2 and made.shape[-1] > 1:
        made[..., 0] = True
    return made


def has_rows(small: Tensor, large: Tensor) -> bool:
    """Whether dimension 0, and no other, grows with the batch; for fake tensors."""
    if small.ndim == 0 or small.ndim != large.ndim or small.shape[1:] != large.shape[1:]:
        return False
    few, many = BATCHES
    return small.shape[0] > 0 and small.shape[0] * many == large.shape[0] * few


def by_sample(value: Tensor, count: int) -> Tensor:
    """A tensor [samples x rows, ...] as [samples, rows, ...]."""
    return value.unflatten(0, (count, len(value) // count))


def of_samples(values: Tensor, samples: Samples) -> Tensor:
    """The selected samples of [samples, ...]; a view if they are consecutive."""
    first = samples[0] if samples else 0
    if samples == tuple(range(first, first + len(samples))):
        return values[first : first + len(samples)]
    return values[list(samples)]


def alike(first: Any, second: Any, *, rounded: bool = False) -> bool:
    """Whether values are equal, NaN to NaN; bit by bit, or up to rounding."""
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
