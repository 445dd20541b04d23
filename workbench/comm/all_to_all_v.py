"""The exchange in which every rank has something of its own for every other.

Within a host each rank stages what it sends, portion by portion, and reads from the others'
portions what is for it.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from workbench.comm.groups.group import Group
from workbench.comm.groups.record import Phase
from workbench.comm.pieces import cut
from workbench.comm.shared_memory.staging import SLOT_BYTES, Staging
from workbench.comm.transfer import swap

Sizes = Sequence[Sequence[int]]


@torch.no_grad()
def all_to_all_v(
    flat: Tensor, sizes: Sizes, group: Group, *, layer: str = "", phase: Phase = "step"
) -> tuple[Tensor, ...]:
    """Sends each rank its part of flat; gives what came of each.

    A rank receives what the others have for it: the sum of its column of `sizes`, but for its own
    entry.

    Args:
        flat: what this rank sends, one rank's part after the other's; contiguous.
        sizes: `sizes[s][t]` elements go from rank s to rank t; the same on all ranks.
        group: who exchanges.
        layer: labels the record, like `phase`.
        phase: of the step.

    Raises:
        ValueError: `flat` is not as long as this rank's row of `sizes`, or there is not one row and
            one column for each rank.
        CommError: other ranks did not come, or came for something else.
    """
    if len(sizes) != group.size or any(len(row) != group.size for row in sizes):
        raise ValueError(f"{group} needs {group.size} x {group.size} sizes, got {sizes}")
    sent, received = sizes[group.rank], [row[group.rank] for row in sizes]
    if flat.dim() != 1 or len(flat) != sum(sent):
        raise ValueError(f"{group} sends {sum(sent)} elements, got shape {tuple(flat.shape)}")
    call = group.call("all_to_all", layer, phase)
    with call.timed():
        if group.staging is not None:
            call.count(received, flat.itemsize)
            return _staged(flat, sizes, group.staging, call)
        return cut(swap(flat, sent, received, call), received)


def _staged(flat: Tensor, sizes: Sizes, staging: Staging, what: object) -> tuple[Tensor, ...]:
    mine = staging.rank
    step = SLOT_BYTES // flat.itemsize
    longest = max(map(sum, sizes))
    arrived = tuple(flat.new_empty(row[mine]) for row in sizes)
    if longest == 0:
        return arrived
    begins = [list(accumulate(row, initial=0)) for row in sizes]
    # Their sum alone would not tell apart two ranks with different rows.
    staging.begin(what, hash(tuple(map(tuple, sizes))) % 2**31 * flat.itemsize)

    def put(index: int) -> None:
        part = flat[index * step : (index + 1) * step]
        staging.staged(flat.dtype, (step,))[mine][: len(part)].copy_(part)

    def take(index: int) -> None:
        """What lies between the begin and the end of both this portion and this rank's part."""
        low, high = index * step, (index + 1) * step
        for rank, target in enumerate(arrived):
            begin, end = begins[rank][mine], begins[rank][mine + 1]
            first, last = max(begin, low), min(end, high)
            if last > first:
                staged = staging.staged(flat.dtype, (step,), 1)[rank]
                target[first - begin : last - begin].copy_(staged[first - low : last - low])

    staging.stream(-(-longest // step), put, take, what)
    return arrived
