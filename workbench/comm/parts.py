"""An exchange of many parts, each from where it lies on one rank to its place on another.

It moves what changes hands when a model is cut anew. Within a host a rank copies parts straight
into the memory that it shares, a slot full at a time, and the others straight out of it: there is
no buffer in between, and nothing to be allocated. Elsewhere parts travel in batches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.comm.all_to_all_v import all_to_all_v
from workbench.comm.group import Call, Group
from workbench.comm.record import Phase
from workbench.comm.staging import SLOT_BYTES, Staging

BATCH_BYTES = 2**25  # of all ranks together
MOST_BYTES = SLOT_BYTES
"""Of one part."""


@dataclass(frozen=True)
class Part:
    """Elements that one rank sends to another.

    Attributes:
        source: the sender's index in the group.
        target: the receiver's.
        numel: elements.
        tensor: where they lie, on the sender, or go, on the receiver; None on others. It need
            not be contiguous.
    """

    source: int
    target: int
    numel: int
    tensor: Tensor | None = None


@torch.no_grad()
def exchange_parts(
    parts: Sequence[Part],
    dtype: torch.dtype,
    group: Group,
    *,
    layer: str = "",
    phase: Phase = "step",
) -> None:
    """Brings all parts to their places.

    Args:
        parts: the same on all ranks but for their tensors, in one order.
        dtype: of all of them.
        group: who exchanges.
        layer: labels the record, like `phase`.
        phase: of the step.

    Raises:
        ValueError: a part of more than MOST_BYTES.
        CommError: other ranks did not come, or came for something else.
    """
    if any(part.numel * dtype.itemsize > MOST_BYTES for part in parts):
        raise ValueError(f"a part has at most {MOST_BYTES:,} bytes")
    if group.staging is None:
        for batch in _batches(parts, BATCH_BYTES // dtype.itemsize):
            _in_one(batch, dtype, group, layer, phase)
        return
    call = group.call("all_to_all", layer, phase)
    with call.timed():
        received = [0] * group.size
        for part in parts:
            received[part.source] += part.numel * (part.target == group.rank)
        call.count(received, dtype.itemsize)
        if parts:
            _staged(parts, dtype, group.staging, call)


def _staged(parts: Sequence[Part], dtype: torch.dtype, staging: Staging, call: Call) -> None:
    room, mine = SLOT_BYTES // dtype.itemsize, staging.rank
    slots: list[list[list[tuple[int, Part]]]] = [[] for _ in range(staging.size)]
    filled = [room] * staging.size
    for part in parts:
        if filled[part.source] + part.numel > room:
            slots[part.source].append([])
            filled[part.source] = 0
        slots[part.source][-1].append((filled[part.source], part))
        filled[part.source] += part.numel
    form = tuple((part.source, part.target, part.numel) for part in parts)
    staging.begin(call, hash(form) % 2**31 * dtype.itemsize)

    def put(index: int) -> None:
        if index < len(slots[mine]):
            slot = staging.staged(dtype, (room,))[mine]
            for start, part in slots[mine][index]:
                assert part.tensor is not None
                slot[start : start + part.numel].view(part.tensor.shape).copy_(part.tensor)

    def take(index: int) -> None:
        staged = staging.staged(dtype, (room,), 1)
        for source, own in enumerate(slots):
            for start, part in own[index] if index < len(own) else ():
                if part.target == mine:
                    assert part.tensor is not None
                    came = staged[source][start : start + part.numel]
                    part.tensor.copy_(came.view(part.tensor.shape))

    staging.stream(max(map(len, slots)), put, take, call)


def _batches(parts: Sequence[Part], most: int) -> Iterator[list[Part]]:
    batch: list[Part] = []
    for part in parts:
        if batch and sum(each.numel for each in batch) + part.numel > most:
            yield batch
            batch = []
        batch.append(part)
    if batch:
        yield batch


def _in_one(
    parts: Sequence[Part], dtype: torch.dtype, group: Group, layer: str, phase: Phase
) -> None:
    sizes = [[0] * group.size for _ in range(group.size)]
    for part in parts:
        sizes[part.source][part.target] += part.numel
    outgoing = [
        part.tensor.flatten()
        for part in sorted(parts, key=lambda part: part.target)
        if part.source == group.rank and part.tensor is not None
    ]
    flat = torch.cat(outgoing) if outgoing else torch.empty(0, dtype=dtype)
    came = all_to_all_v(flat, sizes, group, layer=layer, phase=phase)
    read = [0] * group.size
    for part in parts:
        if part.target == group.rank and part.tensor is not None:
            begin = read[part.source]
            arrived = came[part.source][begin : begin + part.numel]
            part.tensor.copy_(arrived.view(part.tensor.shape))
            read[part.source] += part.numel
