"""Control groups that give each emulated host its share of processor time (cgroup v1 or v2).

The group of host i of the network T is called workbench-T-host<i>. What runs in it was started
there, or by something that was.
"""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from workbench.hosts.emulated.network import abandoned, belongs
from workbench.hosts.host import control_groups
from workbench.store.errors import HostsError
from workbench.store.process import ProcessIdentity

# Short against a step, long against the scheduler's slice of 5 ms and its tick of 4 ms.
PERIOD_US = 20_000
LEAST_QUOTA_US = 1_000  # that the kernel grants; what is less has a longer period
REMOVE_WITHIN_S = 5.0
PREFIX = "workbench-"


@dataclass(frozen=True)
class CpuController:
    """The cpu controller of the control groups.

    Attributes:
        version: 1 or 2.
    """

    folder: Path
    version: int

    @classmethod
    def find(cls, root: Path = Path("/")) -> "CpuController":
        """Finds it in this process' own group with version 1, in the uppermost one with version 2.

        Version 2 wants no processes in a group that hands its controllers down; this process' own
        has some. The uppermost one is exempt.

        Raises:
            HostsError: there is no such controller.
        """
        for folder in control_groups(root, "cpu"):
            if (folder / "cpu.cfs_quota_us").exists():
                return cls(folder, 1)
        top = root / "sys/fs/cgroup"
        with suppress(OSError):
            if "cpu" in (top / "cgroup.controllers").read_text().split():
                return cls(top, 2)
        raise HostsError(
            f"emulated hosts need control groups with the cpu controller; {top} has none"
        )

    def make(self, tag: str, index: int, cpus: float | None) -> Path:
        """Makes the group of a host and returns the file that takes a process into it.

        Args:
            cpus: the processors' worth of time that the host gets; None: as much as there is.

        Raises:
            HostsError: the kernel refused.
        """
        group = self._group(f"{tag}-host{index}")
        try:
            group.mkdir()
            if cpus is not None:
                period_us = max(PERIOD_US, math.ceil(LEAST_QUOTA_US / cpus))
                self._limit(group, round(cpus * period_us), period_us)
        except OSError as error:
            raise HostsError(f"no control group could limit host {index}: {error}") from error
        return group / "cgroup.procs"

    def remove(self, tag: str) -> None:
        """Ends all that runs in a network's groups, and removes them.

        Raises:
            HostsError: a process did not end.
        """
        deadline = time.monotonic() + REMOVE_WITHIN_S
        for name in self.names():
            group = self._group(name)
            while belongs(name, tag) and not _removed(group):
                for pid in _members(group):
                    with suppress(ProcessLookupError):
                        process = ProcessIdentity.of(pid)
                        if pid in _members(group):  # else another has its id by now
                            process.send(signal.SIGKILL)
                if time.monotonic() > deadline:
                    raise HostsError(f"{group} cannot be removed: {list(_members(group))} run")
                time.sleep(0.005)

    def recover(self) -> None:
        """Removes groups whose owner has ended; one in which something runs has to wait."""
        tags = abandoned(self.names())
        for name in self.names():
            if any(belongs(name, tag) for tag in tags):
                _removed(self._group(name))

    def names(self) -> list[str]:
        """Returns the names of all emulated hosts that have a group."""
        return [group.name.removeprefix(PREFIX) for group in self.folder.glob(f"{PREFIX}*")]

    def _group(self, name: str) -> Path:
        return self.folder / f"{PREFIX}{name}"

    def _limit(self, group: Path, quota_us: int, period_us: int) -> None:
        if self.version == 1:
            (group / "cpu.cfs_period_us").write_text(str(period_us))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
            return
        below = self.folder / "cgroup.subtree_control"
        if "cpu" not in below.read_text().split():
            below.write_text("+cpu")
        (group / "cpu.max").write_text(f"{quota_us} {period_us}")


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # something runs in it
        return False
    return True


def _members(group: Path) -> Iterator[int]:
    with suppress(OSError):
        yield from map(int, (group / "cgroup.procs").read_text().split())
