"""What a cluster stands on, and how it is struck: disk, clock, memory, links, hosts."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.faults.jumping import sitecustomize as jumping
from workbench.bench.recovery import Disk, as_root, mounted_disk
from workbench.hosts.emulated.hosts import Hosts
from workbench.hosts.processes import until
from workbench.hosts.remote.gathering import AGENT
from workbench.store.errors import HostsError
from workbench.store.run_folder import complete_checkpoints

HOUR_S = 3600.0
GROUPS = Path("/sys/fs/cgroup")
# The folder of control groups and the file of their limit, of both kinds of them.
MEMORY = ((GROUPS / "memory", "memory.limit_in_bytes"), (GROUPS, "memory.max"))
LITTLE = 1 << 20  # bytes: an engine wants more than that at once
GET_FLAGS, SET_FLAGS = 0x80086601, 0x40086602  # FS_IOC_GETFLAGS and FS_IOC_SETFLAGS
IMMUTABLE = 0x10  # FS_IMMUTABLE_FL
LEAST_CHUNK = 4096
LOOK_S, MOUNTED_WITHIN_S = 0.01, 10.0
SFTP_SERVER = "/usr/lib/openssh/sftp-server"


class NetworkDisk:
    """A folder of this host behind SFTP, mounted at `root`; `wire` has the server's process id.

    The server is a process that `sshfs` has started.
    """

    def __init__(self, root: Path, wire: Path) -> None:
        self.root, self._wire = root, wire

    def stall(self) -> None:
        """Who reads or writes waits until `go_on`."""
        self._send(signal.SIGSTOP)

    def go_on(self) -> None:
        self._send(signal.SIGCONT)

    def cut(self) -> None:
        """Breaks the connection: what is under way fails, and files that are open are lost."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        pid = self._wire.read_text().strip() if self._wire.exists() else ""
        if pid:
            with suppress(ProcessLookupError):
                os.kill(int(pid), number)


@contextmanager
def network_disk(folder: Path) -> Iterator[NetworkDisk | None]:
    """A network file system that is mounted in a folder; None where this process may mount none."""
    served, root, wire, pid = (folder / n for n in ("served", "network", "wire", "wire.pid"))
    served.mkdir()
    root.mkdir()
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
    found = NetworkDisk(root, pid)
    try:
        until(lambda: client.poll() is not None or root.is_mount(), MOUNTED_WITHIN_S, LOOK_S)
        yield found if root.is_mount() else None
    finally:
        found.go_on()
        if root.is_mount():
            as_root("umount", "--lazy", root)
        client.terminate()
        client.wait()


class Place:
    """What a cluster stands on.

    Attributes:
        disk: the disk of runs and store; None: they have none of their own.
        network: the file system of runs that comes over a network; None: they are on a disk.
        hosts: the emulated hosts of its engines; None: they are on this host.
        directory: the folder for runs.
        profile: how engines get to the hosts; None: they are on this host.
    """

    def __init__(
        self, folder: Path, stack: ExitStack, num_hosts: int, network: NetworkDisk | None
    ) -> None:
        self._folder, self._stack, self._num_hosts = folder, stack, num_hosts
        self.network = network
        self.disk: Disk | None = None if network else stack.enter_context(mounted_disk(folder))
        mounted = self.disk or network
        self.directory = (folder if mounted is None else mounted.root) / "runs"
        self.hosts: Hosts | None = None
        self.profile: str | None = None
        self._clock = folder / "clock"
        stack.enter_context(_clock_of(self._clock))
        if num_hosts:
            self.renew_hosts()

    def renew_hosts(self) -> None:
        """Makes the hosts, in the place of earlier ones."""
        if self.hosts is not None:
            self.hosts.stop()
        self.hosts = self._stack.enter_context(Hosts(self._num_hosts))
        profile = Path(tempfile.mkdtemp(dir=self._folder)) / "profile"
        self.profile = str(self.hosts.ssh(profile))

    def fill(self, seconds: float) -> None:
        """Has the disk be full for a while."""
        ballast = self.disk.root / "ballast"
        _for(seconds, partial(_fill, ballast), partial(ballast.unlink, missing_ok=True))

    def freeze(self, seconds: float) -> None:
        _for(seconds, self.disk.freeze, self.disk.thaw)

    def stall(self, seconds: float) -> None:
        _for(seconds, self.network.stall, self.network.go_on)

    def forbid(self, run: Path, seconds: float) -> None:
        """Has a run's folder, and that of its attempts, take no files for a while."""
        folders = [each for each in (run, run / "attempts") if each.exists()]
        folders += run.glob("attempts/*")

        def set_all(unwritable: bool) -> None:
            for folder in folders:
                _set_unwritable(folder, unwritable)

        _for(seconds, partial(set_all, True), partial(set_all, False))

    def damage(self, run: Path) -> None:
        """Overwrites some of the newest checkpoint."""
        there = complete_checkpoints(run)
        (file, *_) = sorted(there[max(there)].glob("*.safetensors"))
        middle = file.stat().st_size // 2
        with file.open("r+b") as opened:
            opened.seek(middle)
            before = opened.read(16)
            opened.seek(middle)
            opened.write(bytes(255 - each for each in before))

    def jump(self, seconds: float) -> None:
        """Sets the clock, for good, of all processes of the cluster but the notebook's."""
        ahead = float(self._clock.read_text().split()[0]) if self._clock.exists() else 0.0
        part = self._clock.with_suffix(".part")
        part.write_text(f"{ahead + seconds} {time.time()}")
        part.replace(self._clock)

    def starve(self, pid: int) -> None:
        """Lets a process have no more memory than it has; the kernel kills it as it wants some."""
        parent, limit = _memory()
        group = Path(tempfile.mkdtemp(dir=parent, prefix="workbench-faults-"))
        self._stack.callback(_remove, group)
        (group / limit).write_text(str(LITTLE))
        (group / "cgroup.procs").write_text(str(pid))

    def unplug(self, index: int, seconds: float) -> None:
        """Has a host be reached by nobody for a while."""
        _for(seconds, partial(self.hosts.disconnect, index), partial(self.hosts.reconnect, index))

    def vanish(self, index: int) -> None:
        """Ends a host without a word to anybody, as a loss of power does."""
        self.hosts.disconnect(index)
        for process in self._on_hosts([index]):
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)

    def agents(self) -> list[int]:
        """The processes that start engines on the hosts."""
        found = []
        for process in self._on_hosts(range(len(self.hosts))):
            with suppress(psutil.Error):
                command = process.cmdline()
                if AGENT in command and Path(command[0]).name.startswith("python"):
                    found.append(process.pid)
        return found

    def _on_hosts(self, indices: Iterable[int]) -> Iterator[psutil.Process]:
        networks = {
            word.removeprefix("--net=")
            for index in indices
            for word in self.hosts.site(index).enter
            if word.startswith("--net=")
        }
        namespaces = {Path(network).stat().st_ino for network in networks}
        for process in psutil.process_iter():
            with suppress(OSError):  # it has ended
                if os.stat(f"/proc/{process.pid}/ns/net").st_ino in namespaces:
                    yield process


@contextmanager
def place(folder: Path, *, hosts: int, network: bool) -> Iterator[Place]:
    """What a cluster stands on; the test is skipped where there can be no hosts, or no network."""
    with ExitStack() as stack:
        mounted = stack.enter_context(network_disk(folder)) if network else None
        if network and mounted is None:
            pytest.skip("sshfs cannot mount a file system here")
        if hosts and not shutil.which("sshd", path="/usr/sbin:/usr/bin"):
            pytest.skip("there is no sshd")
        try:
            yield Place(folder, stack, hosts, mounted)
        except HostsError as error:
            pytest.skip(str(error))


def can_starve() -> bool:
    """Whether this process can limit the memory of others."""
    return _memory() is not None


def _memory() -> tuple[Path, str] | None:
    for parent, limit in MEMORY:
        controls = parent / "cgroup.subtree_control"
        if controls.exists() and "memory" not in controls.read_text().split():
            continue
        if os.access(parent / "cgroup.procs", os.W_OK):
            return parent, limit
    return None


def _for(seconds: float, begin: Callable[[], object], end: Callable[[], object]) -> None:
    try:
        begin()
        time.sleep(seconds)
    finally:
        end()


def _fill(ballast: Path) -> None:
    """Takes all room that is left."""
    with ballast.open("ab") as file:
        chunk = 1 << 26
        while chunk >= LEAST_CHUNK:
            try:
                os.posix_fallocate(file.fileno(), file.tell(), chunk)
                file.seek(0, os.SEEK_END)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                chunk //= 2


def _set_unwritable(folder: Path, unwritable: bool) -> None:
    """Sets whether a folder takes no new files and loses none, not even root's."""
    there = os.open(folder, os.O_RDONLY)
    try:
        flags = int.from_bytes(fcntl.ioctl(there, GET_FLAGS, bytes(8))[:4], "little")
        flags = flags | IMMUTABLE if unwritable else flags & ~IMMUTABLE
        fcntl.ioctl(there, SET_FLAGS, flags.to_bytes(8, "little"))
    finally:
        os.close(there)


@contextmanager
def _clock_of(file: Path) -> Iterator[None]:
    """Has processes that are started meanwhile look into a file for how far their clock is."""
    folder = str(Path(jumping.__file__).parent)
    sys.path.insert(0, folder)
    os.environ[jumping.FILE] = str(file)
    try:
        yield
    finally:
        sys.path.remove(folder)
        del os.environ[jumping.FILE]


def _remove(group: Path) -> None:
    with suppress(OSError):  # the process that was in it has not been collected yet
        group.rmdir()
