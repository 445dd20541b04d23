"""Layouts of activations over the world, and the conversions between two layers.

A layout is a placement over every shard group of one size. Four forms occur:

    ROWS           group size 1: every rank holds its own rows of the batch
    R over k       every rank of a group holds all rows of the group
    S(d) over k    the group's rows, sharded along dimension d
    P over k       the group's rows, as partial sums

The gradient of an activation has the activation's layout (of `P`: `R`), with one exception: where
replicated input meets work that differs by rank, its gradient arrives as partial sums. Such an edge
says `gradient="partial"`, and its crossing sums in the backward pass.
"""

import math
from dataclasses import dataclass
from typing import Literal

from workbench.plan.placement.placement import Partial, Placement, Replicate, Shard

Gradient = Literal["same", "partial"]


@dataclass(frozen=True)
class Layout:
    """A placement over the shard groups of `group_size` ranks."""

    group_size: int
    placement: Placement

    def __str__(self) -> str:
        return "own rows" if self == ROWS else f"{self.placement} over {self.group_size}"


ROWS = Layout(1, Replicate())


def over(group_size: int, placement: Placement) -> Layout:
    """The layout; a group of one rank always means `ROWS`."""
    return ROWS if group_size == 1 else Layout(group_size, placement)


@dataclass(frozen=True)
class Conversion:
    """One change of layout on an edge of the graph.

    Attributes:
        source: the layout before.
        target: the layout after.
        gradient: the form in which the gradient arrives from the readers: "same" as the target's
            layout, or "partial" sums.
        shape: the shape of the tensor for one sample.
        rows: the rows of dimension 0 for each sample.
        blocks: the equal blocks of the cut features before and after, which are cut alike
            (`Shard.blocks`); the layouts themselves say the lengths of the pieces.
    """

    source: Layout
    target: Layout
    gradient: Gradient
    shape: tuple[int, ...]
    rows: int = 1
    blocks: tuple[int, int] = (1, 1)

    @property
    def group_size(self) -> int:
        """The size of the groups it communicates in: one layout is ROWS, or both agree."""
        return max(self.source.group_size, self.target.group_size)

    @property
    def name(self) -> str:
        """The operation of the forward pass: the collective, and the dimension that it moves."""
        source, target = self.source, self.target
        cut = target.placement if isinstance(target.placement, Shard) else source.placement
        tokens = len(self.shape) == 2 and isinstance(cut, Shard) and cut.dim == 1
        pieces = "tokens" if tokens else "features"
        match source.placement, target.placement:
            case _ if source == target:
                return "copy_to"
            case Partial(), Replicate() if target != ROWS:
                return "all_reduce"
            case Partial(), _:
                return "reduce_scatter_rows" if target == ROWS else f"reduce_scatter_{pieces}"
            case Replicate(), Replicate():
                return "all_gather_rows" if source == ROWS else "slice_rows"
            case Shard(), Replicate() if target != ROWS:
                return f"all_gather_{pieces}"
            case Replicate(), Shard() if source != ROWS:
                return f"slice_{pieces}"
            case _:
                return "all_to_all"


def route(source: Layout, target: Layout) -> tuple[Layout, ...]:
    """The layouts on the way: one step inside groups of one size, else through ROWS."""
    if source == target:
        return ()
    one_block = not any(
        isinstance(layout.placement, Shard) and layout.placement.blocks > 1
        for layout in (source, target)
    )
    if ROWS in (source, target) or (source.group_size == target.group_size and one_block):
        return (target,)
    return (ROWS, target)


# Elements received forward, in multiples of (k - 1) times a rank's own rows of the tensor.
_VOLUME = {
    "copy_to": 0.0,
    "slice_rows": 0.0,
    "slice_features": 0.0,
    "slice_tokens": 0.0,
    "all_gather_rows": 1.0,
    "all_gather_features": 1.0,
    "all_gather_tokens": 1.0,
    "reduce_scatter_rows": 1.0,
    "reduce_scatter_features": 1.0,
    "reduce_scatter_tokens": 1.0,
    "all_reduce": 2.0,
}


def volume(source: Layout, target: Layout, shape: tuple[int, ...]) -> float:
    """Elements that a rank receives for each of its own rows, forward; for comparing choices.

    Source: the cost model of SplitBrain (arXiv:2112.15317) as derived for equal pieces.
    """
    total = 0.0
    for target_ in route(source, target):
        step = Conversion(source, target_, "same", shape)
        k = step.group_size
        share = _VOLUME.get(step.name, 1 / k)  # in an all-to-all a rank keeps 1/k of its data
        total += share * (k - 1) * math.prod(shape)
        source = target_
    return total
