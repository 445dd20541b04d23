"""Disks that fail: file systems in a file, or behind a connection, which root mounts."""

import errno
import fcntl
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from workbench.hosts.processes import until

MIB = 4096  # sparse: what is not written takes no room
FREEZE, THAW = 0xC0045877, 0xC0045878  # FIFREEZE and FITHAW of linux/fs.h
GET_FLAGS, SET_FLAGS = 0x80086601, 0x40086602  # FS_IOC_GETFLAGS and FS_IOC_SETFLAGS
IMMUTABLE = 0x10  # FS_IMMUTABLE_FL
LEAST_CHUNK = 4096
LOOK_S, MOUNTED_WITHIN_S = 0.01, 10.0
SFTP_SERVER = "/usr/lib/openssh/sftp-server"


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


class NetworkDisk:
    """A folder of this host behind SFTP, whose server is a process that `sshfs` has started.

    Args:
        root: the folder where it is mounted.
        pid: a function that gives the server's process id; None: there is none at the moment.
    """

    def __init__(self, root: Path, pid: Callable[[], int | None]) -> None:
        self.root = root
        self._pid = pid

    def stall(self) -> None:
        """Who reads or writes waits until `go_on`."""
        self._send(signal.SIGSTOP)

    def go_on(self) -> None:
        """Lets the server answer again."""
        self._send(signal.SIGCONT)

    def cut(self) -> None:
        """Breaks the connection: what is under way fails, and files that are open are lost."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        pid = self._pid()
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


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


@contextmanager
def network_disk(folder: Path) -> Iterator[NetworkDisk | None]:
    """A network file system that is mounted in a folder; None where this process may mount none."""
    served, root, wire = folder / "served", folder / "network", folder / "wire"
    served.mkdir()
    root.mkdir()
    pid = folder / "wire.pid"
    # sshfs talks to what it takes for ssh: here to the server itself, of which it starts another
    # where the connection is cut.
    wire.write_text(f"#!/bin/sh\necho $$ > {pid}\nexec {SFTP_SERVER}\n")
    wire.chmod(0o700)
    command = ["sshfs", "-f", "-o", f"reconnect,ssh_command={wire}", f"here:{served}", str(root)]
    try:
        client = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    except OSError:
        yield None
        return

    def server() -> int | None:
        said = pid.read_text().strip() if pid.exists() else ""
        return int(said) if said else None

    found = NetworkDisk(root, server)
    try:
        until(lambda: client.poll() is not None or root.is_mount(), MOUNTED_WITHIN_S, LOOK_S)
        yield found if root.is_mount() else None
    finally:
        found.go_on()
        if root.is_mount():
            _run("umount", "--lazy", str(root))
        client.terminate()
        client.wait()


def _run(*command: str) -> None:
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # where few people's shells look
    environment = {**os.environ, "PATH": path}
    subprocess.run(command, check=True, env=environment, stderr=subprocess.DEVNULL)
