"""Ranks of one host that meet round after round, and hand each other what they have staged.

Each rank has a segment with a count of the rounds that it has come to and three staging slots. In
round t a rank writes into its slot t mod 3, comes to the meeting, and then reads the others'
slots. It may also read those of round t-1: a slot is written again in round t+3, which nobody
reaches before all have come to t+2, and so have done what they do between the rounds before it.
One meeting a round is thus all that is needed, also from one collective to the next. A rank whose
process has ended is noticed at once, whoever started it.
"""

import ctypes
import os
import select
import struct
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from enum import Enum, auto

import torch
from torch import Tensor

from workbench.comm.messages.errors import CommError, PeerLost
from workbench.comm.messages.flat import AsyncOperation, added, blocks, cut, even
from workbench.comm.messages.recorder import PhaseMark, unheard
from workbench.comm.messages.waiting import TICK, PeerWatch
from workbench.comm.shared_memory.gpu_memory import GpuMemory
from workbench.comm.shared_memory.segment import (
    PAGE,
    Futex,
    MappedMemory,
    Meeting,
    Offer,
    attach,
    create,
    mapped,
)

SLOTS = 3
# The slots in use at one time, of four ranks, fit into the last-level cache of a server's core
# complex (32 MB); with smaller ones, large tensors take more meetings.
SLOT_BYTES = 2**21
SEGMENT_BYTES = PAGE + SLOTS * SLOT_BYTES
# Falling asleep and being woken take some 50 µs; whoever comes within this needs neither.
SPIN_S = 0.0002
# A rank that sleeps while its own sums are under way looks after them this often.
RESTLESS_S = 0.001
_LEFT_AT = 64
_SIGN_AT = 128


class Staging:
    """One group's shared memory, seen from one of its ranks.

    Args:
        watch: what waits where it takes long.
        memory: the memory of the device on which slots lie; None: they lie in the segments.
        slots: there, the slots of each rank [SLOTS * SLOT_BYTES].

    Attributes:
        memory: the memory of that device, or None.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        segments: Sequence[MappedMemory],
        peers: "Peers",
        watch: PeerWatch,
        futex: Futex,
        spins: bool,
        memory: GpuMemory | None = None,
        slots: Sequence[Tensor] | None = None,
    ) -> None:
        self.memory = memory
        self.device = torch.device("cpu") if memory is None else memory.device
        self.ranks, self.rank, self.size = ranks, rank, len(ranks)
        self.futex = futex
        self._peers, self._watch = peers, watch
        self._spin_s = SPIN_S if spins else 0.0
        self.rounds = Meeting(segments, 0, rank, futex)
        self._left = [ctypes.c_uint32.from_buffer(memory, _LEFT_AT) for memory in segments]
        self._signs = [
            [ctypes.c_uint32.from_buffer(memory, _SIGN_AT + 4 * slot) for memory in segments]
            for slot in range(SLOTS)
        ]
        self._sign = 0
        if slots is None:
            slots = [torch.frombuffer(one, dtype=torch.uint8, offset=PAGE) for one in segments]
        self._slots = [
            [flat[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] for flat in slots]
            for slot in range(SLOTS)
        ]
        self._views: dict[tuple[torch.dtype, tuple[int, ...]], list[list[Tensor]]] = {}
        self._cuts: dict[tuple[torch.dtype, int], list[list[tuple[Tensor, ...]]]] = {}

    def staged(self, dtype: torch.dtype, shape: tuple[int, ...], ago: int = 0) -> list[Tensor]:
        """Returns each rank's slot as a tensor, in rank order.

        Args:
            ago: the round whose slot it is, counted backwards: 0 is the coming round, 1 the last
                one in which the ranks met, 2 the one before.
        """
        views = self._views.get((dtype, shape))
        if views is None:
            if len(self._views) > 200:
                self._views.clear()
            size = torch.Size(shape).numel() * dtype.itemsize
            with torch.inference_mode(False):  # what an evaluation makes, training uses
                views = [
                    [flat[:size].view(dtype).view(shape) for flat in row] for row in self._slots
                ]
            self._views[dtype, shape] = views
        return views[(self.rounds.turn + 1 - ago) % SLOTS]

    def segments(self, dtype: torch.dtype, length: int, ago: int) -> list[tuple[Tensor, ...]]:
        """Returns each rank's slot as a flat tensor, cut into the segments that the ranks sum.

        Args:
            length: the elements of a tensor; it is cut into near-equal segments.
        """
        cuts = self._cuts.get((dtype, length))
        if cuts is None:
            if len(self._cuts) > 50:
                self._cuts.clear()
            sizes = even(length, self.size)
            with torch.inference_mode(False):
                cuts = [
                    [cut(flat[: length * dtype.itemsize].view(dtype), sizes) for flat in row]
                    for row in self._slots
                ]
            self._cuts[dtype, length] = cuts
        return cuts[(self.rounds.turn + 1 - ago) % SLOTS]

    def come(self, meeting: Meeting) -> None:
        """Says that this rank has come, once it has read and written what it was to."""
        if self.memory is not None:
            self.memory.settle()
        meeting.come()

    def begin(self, what: object, size: int) -> None:
        """Says what the next rounds are for; ranks that come for something else are told apart.

        Args:
            what: the collective; its `str` is the same on all ranks.
            size: a number that is the same on all ranks, such as the bytes of the result.
        """
        self._sign = zlib.crc32(f"{what} {size}".encode())

    def meet(self, what: object, mark: PhaseMark = unheard) -> None:
        """Returns when all ranks have come to this round.

        Args:
            what: the collective; its `str` goes into errors.

        Raises:
            CommTimeout: not all ranks came; it names those that did not.
            PeerLost: a rank's process has ended, or it has left the world or given up.
            CommError: a rank came for something else.
        """
        mark("wait")
        signs = self._signs[(self.rounds.turn + 1) % SLOTS]
        signs[self.rank].value = self._sign
        self.come(self.rounds)
        self.wait(self.rounds, what)
        for index, sign in enumerate(signs):
            if sign.value != self._sign:
                raise CommError(
                    f"rank {self._watch.rank} came for {what}, "
                    f"rank {self.ranks[index]} for something else or with another size"
                )

    def exchange(self, words: Sequence[int], what: object) -> list[list[int]]:
        """Returns the numbers that each rank brings, in rank order.

        Raises:
            CommError: other ranks did not come, or came for something else.
        """
        self.begin(what, len(words))
        self.staged(torch.int64, (len(words),))[self.rank].copy_(torch.tensor(words))
        self.meet(what)
        return [said.tolist() for said in self.staged(torch.int64, (len(words),), 1)]

    def stream(
        self,
        count: int,
        put: Callable[[int], None],
        take: Callable[[int], None],
        what: object,
        mark: PhaseMark = unheard,
    ) -> None:
        """Passes portions on, of which one is read while the next is staged.

        Args:
            count: the number of portions, the same on all ranks; one at least.
            what: the collective; its `str` goes into errors.

        Raises:
            CommError: other ranks did not come, or came for something else.
        """
        for step in range(count):
            put(step)
            if step:
                take(step - 1)
            self.meet(what, mark)
        take(count - 1)

    def wait(self, meeting: Meeting, what: object) -> None:
        """Returns when all ranks have come.

        Raises:
            CommError: other ranks did not come, as for `meet`.
        """
        while (index := meeting.missing()) is not None:
            self._wait_for(index, meeting, what)

    def _wait_for(self, index: int, meeting: Meeting, what: object) -> None:
        if self._spin_s:
            until = time.perf_counter() + self._spin_s
            while time.perf_counter() < until:
                if not meeting.is_missing(index):
                    return
                os.sched_yield()
        self._watch.until(
            lambda: not meeting.is_missing(index),
            lambda: self._sleep(index, meeting, str(what)),
            self.ranks,
            str(what),
        )

    def leave(self) -> None:
        """Tells who waits for this rank, now or later, that it does not come any more."""
        self.futex.fence()
        self._left[self.rank].value = 1
        self.rounds.nudge()

    def _sleep(self, index: int, meeting: Meeting, what: str) -> None:
        restless = self._watch.tend()
        meeting.sleep(index, RESTLESS_S if restless else TICK.total_seconds())
        if not meeting.is_missing(index):
            return
        # Only of whom this rank waits for: another that came to this meeting may leave after it.
        gone = bool(self._left[index].value)
        if not gone and not self._peers.has_ended(self.ranks[index]):
            return
        self.futex.fence()
        if not meeting.is_missing(index):  # it came first
            return
        why = self._watch.said() if gone else ""
        why = why or f"rank {self.ranks[index]} has {'left' if gone else 'died'}"
        raise PeerLost(f"rank {self._watch.rank} lost a peer in {what}: {why}")


class Peers:
    """The processes of the other ranks of this host: whether they still run."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}
        self._open: dict[int, int] = {}

    def meet(self, pids: Mapping[int, int]) -> None:
        """Watches further processes; those of ranks that it knows already stay as they are."""
        for rank, pid in pids.items():
            if rank in self._pids:
                continue
            self._pids[rank] = pid
            # Where it cannot be had, as on an old kernel, `has_ended` asks for the process id.
            with suppress(OSError, AttributeError):
                self._open[rank] = os.pidfd_open(pid)

    def has_ended(self, rank: int) -> bool:
        """Returns whether the process of a global rank has ended; a zombie has."""
        if rank in self._open:
            poll = select.poll()
            poll.register(self._open[rank], select.POLLIN)
            return bool(poll.poll(0))
        try:
            os.kill(self._pids[rank], 0)
        except ProcessLookupError:
            return True
        return False

    def close(self) -> None:
        """Forgets the processes."""
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()


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
        data: the memory [bytes] of each rank: its buffer, and behind it its sums.
        segments: the elements of each buffer that each rank adds up, one after another.

    Attributes:
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
        self._filled = Meeting(maps, 0, staging.rank, staging.futex)
        self._summed = Meeting(maps, _SUMMED_AT, staging.rank, staging.futex)
        self._stage, self._holds = _Stage.DONE, False
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
        self._stage = _Stage.FILLING
        self._cross, self._crossing, self._mark, self._holds = cross, None, mark, holds
        mark("send")
        self.staging.come(self._filled)
        mark("wait")

    def hand_out(self, what: object) -> None:
        """Says that this rank's place among the `sums` has what all are to have; once it is held.

        It ends when all of them do, and leaves them there until this rank fills its buffer again.

        Args:
            what: the collective that hands out; its `str` goes into errors.
        """
        assert self._stage is _Stage.HELD, "what is handed out was summed before"
        self._what = what
        self.staging.come(self._summed)
        self._stage = _Stage.SUMMING

    def give_up(self) -> None:
        """Ends a sum that is held: nobody hands out anything, and all call this.

        Nobody is waited for: nobody reads the sums, and whoever begins the next one has said this.
        """
        assert self._stage is _Stage.HELD, "what is given up was summed before"
        self._summed.come()
        self._stage = _Stage.DONE

    def advance(self) -> bool:
        """Does what has become possible without waiting; returns whether the sum is there."""
        if self._stage is _Stage.FILLING and self._filled.missing() is None:
            self._mark("reduce")
            self._add_up()
            if self._cross is not None:
                self._crossing = self._cross(self.sums[self.staging.rank])
            self._stage = _Stage.HELD if self._holds else _Stage.CROSSING
        if self._stage is _Stage.CROSSING and (self._crossing is None or self._crossing.advance()):
            self._mark("send")
            self.staging.come(self._summed)
            self._stage = _Stage.SUMMING
            self._mark("wait")
        if self._stage is _Stage.SUMMING and self._summed.missing() is None:
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
            else:
                is_filling = self._stage is _Stage.FILLING
                self.staging.wait(self._filled if is_filling else self._summed, self._what)

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
    memory: GpuMemory,
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
