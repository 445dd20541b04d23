"""Counts in shared memory that one rank raises and others sleep on, as cheap as Linux allows.

A count is stored and read as one aligned 32-bit word, which no processor tears. What a rank wrote
before it raised its count must be visible to whoever sees the count raised. x86 keeps the order of
stores and of loads, so there the plain store is enough. Elsewhere (ARM) `fence` is called on both
sides: a FUTEX_WAKE passes a full barrier (smp_mb in the kernel's futex_hb_waiters_pending) even
where nobody sleeps. No wake is lost either: FUTEX_WAIT compares the word again in the kernel, under
the lock that the waker takes.
"""

import ctypes
import errno
import os
import platform
import sys
import time
from collections.abc import Callable

from workbench.comm.shared_memory.segment import MappedMemory

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
        futex: what wakes and sleeps.

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
