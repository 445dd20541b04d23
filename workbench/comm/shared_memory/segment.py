"""Memory that processes of one host share, with no name and no trace.

A segment is an anonymous file (memfd): it counts as memory, not towards /dev/shm, and is gone
when the last process that maps it is, however that ended. Other processes open it through
/proc/<pid>/fd/<number> while its maker holds it open. Once mapped, it needs no descriptor.

A count that one rank raises and others sleep on is stored and read as one aligned 32-bit word,
which no processor tears. What a rank wrote before it raised its count must be visible to whoever
sees the count raised. x86 keeps the order of stores and of loads, so there the plain store is
enough. Elsewhere (ARM) `fence` is called on both sides: a FUTEX_WAKE passes a full barrier (smp_mb
in the kernel's futex_hb_waiters_pending) even where nobody sleeps. No wake is lost either:
FUTEX_WAIT compares the word again in the kernel, under the lock that the waker takes.
"""

import ctypes
import errno
import mmap
import os
import platform
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

PAGE = mmap.PAGESIZE

MappedMemory = ctypes.Array[ctypes.c_ubyte]
"""A mapped segment. It stays mapped while this object is there, or anything that was made of its
buffer."""


_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True)
class Offer:
    """Where other processes of the host find a segment.

    Attributes:
        inode: the inode of the file; with `device` it tells this file from any other.
    """

    pid: int
    fd: int
    device: int
    inode: int
    size: int


def create(size: int, *, reserved: bool) -> Offer:
    """Makes a segment of `size` bytes, all zero; whoever calls closes the `fd`.

    Args:
        reserved: whether to take all of its memory now; otherwise pages come when they are
            touched, as they do for any tensor.

    Raises:
        OSError: this system has no anonymous files, or not enough memory.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd_create")
    fd = os.memfd_create("workbench", os.MFD_CLOEXEC)
    try:
        if reserved:
            os.posix_fallocate(fd, 0, size)
        else:
            os.ftruncate(fd, size)
        found = os.fstat(fd)
    except BaseException:
        os.close(fd)
        raise
    return Offer(os.getpid(), fd, found.st_dev, found.st_ino, size)


def attach(offer: Offer) -> MappedMemory:
    """Maps a segment, this process's own or another's.

    Raises:
        OSError: it cannot be opened, or is another file than was offered.
    """
    if offer.pid == os.getpid():
        return mapped(offer.fd, offer.size)
    path = f"/proc/{offer.pid}/fd/{offer.fd}"
    fd = None
    try:
        _compare(os.stat(path), offer, path)  # before opening: it might be a pipe, or a device
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        _compare(os.fstat(fd), offer, path)
        return mapped(fd, offer.size)
    finally:
        if fd is not None:
            os.close(fd)


def mapped(fd: int, size: int) -> MappedMemory:
    """Maps a file of which no descriptor is kept.

    (Python's own `mmap` keeps one of its own until 3.13, and a model may have hundreds of buffers,
    each of them in the memory of all ranks.)

    Raises:
        OSError: there is no memory, or no such file.
    """
    library = ctypes.CDLL(None, use_errno=True)
    of_map, of_unmap = library.mmap, library.munmap
    pointer, number = ctypes.c_void_p, ctypes.c_int
    of_map.restype = pointer
    of_map.argtypes = (pointer, ctypes.c_size_t, number, number, number, ctypes.c_long)
    of_unmap.argtypes = (pointer, ctypes.c_size_t)
    address = of_map(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_ubyte * size).from_address(address)
    # At the end of the process other threads may still use it; the system takes it back then.
    weakref.finalize(memory, of_unmap, address, size).atexit = False
    return memory


def _compare(found: os.stat_result, offer: Offer, path: str) -> None:
    if (found.st_dev, found.st_ino, found.st_size) != (offer.device, offer.inode, offer.size):
        raise OSError(f"{path} is not the file that was offered")


def this_host() -> str:
    """Returns a name, the same for two processes if they can share memory by their process ids.

    Emulated hosts are network namespaces: traffic between them shall take their shaped links.

    Raises:
        OSError: this system has no /proc.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net")]
    return f"{boot} {spaces[0]} {spaces[1]}"


# The system call's number, by the names that `platform.machine` gives.
_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE, _EVERYBODY = 0, 1, 2**31 - 1
# Where there is no futex a sleeper looks this often.
_PORTABLE_PAUSE_S = 0.0005
# Turns are counted up to here and then from 0 again: a multiple of the three slots of a rank.
TURNS = 3 * 2**30


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


class Meeting:
    """Where ranks come, turn after turn: a count of each in shared memory, which it raises.

    Whoever sees that a rank has come sees what it wrote before. A rank can be one turn ahead of
    another, and is never more than one behind.

    Args:
        maps: the mapped memory of each rank, with its count.
        offset: the place of the count there [bytes], a multiple of 4; counts that change often lie
            64 bytes apart, so that each has a cache line of its own.
        rank: this rank's index.

    Attributes:
        turn: the turn to which this rank has come; it goes round at TURNS.
    """

    def __init__(self, maps: Sequence[MappedMemory], offset: int, rank: int, futex: Futex) -> None:
        self._cells = [ctypes.c_uint32.from_buffer(memory, offset) for memory in maps]
        self._addresses = [ctypes.addressof(cell) for cell in self._cells]
        self._rank, self._futex = rank, futex
        self.turn = self._stale = 0

    def come(self) -> None:
        """Says that this rank has come to its next turn, and wakes who sleeps until then."""
        self._stale, self.turn = self.turn, (self.turn + 1) % TURNS
        self._futex.fence()
        self._cells[self._rank].value = self.turn
        self.nudge()

    def missing(self) -> int | None:
        """Returns the first rank that has not come to this rank's turn, if any."""
        stale = self._stale
        for index, cell in enumerate(self._cells):
            if cell.value == stale:
                return index
        self._futex.fence()
        return None

    def is_missing(self, index: int) -> bool:
        """Returns whether one rank has not come to this rank's turn."""
        return bool(self._cells[index].value == self._stale)

    def sleep(self, index: int, seconds: float) -> None:
        """Sleeps until a rank comes, but not longer than `seconds`, nor over a signal."""
        self._futex.sleep(self._addresses[index], self._stale, seconds)

    def nudge(self) -> None:
        """Wakes who sleeps until this rank comes, to look around."""
        self._futex.wake(self._addresses[self._rank])
