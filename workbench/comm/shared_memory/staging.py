"""Ranks of one host that meet round after round, and hand each other what they have staged.

Each rank has a segment with a count of the rounds that it has come to and three staging slots. In
round t a rank writes into its slot t mod 3, comes to the meeting, and then reads the others'
slots. It may also read those of round t-1: a slot is written again in round t+3, which nobody
reaches before all have come to t+2, and so have done what they do between the rounds before it.
One meeting a round is thus all that is needed, also from one collective to the next. A rank whose
process has ended is noticed at once, whoever started it.

A count that one rank raises and others sleep on is stored and read as one aligned 32-bit word,
which no processor tears. What a rank wrote before it raised its count must be visible to whoever
sees the count raised. x86 keeps the order of stores and of loads, so there the plain store is
enough. Elsewhere (ARM) `fence` is called on both sides: a FUTEX_WAKE passes a full barrier (smp_mb
in the kernel's futex_hb_waiters_pending) even where nobody sleeps. No wake is lost either:
FUTEX_WAIT compares the word again in the kernel, under the lock that the waker takes.
"""

import ctypes
import errno
import os
import platform
import select
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from workbench.comm.groups.errors import CommError, PeerLost
from workbench.comm.groups.record import PhaseMark, unheard
from workbench.comm.groups.watch import TICK, PeerWatch
from workbench.comm.pieces import cut, even
from workbench.comm.shared_memory.gpu_memory import DeviceMemory
from workbench.comm.shared_memory.segment import PAGE, MappedMemory

# The system call's number, by the names that `platform.machine` gives.
_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE, _EVERYBODY = 0, 1, 2**31 - 1
# Where there is no futex a sleeper looks this often.
_PORTABLE_PAUSE_S = 0.0005
MASK = 0xFFFFFFFF


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futex:
    """Sleeps on words of shared memory and wakes those who do.

    `fence` orders this rank's memory accesses before it against those after it.
    """

    def __init__(self) -> None:
        self._number = _NUMBERS.get(platform.machine()) if sys.platform == "linux" else None
        self._call: Callable[..., int] | None = None
        if self._number is not None:
            call = ctypes.CDLL(None, use_errno=True).syscall  # releases the GIL
            word, pointer = ctypes.c_uint32, ctypes.c_void_p
            call.argtypes = (ctypes.c_long, pointer, ctypes.c_int, word, pointer)
            call.restype = ctypes.c_long
            self._call = call
        self._own = ctypes.c_uint32()
        if self.wake(ctypes.addressof(self._own)) < 0:  # forbidden by a sandbox
            self._call = None
        self.needs_fence = platform.machine() not in ("x86_64", "AMD64", "i686")

    def sleep(self, address: int, value: int, seconds: float) -> None:
        """Returns when woken, on a signal, or after `seconds`; at once unless the word is `value`.

        It may also return for no reason: the caller looks at the word again.

        Raises:
            OSError: the kernel refuses the call for another reason.
        """
        if self._call is None:
            time.sleep(min(seconds, _PORTABLE_PAUSE_S))
            return
        limit = _Time(int(seconds), int(seconds % 1 * 1e9))
        done = self._call(self._number, address, _WAIT, value, ctypes.byref(limit))
        if done < 0 and ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def wake(self, address: int) -> int:
        """Wakes all who sleep on the word; returns a negative number if that is impossible here."""
        if self._call is None:
            return 0
        return self._call(self._number, address, _WAKE, _EVERYBODY, None)

    def fence(self) -> None:
        """Orders what this rank reads and writes before against what it does after."""
        if self.needs_fence:
            self.wake(ctypes.addressof(self._own))


class SharedCount:
    """A count in shared memory; it goes round at 2**32, so compare it for equality only.

    Args:
        memory: the mapped memory in which it lies.
        offset: its place in that memory [bytes], a multiple of 4; counts that change often lie 64
            bytes apart, so that each has a cache line of its own.
        futex: the kernel's calls by which ranks sleep and are woken.

    Attributes:
        cell: the word itself; `cell.value` is the quick way to read it.
    """

    __slots__ = ("_address", "_futex", "cell")

    def __init__(self, memory: MappedMemory, offset: int, futex: Futex) -> None:
        self.cell = ctypes.c_uint32.from_buffer(memory, offset)  # keeps the memory alive
        self._address, self._futex = ctypes.addressof(self.cell), futex

    def post(self, value: int) -> None:
        """Sets the count, after everything that this rank wrote before, and wakes who sleeps."""
        self._futex.fence()
        self.cell.value = value
        self._futex.wake(self._address)

    def sleep(self, stale: int, seconds: float) -> None:
        """Sleeps while the count is `stale`, but not longer than `seconds`, nor over a signal."""
        self._futex.sleep(self._address, stale, seconds)

    def nudge(self) -> None:
        """Wakes who sleeps, to look around."""
        self._futex.wake(self._address)


SLOTS = 3
# The slots in use at one time, of four ranks, fit into the last-level cache of a server's core
# complex (32 MB); with smaller ones, large tensors take more meetings.
SLOT_BYTES = 2**21
# Rounds are counted up to here and then from 0 again, so that slots follow each other all the same.
TURN = SLOTS * 2**30
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
        ranks: the global ranks.
        rank: this rank's index in `ranks`.
        segments: the mapped segment of each rank, of SEGMENT_BYTES.
        peers: the processes of the ranks, which may end.
        watch: what waits where it takes long.
        futex: the kernel's calls by which ranks sleep and are woken.
        spins: whether waiting may take a core for a moment: there is one for each rank.
        memory: the memory of the device on which slots lie; None: they lie in the segments.
        slots: there, the slots of each rank [SLOTS * SLOT_BYTES].

    Attributes:
        memory: the memory of that device, or None.
        device: the device on which slots lie.
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
        memory: DeviceMemory | None = None,
        slots: Sequence[Tensor] | None = None,
    ) -> None:
        self.memory = memory
        self.device = torch.device("cpu") if memory is None else memory.device
        self.ranks, self.rank, self.size = ranks, rank, len(ranks)
        self.futex = futex
        self._peers, self._watch = peers, watch
        self._spin_s = SPIN_S if spins else 0.0
        self._came = [SharedCount(segment, 0, futex) for segment in segments]
        self._left = [SharedCount(segment, _LEFT_AT, futex) for segment in segments]
        self._others = [(i, came, came.cell) for i, came in enumerate(self._came) if i != rank]
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
        self._round = 0
        self._views: dict[tuple[torch.dtype, tuple[int, ...]], list[list[Tensor]]] = {}
        self._cuts: dict[tuple[torch.dtype, int], list[list[tuple[Tensor, ...]]]] = {}

    def staged(self, dtype: torch.dtype, shape: tuple[int, ...], ago: int = 0) -> list[Tensor]:
        """Returns each rank's slot as a tensor, in rank order.

        Args:
            dtype: the type of the tensors.
            shape: the shape of the tensors, of SLOT_BYTES at most.
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
        return views[(self._round + 1 - ago) % SLOTS]

    def segments(self, dtype: torch.dtype, length: int, ago: int) -> list[tuple[Tensor, ...]]:
        """Returns each rank's slot as a flat tensor, cut into the segments that the ranks sum.

        Args:
            dtype: the type of the tensors.
            length: the elements of a tensor; it is cut into near-equal segments.
            ago: the round whose slot it is, as for `staged`.
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
        return cuts[(self._round + 1 - ago) % SLOTS]

    def settle(self) -> None:
        """Returns when this rank has read and written what it was to, before it says so."""
        if self.memory is not None:
            self.memory.settle()

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
            mark: a function that hears that this rank waits.

        Raises:
            CommTimeout: not all ranks came; it names those that did not.
            PeerLost: a rank's process has ended, or it has left the world or given up.
            CommError: a rank came for something else.
        """
        mark("wait")
        stale = self._round
        self._round = (stale + 1) % TURN
        signs = self._signs[self._round % SLOTS]
        signs[self.rank].value = self._sign
        self.settle()
        self._came[self.rank].post(self._round)
        for index, came, cell in self._others:
            # A rank can be one round ahead but never more than one behind.
            if cell.value == stale:
                self.wait(index, came, stale, what)
        self.futex.fence()
        for index, sign in enumerate(signs):
            if sign.value != self._sign:
                raise CommError(
                    f"rank {self._watch.rank} came for {what}, "
                    f"rank {self.ranks[index]} for something else or with another size"
                )

    def exchange(self, words: Sequence[int], what: object) -> list[list[int]]:
        """Returns the numbers that each rank brings, in rank order.

        Args:
            words: the whole numbers of this rank, as many on every rank.
            what: what is exchanged, in words for errors.

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
            put: a function that stages the portion of an index in the coming round.
            take: a function that reads the portion of an index, from the slots of 1 round ago.
            what: the collective; its `str` goes into errors.
            mark: a function that hears that this rank waits.

        Raises:
            CommError: other ranks did not come, or came for something else.
        """
        for step in range(count):
            put(step)
            if step:
                take(step - 1)
            self.meet(what, mark)
        take(count - 1)

    def wait(self, index: int, count: SharedCount, stale: int, what: object) -> None:
        """Returns when `count`, which the rank at `index` raises, is no longer `stale`.

        Raises:
            CommError: other ranks did not come, as for `meet`.
        """
        cell = count.cell
        if self._spin_s:
            until = time.perf_counter() + self._spin_s
            while time.perf_counter() < until:
                if cell.value != stale:
                    return
                os.sched_yield()
        self._watch.until(
            lambda: cell.value != stale,
            lambda: self._sleep(index, count, stale, str(what)),
            self.ranks,
            str(what),
        )

    def leave(self) -> None:
        """Tells who waits for this rank, now or later, that it does not come any more."""
        self._left[self.rank].post(1)
        self._came[self.rank].nudge()

    def _sleep(self, index: int, count: SharedCount, stale: int, what: str) -> None:
        restless = self._watch.tend()
        count.sleep(stale, RESTLESS_S if restless else TICK.total_seconds())
        if count.cell.value != stale:
            return
        # Only of whom this rank waits for: another that came to this meeting may leave after it.
        gone = bool(self._left[index].cell.value)
        if not gone and not self._peers.has_ended(self.ranks[index]):
            return
        self.futex.fence()
        if count.cell.value != stale:  # it came first
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
        """Watches further processes; those of ranks that it knows already stay as they are.

        Args:
            pids: the process id of each global rank that is on this host.
        """
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
