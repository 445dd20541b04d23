"""One operation, run on pieces of what it reads: whether it gives pieces of its result."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from workbench.model.tracing.batch import called, cleared, tensors
from workbench.model.tracing.draws import Held, drawing
from workbench.model.tracing.trials.probe import Draw, Probe, Samples, Traced, TrialDraws, alike
from workbench.plan.graph.saved import Propagation

# A dimension, counted with the batch, and the equal blocks of it that are cut alike.
Cut = tuple[int, ...]

_SAMPLES: Samples = (1, 2)
_ALONE = (1, 1)  # (first, number) of the piece that is tried by itself


class PieceTrial:
    """One operation, run on pieces of what it reads."""

    def __init__(self, node: Node, traced: Traced) -> None:
        self.node, self.traced = node, traced
        self.probe = Probe(node, Draw("normal", midst=True), traced)
        self.sources = reader_inputs(node)
        self.lead = next(filter(has_rows, self.sources), None)
        self.leaves, self.form = pytree.tree_flatten((node.args, node.kwargs))

    def ways(self, cuts: Sequence[Cut], most: int) -> Iterator[Propagation]:
        """The ways in which the output is cut where the inputs are cut so, into `most` or less."""
        if self.whole is None or any(bool(one.isnan().any()) for one in tensors(self.whole)):
            return  # numbers that the operation does not take: they show nothing
        shape = first_tensor(self.node).shape
        outputs: dict[int, list[Cut]] = {}  # by the most pieces that they can have
        for dim in range(1, len(shape)):
            for blocks in sorted({1, *(cut[1] for cut in cuts if cut)}):
                if shape[dim] % blocks == 0:
                    pieces = math.gcd(most, shape[dim] // blocks)
                    outputs.setdefault(pieces, []).append((dim, blocks))
        for pieces in outputs.keys() - {1}:
            for scaled in self._counting(pieces):
                for drawn in range(1, len(shape)) if self.node.meta["draws"] else (0,):
                    parts = [Held(drawn, *part, pieces) for part in (_ALONE, (0, pieces - 1))]
                    given = [self._of(cuts, part, scaled) for part in parts]
                    for output in outputs[pieces]:
                        wanted = [_piece(self.whole, output, part) for part in parts]
                        if all(map(_equal, given, wanted)) and self._apart(cuts, output, pieces):
                            yield Propagation(tuple(cuts), output, pieces, scaled, drawn)

    @cached_property
    def whole(self) -> Any:
        """The operation's result for all of what it reads; None: it fails on made-up numbers."""
        try:
            return self._run({source: self._value(source) for source in self.sources})
        except Exception:  # whatever it is that an operation raises
            return None

    def _apart(self, cuts: Sequence[Cut], output: Cut, pieces: int) -> bool:
        """Whether a piece of the result stays as it is, bit by bit, where the others are NaN."""
        given = {}
        for source, cut in zip(self.sources, cuts, strict=True):
            value = self._value(source)
            given[source] = _alone(value, cut, pieces) if cut else value
        part = Held(0, *_ALONE, pieces)
        return alike(_piece(self._run(given), output, part), _piece(self.whole, output, part))

    def _of(self, cuts: Sequence[Cut], part: Held, scaled: tuple[int, ...]) -> Any:
        """The operation's result for these pieces; None: it takes none."""
        given = {}
        for source, cut in zip(self.sources, cuts, strict=True):
            value = self._value(source)
            given[source] = _piece(value, cut, part) if cut else value
        try:
            return self._run(given, scaled, part)
        except Exception:  # whatever it is that an operation raises for another shape
            return None

    def _run(
        self, given: Mapping[Node, Any], scaled: tuple[int, ...] = (), part: Held | None = None
    ) -> Any:
        leaves = [
            leaf * part.number // part.pieces if part and place in scaled else leaf
            for place, leaf in enumerate(self.leaves)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.form)

        def read(source: Node) -> Any:  # a copy, since some operations write into what they read
            return pytree.tree_map_only(Tensor, torch.clone, given[source])

        dims = self.node.meta["draws"]
        with drawing(TrialDraws(dims, _SAMPLES, 0, part)) if dims else nullcontext():
            read_args, read_kwargs = map_arg((args, kwargs), read)
            module, target = self.probe.module(), self.node.target
            root, kind = module or self.traced.root, "" if module else self.node.op
            value = called(kind, target, root, read_args, read_kwargs)
            return cleared(self.node, read_args, value)

    def _value(self, source: Node) -> Any:
        return self.probe.value(source, _SAMPLES)

    def _counting(self, pieces: int) -> Iterator[tuple[int, ...]]:
        """The places of arguments that might count what is cut: none, one, or several equal."""
        yield ()
        numbers: dict[int, list[int]] = {}
        for place, leaf in enumerate(self.leaves):
            if isinstance(leaf, int) and not isinstance(leaf, bool) and leaf > 0:
                if leaf % pieces == 0:
                    numbers.setdefault(leaf, []).append(place)
        for places in numbers.values():
            yield from ((place,) for place in places)
            if len(places) > 1:
                yield tuple(places)


def reader_inputs(node: Node) -> list[Node]:
    """What a node reads, in the order of its arguments: `plan.graph.Layer.inputs` has the same."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found


def has_rows(source: Node) -> bool:
    """Whether it is a tensor, or several, with the rows of the batch."""
    return bool(tensors(source.meta["values"][0])) and source.meta["rows"] == 1


def first_tensor(node: Node) -> Tensor:
    """The value of a node, or the first of several tensors."""
    return tensors(node.meta["values"][0])[0]


def _piece(value: Any, cut: Cut, part: Held) -> Any:
    """These pieces of every tensor in a value; None: it has no such dimension."""
    dim, blocks = cut
    if any(t.ndim <= dim or t.shape[dim] % (blocks * part.pieces) for t in tensors(value)):
        return None

    def taken(whole: Tensor) -> Tensor:
        each = whole.shape[dim] // (blocks * part.pieces)
        split = whole.unflatten(dim, (blocks, part.pieces, each))
        split = split.narrow(dim + 1, part.first, part.number)
        return split.flatten(dim, dim + 2).contiguous()

    return pytree.tree_map_only(Tensor, taken, value)


def _alone(value: Any, cut: Cut, pieces: int) -> Any:
    """A value of which this piece stays, and all others are NaN."""
    dim, blocks = cut

    def poisoned(whole: Tensor) -> Tensor:
        if not whole.is_floating_point():
            return whole
        each = whole.shape[dim] // (blocks * pieces)
        split = whole.unflatten(dim, (blocks, pieces, each))
        kept = torch.full_like(split, math.nan)
        kept.narrow(dim + 1, *_ALONE).copy_(split.narrow(dim + 1, *_ALONE))
        return kept.flatten(dim, dim + 2)

    return pytree.tree_map_only(Tensor, poisoned, value)


def _equal(first: Any, second: Any) -> bool:
    """Whether both are there, and equal up to rounding."""
    if first is None or second is None or len(tensors(first)) != len(tensors(second)):
        return False
    return alike(first, second, rounded=True)
