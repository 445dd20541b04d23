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

from workbench.comm.collectives import all_to_all_v
from workbench.comm.groups.group import Group, GroupCall
from workbench.comm.messages.recorder import StepPhase
from workbench.comm.shared_memory.meeting import SLOT_BYTES, Staging

BATCH_BYTES = 2**25  # of all ranks together
MOST_BYTES = SLOT_BYTES
"""Bytes of one part, at most."""


@dataclass(frozen=True)
class SentPart:
    """Elements that one rank sends to another.

    Attributes:
        source: the sender's index in the group.
        target: the receiver's index in the group.
        numel: the number of elements.
        tensor: the memory [numel elements, of any shape] where they lie, on the sender, or go, on
            the receiver; None on others. It need not be contiguous.
    """

    source: int
    target: int
    numel: int
    tensor: Tensor | None = None


@dataclass(frozen=True)
class LocalCopy:
    """Elements that a rank copies from one place of its own to another.

    Attributes:
        source: the tensor in which they lie; it need not be contiguous.
        target: the tensor to which they go, of the same shape; it need not be contiguous.
    """

    source: Tensor
    target: Tensor

    def chunks(self) -> Iterator["LocalCopy"]:
        """Yields the same in several copies, along dimension 0, of a slot's size at most."""
        if self.source.nbytes <= SLOT_BYTES:
            yield self
            return
        rows = max(1, len(self.source) * SLOT_BYTES // self.source.nbytes)
        for pair in zip(self.source.split(rows), self.target.split(rows), strict=True):
            yield LocalCopy(*pair)


@torch.no_grad()
def exchange_parts(
    parts: Sequence[SentPart],
    dtype: torch.dtype,
    group: Group,
    kept: Sequence[LocalCopy] = (),
    *,
    layer: str = "",
    phase: StepPhase = "step",
) -> None:
    """Brings all parts to their places.

    Args:
        parts: the parts, the same on all ranks but for their tensors, in one order.
        kept: the elements that this rank copies beside it; no other rank knows of them.

    Raises:
        ValueError: a part has more than MOST_BYTES.
        CommError: other ranks did not come, or came for something else.
    """
    largest = max((part.numel * dtype.itemsize for part in parts), default=0)
    if largest > MOST_BYTES:
        raise ValueError(
            f"a part has at most {MOST_BYTES:,} bytes, got one of {largest:,} in {group}"
        )
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
    """The elements that are copied within a rank, little by little."""

    def __init__(self, kept: Sequence[LocalCopy]) -> None:
        self._waiting = deque(chunk for own in kept for chunk in own.chunks())
        self._all = sum(chunk.source.nbytes for chunk in self._waiting)
        self._done = 0

    def up_to(self, share: float) -> None:
        """Copies until this share of all bytes is done; 1: all."""
        while self._waiting and (share >= 1 or self._done < share * self._all):
            chunk = self._waiting.popleft()
            chunk.target.copy_(chunk.source)
            self._done += chunk.source.nbytes


def _staged(
    parts: Sequence[SentPart],
    dtype: torch.dtype,
    staging: Staging,
    copies: _Copies,
    call: GroupCall,
) -> None:
    room, mine = SLOT_BYTES // dtype.itemsize, staging.rank
    slots: list[list[list[tuple[int, SentPart]]]] = [[] for _ in range(staging.size)]
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


def _batches(parts: Sequence[SentPart], most: int) -> Iterator[list[SentPart]]:
    batch: list[SentPart] = []
    for part in parts:
        if batch and sum(each.numel for each in batch) + part.numel > most:
            yield batch
            batch = []
        batch.append(part)
    if batch:
        yield batch


def _in_one(
    parts: Sequence[SentPart], dtype: torch.dtype, group: Group, layer: str, phase: StepPhase
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
