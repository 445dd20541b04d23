"""Memory that processes of one host share, with no name and no trace.

A segment is an anonymous file (memfd): it counts as memory, not towards /dev/shm, and is gone
when the last process that maps it is, however that ended. Other processes open it through
/proc/<pid>/fd/<number> while its maker holds it open.
"""

import mmap
import os
from dataclasses import dataclass

PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class Offer:
    """Where other processes of the host find a segment.

    Attributes:
        pid: the process that made it.
        fd: its descriptor there.
        device: of the file, as stat says.
        inode: of the file; with `device` it tells this file from any other.
        size: in bytes.
    """

    pid: int
    fd: int
    device: int
    inode: int
    size: int


def create(size: int, *, reserved: bool) -> Offer:
    """Makes a segment of `size` bytes, all zero; whoever calls closes the `fd`.

    Args:
        size: in bytes.
        reserved: takes all of its memory now; otherwise pages come when they are touched, as they
            do for any tensor.

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


def attach(offer: Offer) -> mmap.mmap:
    """Maps a segment, this process's own or another's.

    Raises:
        OSError: it cannot be opened, or is another file than was offered.
    """
    if offer.pid == os.getpid():
        return mmap.mmap(offer.fd, offer.size)
    path = f"/proc/{offer.pid}/fd/{offer.fd}"
    fd = None
    try:
        _compare(os.stat(path), offer, path)  # before opening: it might be a pipe, or a device
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        _compare(os.fstat(fd), offer, path)
        return mmap.mmap(fd, offer.size)
    finally:
        if fd is not None:
            os.close(fd)


def _compare(found: os.stat_result, offer: Offer, path: str) -> None:
    if (found.st_dev, found.st_ino, found.st_size) != (offer.device, offer.inode, offer.size):
        raise OSError(f"{path} is not the file that was offered")


def this_host() -> str:
    """The same for two processes if they may share memory and know each other's process ids.

    Emulated hosts are network namespaces: traffic between them shall take their shaped links.

    Raises:
        OSError: this system has no /proc.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net")]
    return f"{boot} {spaces[0]} {spaces[1]}"
