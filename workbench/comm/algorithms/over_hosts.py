"""The hierarchical all-reduce of tensors that lie in the ranks' own memory."""

from torch import Tensor

from workbench.comm.algorithms.course import RoundExecutor
from workbench.comm.algorithms.hierarchical import across
from workbench.comm.codecs.coding import Coding
from workbench.comm.groups.group import Call, Link
from workbench.comm.pieces import even
from workbench.comm.shared_memory import collectives as shared
from workbench.comm.transfer import MOST_AT_ONCE
from workbench.plan.placement import Shard


def sum_over_hosts(
    flat: Tensor, link: Link, call: Call, portion_bytes: int, coding: Coding | None = None
) -> None:
    """Sums `flat` in place over all ranks.

    While a portion is on its way to other hosts, the next ones are summed within this one.

    Args:
        flat: contiguous.
        link: of the group.
        call: what it is part of.
        portion_bytes: about so many at a time; the same on all ranks, and so is what they sum
            with a buffer, which is one portion.
        coding: of what goes from host to host; None: it stays as it is.

    Raises:
        CommError: as for a collective that blocks.
    """
    local = link.local
    length = max(1, portion_bytes // flat.itemsize, -(-len(flat) // MOST_AT_ONCE))
    begun = []
    portions = flat.split(length)
    codings = [None] * len(portions) if coding is None else coding.cut([*map(len, portions)])
    for index, (portion, of) in enumerate(zip(portions, codings, strict=True)):
        part, shard = portion, Shard(0, (len(portion),))
        if local is not None:
            shard = Shard(0, even(len(portion), local.size))
            call.count_two_rounds(len(portion), flat.itemsize, link.beside(call.group.rank))
            part = shared.reduce_scatter(portion, shard, local, call, call.mark)
            of = None if of is None else of.cut(shard.sizes)[local.rank]
        rounds = across(part, len(portion), link.hosts, call.group.rank, of)
        course = RoundExecutor(rounds, call, index)
        link.watch.also(course.advance)  # while this rank waits for another portion
        begun.append((portion, part, shard, course))
    for portion, part, shard, course in begun:
        course.wait()
        if local is not None:
            portion.copy_(shared.all_gather(part, shard, local, call, call.mark))
