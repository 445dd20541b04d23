"""An exchange of many parts, each from where it lies on one rank to its place on another.

It moves what changes hands when a model is cut anew. Within a host a rank copies parts straight
into the memory that it shares, a slot full at a time, and the others straight out of it: there is
no buffer in between, and nothing to be allocated. Elsewhere parts travel in batches.

What a rank keeps it copies meanwhile, a little after each slot: ranks meet after every slot, and
one that keeps much mostly sends or receives little, and would wait for the others.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.comm.all_to_all_v import all_to_all_v
from workbench.comm.groups.group import Call, Group
from workbench.comm.groups.record import Phase
from workbench.comm.shared_memory.staging import SLOT_BYTES, Staging

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


@dataclass(frozen=True)
class Kept:
    """Elements that a rank copies from one place of its own to another.

    Attributes:
        source: where they lie.
        target: where they go; as large. Neither need be contiguous.
    """

    source: Tensor
    target: Tensor

    def chunks(self) -> Iterator["Kept"]:
        """The same in some copies, along the first dimension, of a slot's size at most."""
        if self.source.nbytes <= SLOT_BYTES:
            yield self
            return
        rows = max(1, len(self.source) * SLOT_BYTES // self.source.nbytes)
        for pair in zip(self.source.split(rows), self.target.split(rows), strict=True):
            yield Kept(*pair)


@torch.no_grad()
def exchange_parts(
    parts: Sequence[Part],
    dtype: torch.dtype,
    group: Group,
    kept: Sequence[Kept] = (),
    *,
    layer: str = "",
    phase: Phase = "step",
) -> None:
    """Brings all parts to their places.

    Args:
        parts: the same on all ranks but for their tensors, in one order.
        dtype: of all of them.
        group: who exchanges.
        kept: what this rank copies beside it; no other rank knows of that.
        layer: labels the record, like `phase`.
        phase: of the step.

    Raises:
        ValueError: a part of more than MOST_BYTES.
        CommError: other ranks did not come, or came for something else.
    """
    if any(part.numel * dtype.itemsize > MOST_BYTES for part in parts):
        raise ValueError(f"a part has at most {MOST_BYTES:,} bytes")
    copies = _Copies(kept)
    if group.staging is None:
        copies.up_to(1.0)
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
            _staged(parts, dtype, group.staging, copies, call)
        copies.up_to(1.0)


class _Copies:
    """What is copied within a rank, little by little."""

    def __init__(self, kept: Sequence[Kept]) -> None:
        self._waiting = deque(chunk for own in kept for chunk in own.chunks())
        self._all = sum(chunk.source.nbytes for chunk in self._waiting)
        self._done = 0

    def up_to(self, part: float) -> None:
        """Goes on until so much is done; 1: all."""
        while self._waiting and (part >= 1 or self._done < part * self._all):
            chunk = self._waiting.popleft()
            chunk.target.copy_(chunk.source)
            self._done += chunk.source.nbytes


def _staged(
    parts: Sequence[Part], dtype: torch.dtype, staging: Staging, copies: _Copies, call: Call
) -> None:
    room, mine = SLOT_BYTES // dtype.itemsize, staging.rank
    slots: list[list[list[tuple[int, Part]]]] = [[] for _ in range(staging.size)]
    filled = [room] * staging.size
    for part in parts:
        if filled[part.source] + part.numel > room:
            slots[part.source].append([])
            filled[part.source] = 0
        slots[part.source][-1].append((filled[part.source], part))
        filled[part.source] += part.numel
    rounds = max(map(len, slots))
    form = tuple((part.source, part.target, part.numel) for part in parts)
    staging.begin(call, hash(form) % 2**31 * dtype.itemsize)

    def put(index: int) -> None:
        if index < len(slots[mine]):
            slot = staging.staged(dtype, (room,))[mine]
            for start, part in slots[mine][index]:
                assert part.tensor is not None
                slot[start : start + part.numel].view(part.tensor.shape).copy_(part.tensor)
        copies.up_to((index + 1) / rounds)

    def take(index: int) -> None:
        staged = staging.staged(dtype, (room,), 1)
        for source, own in enumerate(slots):
            for start, part in own[index] if index < len(own) else ():
                if part.target == mine:
                    assert part.tensor is not None
                    came = staged[source][start : start + part.numel]
                    part.tensor.copy_(came.view(part.tensor.shape))

    staging.stream(rounds, put, take, call)


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
    # Parts may lie on several devices: weights on a GPU, what a codec has left out on the host.
    device = torch.device("cpu") if group.link is None else group.link.device
    outgoing = [
        part.tensor.flatten().to(device)
        for part in sorted(parts, key=lambda part: part.target)
        if part.source == group.rank and part.tensor is not None
    ]
    flat = torch.cat(outgoing) if outgoing else torch.empty(0, dtype=dtype, device=device)
    came = all_to_all_v(flat, sizes, group, layer=layer, phase=phase)
    read = [0] * group.size
    for part in parts:
        if part.target == group.rank and part.tensor is not None:
            begin = read[part.source]
            arrived = came[part.source][begin : begin + part.numel]
            part.tensor.copy_(arrived.view(part.tensor.shape))
            read[part.source] += part.numel
