"""The collectives of one conversion, forward and backward.

conversion              forward          backward
R -> R (copy)           -                all-reduce
P -> R                  all-reduce       - (of summands: all-reduce)
P -> S, P -> rows       reduce-scatter   all-gather
R -> S, R -> rows       -                all-gather
S -> R, rows -> R       all-gather       - (of summands: reduce-scatter)
S -> S', rows <-> S     all-to-all       all-to-all
"""

import math
from dataclasses import dataclass

import numpy as np

from workbench.plan.layout import ROWS, Conversion, Layout
from workbench.plan.mesh import shard_groups
from workbench.plan.placement import Partial, Replicate, Shard
from workbench.predict import received
from workbench.predict.givers import Giver
from workbench.predict.received import Received
from workbench.predict.summing import Summing
from workbench.program.rows import Rows

Call = tuple[str, Received]


@dataclass(frozen=True)
class Crossing:
    """What a conversion calls; None: nothing."""

    forward: Call | None = None
    backward: Call | None = None


def crossing_of(step: Conversion, rows: Rows, itemsize: int, summing: Summing) -> Crossing:
    """The collectives of a conversion.

    Args:
        step: from which layout to which.
        rows: of the pass.
        itemsize: bytes of an element.
        summing: knows what all-reduces bring.
    """
    groups = shard_groups(step.group_size, rows.world_size)
    numel = rows.elements(step.target, step.shape, step.rows)
    before = rows.elements(step.source, step.shape, step.rows) * itemsize
    after = numel * itemsize
    summands = step.gradient == "partial"
    match step.source.placement, step.target.placement:
        case _ if step.source == step.target:
            return Crossing(backward=("all_reduce", summing.waited_for(numel, groups, itemsize)))
        case Partial(), Replicate() if step.target != ROWS:
            summed = "all_reduce", summing.waited_for(numel, groups, itemsize)
            return Crossing(summed, summed if summands else None)
        case Partial(), _:
            return Crossing(
                ("reduce_scatter", received.reduce_scatter(after, groups)),
                ("all_gather", received.all_gather(after, groups)),
            )
        case Replicate(), _ if step.source != ROWS:
            return Crossing(backward=("all_gather", received.all_gather(after, groups)))
        case _, Replicate() if step.target != ROWS:
            scattered = "reduce_scatter", received.reduce_scatter(before, groups)
            gathered = "all_gather", received.all_gather(before, groups)
            return Crossing(gathered, scattered if summands else None)
        case _:
            return Crossing(
                ("all_to_all", _exchanged(step, step.source, step.target, rows, itemsize)),
                ("all_to_all", _exchanged(step, step.target, step.source, rows, itemsize)),
            )


def _exchanged(
    step: Conversion, source: Layout, target: Layout, rows: Rows, itemsize: int
) -> Received:
    """An all-to-all; groups differ in their rows."""
    messages, bytes_ = np.zeros_like(rows.own), np.zeros_like(rows.own)
    givers: tuple[Giver, ...] = ()
    for members in shard_groups(step.group_size, rows.world_size):
        own = Shard(0, tuple(int(rows.own[rank]) * step.rows for rank in members))
        before, after = (own if layout == ROWS else layout.placement for layout in (source, target))
        assert isinstance(before, Shard)
        assert isinstance(after, Shard)
        lengths = (own.extent, *step.shape)
        rest = math.prod(n for d, n in enumerate(lengths) if d not in (before.dim, after.dim))
        slabs = np.full_like(rows.own, rest * itemsize)
        got = received.all_to_all(slabs, before, after, [members])
        messages, bytes_ = messages + got.messages, bytes_ + got.bytes
        givers += got.givers
    return Received(messages, bytes_, givers)
