"""Buffers that the ranks of a host share, and their sum in place with two synchronisations.

Each rank fills its own buffer. When all have (1), every rank adds up its segment of all buffers,
in rank order, and puts the sum where all can read it; when all have done that (2), each copies
the sums into its buffer. Nothing is staged, and nobody writes what another may still read:
buffers are read by others only between (1) and (2), and sums from (2) until their reader fills
its buffer again; they are written again only after all have. Where the group has ranks on other
hosts too, each rank sums its segment with theirs before it says (2).

A sum may also stop between the two: a rank then has the sum of its own segment, and says (2) when
it has put in the sum's place what it has computed from it.

Source: Chen et al. 2018, arXiv:1802.02326 (GDRAA; their body was not available to us, the two
synchronisations are from the abstract). Shared memory needs no messages for it.
"""

import os
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple
from enum import Enum, auto

import torch
from torch import Tensor

from workbench.comm.algorithms.exchange import AsyncOperation
from workbench.comm.groups.record import PhaseMark, unheard
from workbench.comm.pieces import added, blocks
from workbench.comm.shared_memory.gpu_memory import DeviceMemory
from workbench.comm.shared_memory.segment import PAGE, MappedMemory, Offer, attach, create, mapped
from workbench.comm.shared_memory.staging import MASK, SharedCount, Staging

_SUMMED_AT = 64
_OFFER_BYTES = 1024  # of a device's memory, at most


class _Stage(Enum):
    FILLING = auto()  # until all ranks' buffers are filled
    CROSSING = auto()  # until this rank's sum is that over all hosts
    HELD = auto()  # until this rank has something to hand out instead of its sum
    SUMMING = auto()  # until all ranks' sums, or what they made of them, are there
    DONE = auto()


class SharedBuffer:
    """One rank's view of its host's buffers, and the one sum of them that is under way.

    Args:
        staging: the shared memory in which the ranks of the host meet.
        maps: the mapped memory of each rank, with its counts.
        data: the memory [bytes] of each rank: its buffer, and behind it its sums.
        segments: the elements of each buffer that each rank adds up, one after another.
        dtype: the type of the elements.

    Attributes:
        nbytes: the size of this rank's buffer, in bytes.
        held_bytes: the size of that and of the sums that this rank takes, a k-th more, in bytes.
        sums: the sum of each segment [its elements], in the memory of the rank that adds it up.
    """

    def __init__(
        self,
        staging: Staging,
        maps: Sequence[MappedMemory],
        data: Sequence[Tensor],
        segments: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        numel = sum(segments)
        self.staging, self.nbytes = staging, numel * dtype.itemsize
        self._flats: list[tuple[Tensor, ...]] = []  # of each rank, cut into segments
        self.sums: list[Tensor] = []
        for whole, segment in zip(data, segments, strict=True):
            flat, start = whole[: numel * dtype.itemsize], _sums_at(numel, dtype)
            self._flats.append(torch.split_with_sizes(flat.view(dtype), list(segments)))
            self.sums.append(whole[start : start + segment * dtype.itemsize].view(dtype))
        self.held_bytes = self.nbytes + self.sums[staging.rank].nbytes
        self._filled = [SharedCount(memory, 0, staging.futex) for memory in maps]
        self._summed = [SharedCount(memory, _SUMMED_AT, staging.futex) for memory in maps]
        self._turn, self._stage, self._holds = 0, _Stage.DONE, False
        self._what: object = ""
        self._cross: Callable[[Tensor], AsyncOperation] | None = None
        self._crossing: AsyncOperation | None = None
        self._mark: PhaseMark = unheard

    def start(
        self,
        what: object,
        cross: Callable[[Tensor], AsyncOperation] | None = None,
        mark: PhaseMark = unheard,
        *,
        holds: bool = False,
    ) -> None:
        """Says that this rank's buffer is filled.

        Args:
            what: the collective that sums; its `str` goes into errors.
            cross: a function that starts to sum a segment [elements] in place over the hosts of
                the group; None: there is but one host.
            mark: a function that hears of the phases.
            holds: whether to end with the sum of this rank's own segment, there in its buffer;
                `hand_out` or `give_up` is to follow.

        Raises:
            RuntimeError: the buffer's last sum is still under way, or held.
        """
        if self._stage is not _Stage.DONE:
            raise RuntimeError(
                f"{what}: a buffer's sum must be waited for before the next one starts, and "
                f"{self._what} is not over"
            )
        self._what = what
        self._turn, self._stage = (self._turn + 1) & MASK, _Stage.FILLING
        self._cross, self._crossing, self._mark, self._holds = cross, None, mark, holds
        mark("send")
        self.staging.settle()
        self._filled[self.staging.rank].post(self._turn)
        mark("wait")

    def hand_out(self, what: object) -> None:
        """Says that this rank's place among the `sums` has what all are to have; once it is held.

        It ends when all of them do, and leaves them there until this rank fills its buffer again.

        Args:
            what: the collective that hands out; its `str` goes into errors.
        """
        assert self._stage is _Stage.HELD, "what is handed out was summed before"
        self._what = what
        self.staging.settle()
        self._summed[self.staging.rank].post(self._turn)
        self._stage = _Stage.SUMMING

    def give_up(self) -> None:
        """Ends a sum that is held: nobody hands out anything, and all call this.

        Nobody is waited for: nobody reads the sums, and whoever begins the next one has said this.
        """
        assert self._stage is _Stage.HELD, "what is given up was summed before"
        self._summed[self.staging.rank].post(self._turn)
        self._stage = _Stage.DONE

    def advance(self) -> bool:
        """Does what has become possible without waiting; returns whether the sum is there."""
        if self._stage is _Stage.FILLING and self._missing() is None:
            self.staging.futex.fence()
            self._mark("reduce")
            self._add_up()
            if self._cross is not None:
                self._crossing = self._cross(self.sums[self.staging.rank])
            self._stage = _Stage.HELD if self._holds else _Stage.CROSSING
        if self._stage is _Stage.CROSSING and (self._crossing is None or self._crossing.advance()):
            self._mark("send")
            self.staging.settle()
            self._summed[self.staging.rank].post(self._turn)
            self._stage = _Stage.SUMMING
            self._mark("wait")
        if self._stage is _Stage.SUMMING and self._missing() is None:
            self.staging.futex.fence()
            self._mark("copy")
            if not self._holds:
                for mine, total in zip(self._flats[self.staging.rank], self.sums, strict=True):
                    mine.copy_(total)
            self._stage = _Stage.DONE
        return self._stage in (_Stage.DONE, _Stage.HELD)

    def wait(self) -> None:
        """Returns when the sum is there.

        Raises:
            CommError: other ranks did not come, as for `Staging.meet`.
        """
        while not self.advance():
            if self._stage is _Stage.CROSSING and self._crossing is not None:
                self._crossing.wait()
                continue
            missing = self._missing()
            if missing is not None:
                self.staging.wait(*missing, self._what)

    def _missing(self) -> tuple[int, SharedCount, int] | None:
        """Returns (index, count, its value) of the first rank that is behind this one, if any."""
        counts = self._filled if self._stage is _Stage.FILLING else self._summed
        stale = (self._turn - 1) & MASK
        for index, count in enumerate(counts):
            if count.cell.value == stale:
                return index, count, stale
        return None

    def _add_up(self) -> None:
        rank = self.staging.rank
        total, parts = self.sums[rank], [flat[rank] for flat in self._flats]
        # What a core's cache holds at a time; a GPU is given all at once.
        for block in blocks(total) if total.device.type == "cpu" else [slice(None)]:
            added([part[block] for part in parts], total[block])
        if self._holds:  # nobody else reads it there
            parts[rank].copy_(total)


def allocate(
    staging: Staging, segments: Sequence[int], dtype: torch.dtype, what: object
) -> tuple[Tensor, SharedBuffer] | None:
    """Makes this rank's buffer, of zeros; all ranks of the group call it, with the same sizes.

    Args:
        staging: the shared memory in which the ranks of the host meet.
        segments: the elements that each of them adds up; the buffer holds all.
        dtype: the type of the elements.
        what: the buffer, in words for errors.

    Returns:
        The tensor [sum(segments)], and the buffer behind it, which lives as long as the tensor's
        memory; None, on all ranks, if one of them has no memory to share.

    Raises:
        CommError: not all ranks came.
    """
    if staging.memory is not None:
        return _on_device(staging, staging.memory, segments, dtype, what)
    offer, numel = None, sum(segments)
    with suppress(OSError):
        own = segments[staging.rank] * dtype.itemsize
        offer = create(PAGE + _sums_at(numel, dtype) + own, reserved=True)
    try:
        mine = astuple(offer) if offer is not None else (0, 0, 0, 0, 0)
        offers = [Offer(*words) for words in staging.exchange(mine, what)]
        maps: list[MappedMemory] = []
        if all(offer.size for offer in offers):
            with suppress(OSError):
                maps = [attach(offer) for offer in offers]
        if not all(opened for (opened,) in staging.exchange((len(maps),), what)):
            return None
        assert offer is not None
        # A second mapping of its own: the tensor keeps the buffer alive, and not the reverse.
        memory = mapped(offer.fd, offer.size)
    finally:
        if offer is not None:
            os.close(offer.fd)
    data = [torch.frombuffer(one, dtype=torch.uint8, offset=PAGE) for one in maps]
    buffer = SharedBuffer(staging, maps, data, segments, dtype)
    memory.buffer = buffer  # type: ignore[attr-defined]  # lives as long as what the tensor views
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=PAGE), buffer


def _on_device(
    staging: Staging,
    memory: DeviceMemory,
    segments: Sequence[int],
    dtype: torch.dtype,
    what: object,
) -> tuple[Tensor, SharedBuffer] | None:
    """The same in memory of the device on which all ranks compute; counts are on the host."""
    numel, rank, offer = sum(segments), staging.rank, None
    own = memory.make(_sums_at(numel, dtype) + segments[rank] * dtype.itemsize)
    with suppress(OSError):
        offer = create(PAGE, reserved=True)
    try:
        words = _words(memory.offer(own))
        mine = astuple(offer) if offer is not None else (0, 0, 0, 0, 0)
        said = staging.exchange((*mine, *words), what)
        offers = [Offer(*one[: len(mine)]) for one in said]
        maps: list[MappedMemory] = []
        data: list[Tensor] = []
        if all(one.size for one in offers):
            with suppress(OSError, RuntimeError):
                for index, one in enumerate(said):
                    there = index != rank
                    text = _text(one[len(mine) :])
                    data.append(memory.attach(text) if there else memory.alias(own))
                maps = [attach(one) for one in offers]
        if not all(opened for (opened,) in staging.exchange((len(maps),), what)):
            return None
    finally:
        if offer is not None:
            os.close(offer.fd)
    buffer = SharedBuffer(staging, maps, data, segments, dtype)
    storage = own.untyped_storage()
    storage.buffer = buffer  # type: ignore[attr-defined]  # lives as long as this memory
    return own[: numel * dtype.itemsize].view(dtype), buffer


def _words(text: str) -> tuple[int, ...]:
    """A text as whole numbers, as many for each text."""
    packed = text.encode().ljust(_OFFER_BYTES)
    return struct.unpack(f"{_OFFER_BYTES // 8}q", packed)


def _text(words: Sequence[int]) -> str:
    return struct.pack(f"{len(words)}q", *words).decode().rstrip()


def _sums_at(numel: int, dtype: torch.dtype) -> int:
    """Returns at which byte behind a rank's counts its sums begin."""
    return -(-numel * dtype.itemsize // 64) * 64
