"""What happens to what a cluster's processes stand on: disk, clock, memory, links, hosts."""

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil

from workbench.bench.recovery.disk import Disk, NetworkDisk, disk, network_disk, set_unwritable
from workbench.bench.recovery.jumping import sitecustomize as jumping
from workbench.client.run.run import Run
from workbench.hosts.emulated.hosts import Hosts
from workbench.hosts.remote.gathering import AGENT
from workbench.store.errors import HostsError
from workbench.store.run_folder import complete_checkpoints

HOUR_S = 3600.0
GROUPS = Path("/sys/fs/cgroup")
# The folder of control groups and the file of their limit, of both kinds of them.
MEMORY = ((GROUPS / "memory", "memory.limit_in_bytes"), (GROUPS, "memory.max"))
LITTLE = 1 << 20  # bytes: an engine wants more than that at once


class Around:
    """What a cluster stands on: what can be struck of it, and how.

    Args:
        folder: a folder for all of it.
        stack: ends all of it.
        num_hosts: the number of emulated hosts; 0: engines are on this host.
        network: where runs are, if their folder comes over a network.

    Attributes:
        disk: the disk of runs and store; None: they have none of their own.
        network: the file system of runs that comes over a network; None: they are on a disk.
        hosts: the emulated hosts of its engines; None: they are on this host.
        directory: the folder for runs.
        profile: how engines get to the hosts; None: they are on this host.
    """

    def __init__(
        self,
        folder: Path,
        stack: ExitStack,
        num_hosts: int = 0,
        network: NetworkDisk | None = None,
    ) -> None:
        self._folder, self._stack, self._num_hosts = folder, stack, num_hosts
        self.network = network
        self.disk: Disk | None = None if network else stack.enter_context(disk(folder))
        mounted = self.disk or network
        self.directory = (folder if mounted is None else mounted.root) / "runs"
        self.hosts: Hosts | None = None
        self.profile: str | None = None
        self._clock = folder / "clock"
        stack.enter_context(_clock_of(self._clock))
        if num_hosts:
            self.renew_hosts()

    def renew_hosts(self) -> None:
        """Makes the hosts, in the place of earlier ones.

        Raises:
            HostsError: this process may not make hosts, or nobody can log in.
        """
        if self.hosts is not None:
            self.hosts.stop()
        self.hosts = self._stack.enter_context(Hosts(self._num_hosts))
        profile = Path(tempfile.mkdtemp(dir=self._folder)) / "profile"
        self.profile = str(self.hosts.ssh(profile))

    def fill(self, seconds: float) -> None:
        """Has the disk be full for a while."""
        assert self.disk is not None
        _for(seconds, self.disk.fill, self.disk.empty)

    def freeze(self, seconds: float) -> None:
        """Has the disk stand still for a while."""
        assert self.disk is not None
        _for(seconds, self.disk.freeze, self.disk.thaw)

    def stall(self, seconds: float) -> None:
        """Has the network's file system not answer for a while."""
        assert self.network is not None
        _for(seconds, self.network.stall, self.network.go_on)

    def forbid(self, run: Run, seconds: float) -> None:
        """Has a run's folder, and that of its attempts, take no files for a while."""
        folders = [each for each in (run.directory, run.directory / "attempts") if each.exists()]
        folders += run.directory.glob("attempts/*")

        def set_all(*, unwritable: bool) -> None:
            for folder in folders:
                set_unwritable(folder, unwritable=unwritable)

        _for(seconds, partial(set_all, unwritable=True), partial(set_all, unwritable=False))

    def damage(self, run: Run) -> None:
        """Overwrites some of the newest checkpoint."""
        there = complete_checkpoints(run.directory)
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
        found = _memory()
        assert found is not None
        parent, limit = found
        group = Path(tempfile.mkdtemp(dir=parent, prefix="workbench-bench-"))
        self._stack.callback(_remove, group)
        (group / limit).write_text(str(LITTLE))
        (group / "cgroup.procs").write_text(str(pid))

    def unplug(self, index: int, seconds: float) -> None:
        """Has a host be reached by nobody for a while."""
        assert self.hosts is not None
        _for(seconds, partial(self.hosts.disconnect, index), partial(self.hosts.reconnect, index))

    def vanish(self, index: int) -> None:
        """Ends a host without a word to anybody, as a loss of power does."""
        assert self.hosts is not None
        self.hosts.disconnect(index)
        for process in self._on_hosts([index]):
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)

    def agents(self) -> list[int]:
        """The processes that start engines on the hosts."""
        assert self.hosts is not None
        found = []
        for process in self._on_hosts(range(len(self.hosts))):
            with suppress(psutil.Error):
                command = process.cmdline()
                if AGENT in command and Path(command[0]).name.startswith("python"):
                    found.append(process.pid)
        return found

    def _on_hosts(self, indices: Iterable[int]) -> Iterator[psutil.Process]:
        assert self.hosts is not None
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


def _for(seconds: float, begin: Callable[[], object], end: Callable[[], object]) -> None:
    try:
        begin()
        time.sleep(seconds)
    finally:
        end()


@contextmanager
def around(folder: Path, num_hosts: int = 0, *, network: bool = False) -> Iterator[Around | None]:
    """What a cluster stands on; None where it is to have what there can be none of here.

    Args:
        folder: a folder for all of it.
        num_hosts: the number of emulated hosts; 0: engines are on this host.
        network: whether the folder of runs comes over a network.
    """
    with ExitStack() as stack:
        found = None
        mounted = stack.enter_context(network_disk(folder)) if network else None
        if network:
            if mounted is not None:
                found = Around(folder, stack, network=mounted)
        elif not num_hosts or shutil.which("sshd", path="/usr/sbin:/usr/bin"):
            with suppress(HostsError):
                found = Around(folder, stack, num_hosts)
        yield found


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
