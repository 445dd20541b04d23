"""Memory that processes of one host share, with no name and no trace.

A segment is an anonymous file (memfd): it counts as memory, not towards /dev/shm, and is gone
when the last process that maps it is, however that ended. Other processes open it through
/proc/<pid>/fd/<number> while its maker holds it open. Once mapped, it needs no descriptor.
"""

import ctypes
import mmap
import os
import weakref
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
        pid: the id of the process that made it.
        fd: the number of its descriptor there.
        device: the device of the file, as stat gives it.
        inode: the inode of the file; with `device` it tells this file from any other.
        size: the size of the segment, in bytes.
    """

    pid: int
    fd: int
    device: int
    inode: int
    size: int


def create(size: int, *, reserved: bool) -> Offer:
    """Makes a segment of `size` bytes, all zero; whoever calls closes the `fd`.

    Args:
        size: the size of the segment, in bytes.
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
