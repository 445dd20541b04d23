"""The collectives of one conversion, forward and backward.

conversion              forward          backward
R -> R (copy)           -                all-reduce
P -> R                  all-reduce       - (of summands: all-reduce)
P -> S, P -> rows       reduce-scatter   all-gather
R -> S, R -> rows       -                all-gather
S -> R, rows -> R       all-gather       - (of summands: reduce-scatter)
S -> S', rows <-> S     all-to-all       all-to-all
"""

from typing import NamedTuple

from workbench.plan.layout import ROWS, Conversion
from workbench.plan.placement import Partial, Replicate
from workbench.program.collective_call import CollectiveCall, Exchange, Phase
from workbench.program.rows import Counts, Rows


class Crossing(NamedTuple):
    """What a conversion calls; None: nothing."""

    forward: CollectiveCall | None = None
    backward: CollectiveCall | None = None


def crossing_of(step: Conversion, rows: Rows, itemsize: int, label: str = "") -> Crossing:
    """The collectives of a conversion.

    Args:
        step: from which layout to which.
        rows: of the pass.
        itemsize: bytes of an element.
        label: the reader that it is made for.
    """

    def call(op: str, phase: Phase, numel: Counts, how: Exchange | None = None) -> CollectiveCall:
        return CollectiveCall(op, label, phase, "shard", step.group_size, numel, itemsize, how=how)

    after = rows.elements(step.target, step.shape, step.rows)
    before = rows.elements(step.source, step.shape, step.rows)
    summands = step.gradient == "partial"
    match step.source.placement, step.target.placement:
        case _ if step.source == step.target:
            return Crossing(None, call("all_reduce", "backward", after))
        case Partial(), Replicate() if step.target != ROWS:
            back = call("all_reduce", "backward", after) if summands else None
            return Crossing(call("all_reduce", "forward", after), back)
        case Partial(), _:
            return Crossing(
                call("reduce_scatter", "forward", after), call("all_gather", "backward", after)
            )
        case Replicate(), _ if step.source != ROWS:
            return Crossing(None, call("all_gather", "backward", after))
        case _, Replicate() if step.target != ROWS:
            back = call("reduce_scatter", "backward", before) if summands else None
            return Crossing(call("all_gather", "forward", before), back)
        case _:
            there = Exchange(step, step.source, step.target, rows)
            home = Exchange(step, step.target, step.source, rows)
            return Crossing(
                call("all_to_all", "forward", before, there),
                call("all_to_all", "backward", after, home),
            )
