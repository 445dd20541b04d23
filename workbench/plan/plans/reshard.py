"""The transfers of a running model from one plan to another, slice by slice.

The placement of every tensor follows from the plans, so all ranks know all transfers without
communication. A rank keeps what it holds already, and receives the rest, each element once, from
the holder that has sent least so far.

    a piece is a grid of cells   between the borders of both plans' pieces, in every dimension
    a move                       one cell from one rank to one other

Optimizer state and gradients in flight are placed like their parameters, so they move alike.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product

from workbench.plan.io.errors import PlanError
from workbench.plan.placement.flow import WeightPlacement
from workbench.plan.placement.placement import Shard
from workbench.plan.plans.plan import Plan

Region = tuple[tuple[int, int], ...]
"""(start, stop) along every dimension of the whole tensor."""


@dataclass(frozen=True)
class Move:
    """A part of a logical tensor that one rank sends to another.

    Attributes:
        region: the part's region of the whole tensor.
    """

    name: str
    region: Region
    source: int
    target: int

    @property
    def numel(self) -> int:
        """The number of elements that are sent."""
        return math.prod(stop - start for start, stop in self.region)

    def parts(self, numel: int) -> Iterator["Move"]:
        """The same part in moves of so many elements at most.

        Args:
            numel: the most elements of one move.
        """
        if self.numel <= numel:
            yield self
            return
        extents = [stop - start for start, stop in self.region]
        dim = next(dim for dim, extent in enumerate(extents) if extent > 1)
        first, last = self.region[dim]
        step = max(1, numel * extents[dim] // self.numel)
        for start in range(first, last, step):
            span = (start, min(start + step, last))
            region = (*self.region[:dim], span, *self.region[dim + 1 :])
            yield from replace(self, region=region).parts(numel)


@dataclass(frozen=True)
class Reshard:
    """The transition from one plan to another of the same model on the same ranks.

    Raises:
        PlanError: the plans are of different models or world sizes.
    """

    before: Plan
    after: Plan

    def __post_init__(self) -> None:
        old, new = self.before, self.after
        if old.graph != new.graph:
            raise PlanError(f"a run of {old.graph!r} cannot go on as {new.graph!r}")
        if old.world_size != new.world_size:
            raise PlanError(
                f"a run on {old.world_size} ranks cannot go on on {new.world_size}: stop it, and "
                f"resume from its checkpoint under the other plan"
            )

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """The moves of every tensor that is placed differently afterwards, in the model's order."""
        sent = [0] * self.before.world_size
        found: list[Move] = []
        for name, old in self.before.flow.weights.items():
            new = self.after.flow.weights[name]
            if (old.placement, old.group_size) != (new.placement, new.group_size):
                found += _moves(name, old, new, sent)
        return tuple(found)

    def residual_moves(self, name: str, replica: int) -> tuple[Move, ...]:
        """The moves of one replica's error-feedback residuals of a parameter.

        They go to the replica of the same number, or, if there are fewer now, modulo their count.
        """
        old, new = self.before.flow.weights[name], self.after.flow.weights[name]
        sent = [0] * self.before.world_size
        return tuple(_moves(name, old, new, sent, replica))

    def residuals_kept(self, name: str) -> bool | None:
        """Whether a parameter's gradient is reduced under both plans; None: not under the old one.

        Where no rank has the same piece nothing is encoded, so there is no residual.
        """
        world = self.before.world_size
        old, new = (p.flow.weights[name].group_size < world for p in (self.before, self.after))
        return new if old else None

    def received(self, rank: int, states: Mapping[str, int], residuals: int = 0) -> int:
        """The number of elements that a rank receives.

        Args:
            states: the number of tensors, for each parameter that has some, that are placed like
                it: the optimizer's, and gradients in flight.
            residuals: the number of gradient sums that have error-feedback residuals.
        """
        left_out = 0
        for name, placed in self.before.flow.weights.items() if residuals else ():
            if placed.trainable and self.residuals_kept(name):
                for replica in range(self.before.world_size // placed.group_size):
                    moves = self.residual_moves(name, replica)
                    left_out += sum(move.numel for move in moves if move.target == rank)
        times = {
            weight.name: 1 + states.get(weight.name, 0)
            for layer in self.before.graph.layers
            for weight in layer.weights
        }
        moved = sum(move.numel * times[move.name] for move in self.moves if move.target == rank)
        return moved + residuals * left_out


def held(placed: WeightPlacement, rank: int, replica: int | None = None) -> tuple[Region, ...]:
    """The regions of a tensor that a rank holds; one for each block, and none for no elements.

    Args:
        replica: the only replica that has the tensor, out of the sets of ranks that hold a whole
            one; None: all have it.
    """
    if replica is not None and rank // placed.group_size != replica:
        return ()
    whole = tuple((0, extent) for extent in placed.shape)
    if not isinstance(placed.placement, Shard):
        return (whole,)
    dim = placed.placement.dim
    spans = placed.placement.spans(rank % placed.group_size)
    return tuple(
        (*whole[:dim], (start, start + length), *whole[dim + 1 :])
        for start, length in spans
        if length > 0
    )


def replica_after(new: WeightPlacement, world_size: int, replica: int | None) -> int | None:
    """The replica that continues with the state of an old one."""
    return None if replica is None else replica % (world_size // new.group_size)


def _moves(
    name: str,
    old: WeightPlacement,
    new: WeightPlacement,
    sent: list[int],
    replica: int | None = None,
) -> list[Move]:
    """The moves of one tensor; `sent` counts what each rank sends."""
    ranks, later = range(len(sent)), replica_after(new, len(sent), replica)
    owned = [held(old, rank, replica) for rank in ranks]
    wanted = [held(new, rank, later) for rank in ranks]
    found = []
    for cell in _cells(old, new):
        holders = [rank for rank in ranks if _lies_in(cell, owned[rank])]
        for target in ranks:
            if target in holders or not _lies_in(cell, wanted[target]):
                continue
            source = min(holders, key=lambda rank: (sent[rank], abs(rank - target), rank))
            move = Move(name, cell, source, target)
            sent[source] += move.numel
            found.append(move)
    return found


def _cells(old: WeightPlacement, new: WeightPlacement) -> list[Region]:
    """The parts of a tensor that no piece of either placement divides."""
    cuts: Mapping[int, set[int]] = {
        dim: {0, extent} for dim, extent in enumerate(old.shape) if extent > 0
    }
    if len(cuts) < len(old.shape):
        return []
    for placed in (old, new):
        if isinstance(placed.placement, Shard):
            for rank in range(placed.group_size):
                for start, length in placed.placement.spans(rank):
                    cuts[placed.placement.dim].update((start, start + length))
    return list(product(*(list(pairwise(sorted(places))) for places in cuts.values())))


def _lies_in(cell: Region, regions: Sequence[Region]) -> bool:
    return any(
        all(start <= a and b <= stop for (a, b), (start, stop) in zip(cell, region, strict=True))
        for region in regions
    )
