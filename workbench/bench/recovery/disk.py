"""A disk that fills up or stands still: a file system of its own, in a file, which root mounts."""

import errno
import fcntl
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MIB = 4096  # sparse: what is not written takes no room
FREEZE, THAW = 0xC0045877, 0xC0045878  # FIFREEZE and FITHAW of linux/fs.h
GET_FLAGS, SET_FLAGS = 0x80086601, 0x40086602  # FS_IOC_GETFLAGS and FS_IOC_SETFLAGS
IMMUTABLE = 0x10  # FS_IMMUTABLE_FL
LEAST_CHUNK = 4096


class Disk:
    """An ext4 file system.

    Args:
        root: the folder where it is mounted.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._ballast = root / "ballast"

    def freeze(self) -> None:
        """Who writes waits until `thaw`, and cannot be interrupted or killed meanwhile."""
        self._do(FREEZE)

    def thaw(self) -> None:
        """Lets them go on."""
        with suppress(OSError):  # it was not frozen
            self._do(THAW)

    def fill(self) -> None:
        """Takes all room that is left, until `empty`."""
        with self._ballast.open("ab") as file:
            chunk = 1 << 26
            while chunk >= LEAST_CHUNK:
                try:
                    os.posix_fallocate(file.fileno(), file.tell(), chunk)
                    file.seek(0, os.SEEK_END)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    chunk //= 2

    def empty(self) -> None:
        """Gives the room back."""
        self._ballast.unlink(missing_ok=True)

    def _do(self, request: int) -> None:
        folder = os.open(self.root, os.O_RDONLY)
        try:
            fcntl.ioctl(folder, request, 0)
        finally:
            os.close(folder)


def set_unwritable(folder: Path, *, unwritable: bool) -> None:
    """Sets whether a folder takes no new files and loses none, not even root's; those in it stay.

    Raises:
        OSError: this process is not root's, or the file system has no such flag.
    """
    there = os.open(folder, os.O_RDONLY)
    try:
        flags = int.from_bytes(fcntl.ioctl(there, GET_FLAGS, bytes(8))[:4], "little")
        flags = flags | IMMUTABLE if unwritable else flags & ~IMMUTABLE
        fcntl.ioctl(there, SET_FLAGS, flags.to_bytes(8, "little"))
    finally:
        os.close(there)


@contextmanager
def disk(folder: Path) -> Iterator[Disk | None]:
    """A disk that is mounted in a folder; None where this process may not mount one."""
    image, root = folder / "disk.img", folder / "disk"
    root.mkdir()
    try:
        with image.open("wb") as file:
            file.truncate(MIB << 20)
        _run("mkfs.ext4", "-q", str(image))
        _run("mount", "-o", "loop", str(image), str(root))
    except (OSError, subprocess.CalledProcessError):
        yield None
        return
    found = Disk(root)
    try:
        yield found
    finally:
        found.thaw()
        _run("umount", "--lazy", str(root))  # a process that was killed may still have files open


def _run(*command: str) -> None:
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # where few people's shells look
    environment = {**os.environ, "PATH": path}
    subprocess.run(command, check=True, env=environment, stderr=subprocess.DEVNULL)
