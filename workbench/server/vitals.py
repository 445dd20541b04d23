"""What the kernel says of processes: whether they work, are stopped, or grow."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from workbench.store.process import stat_file

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_OOM_KILLS = "oom_kill "


@dataclass(frozen=True)
class Sample:
    """One look at a process.

    Attributes:
        state: the kernel's letter for it; "T" where it is stopped by a signal.
    """

    state: str
    cpu_s: float
    rss_bytes: int


class Process:
    """A process whose figures are looked at again and again; its file is opened once.

    Args:
        pid: the process, or the relay that stands for one on another host.
    """

    def __init__(self, pid: int, folder: Path) -> None:
        flags = os.O_RDONLY | os.O_CLOEXEC
        self._clock: int | None = None
        try:
            self._file = os.open(stat_file(folder, pid), flags)
        except FileNotFoundError:
            self._file = os.open(f"/proc/{pid}/stat", flags)
            self._clock = ~pid << 3 | 2  # clock_getcpuclockid(3)

    def sample(self) -> Sample:
        """Looks at it.

        Raises:
            ProcessLookupError: it has ended.
        """
        state, *rest = os.pread(self._file, 4096, 0).rpartition(b")")[2].split()
        ticks, pages = int(rest[10]) + int(rest[11]), int(rest[20])
        cpu_s = ticks / _TICKS_PER_S
        if self._clock is not None:
            # To the nanosecond: one that is made slow works for less than a tick between looks.
            with suppress(OSError):  # it has ended
                cpu_s = time.clock_gettime(self._clock)
        return Sample(state.decode(), cpu_s, pages * _PAGE_BYTES)

    def close(self) -> None:
        """Looks at it no more."""
        os.close(self._file)


@dataclass
class _Seen:
    process: Process
    at: float
    sample: Sample
    stopped_at: float | None = None
    cpu_share: float = 0.0


class Vitals:
    """Looks at processes again and again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[int, _Seen] = {}

    def poll(self, pid: int, now: float) -> None:
        """Takes a sample of a process."""
        last = self._seen.get(pid)
        try:
            process = Process(pid, self._folder) if last is None else last.process
            found = process.sample()
        except (FileNotFoundError, ProcessLookupError):
            self.drop(pid)
            return
        if last is None:
            stopped_at = now if found.state == "T" else None
            self._seen[pid] = _Seen(process, now, found, stopped_at)
            return
        worked = found.cpu_s - last.sample.cpu_s
        # One that is stopped and let go on in turns works in between: it is slow, not stopped.
        if found.state != "T":
            last.stopped_at = None
        elif last.stopped_at is None or worked > 0:
            last.stopped_at = now
        if now > last.at:
            last.cpu_share = worked / (now - last.at)
        last.at, last.sample = now, found

    def works(self, pid: int) -> None:
        """Takes notice that a process was seen to work, by what it wrote."""
        if (seen := self._seen.get(pid)) is not None:
            seen.stopped_at = None

    def excuse(self, seconds: float) -> None:
        """Does not count the last seconds, in which nobody looked."""
        for seen in self._seen.values():
            if seen.stopped_at is not None:
                seen.stopped_at += seconds

    def is_stopped(self, pid: int) -> bool:
        """Whether it was stopped by a signal when it was last looked at."""
        seen = self._seen.get(pid)
        return seen is not None and seen.stopped_at is not None

    def stopped_s(self, pid: int, now: float) -> float:
        """For how long it has been stopped; 0 where it is not."""
        seen = self._seen.get(pid)
        return 0.0 if seen is None or seen.stopped_at is None else now - seen.stopped_at

    def cpu_share(self, pid: int) -> float:
        """Processor time over time, of one core, between the last two looks."""
        seen = self._seen.get(pid)
        return 0.0 if seen is None else seen.cpu_share

    def rss_bytes(self, pid: int) -> int:
        """Resident memory at the last look."""
        seen = self._seen.get(pid)
        return 0 if seen is None else seen.sample.rss_bytes

    def drop(self, pid: int) -> None:
        """Looks at it no more."""
        if (seen := self._seen.pop(pid, None)) is not None:
            seen.process.close()


def out_of_memory_kills() -> int:
    """How many processes this kernel has ended because memory ran out; 0 where it does not say."""
    try:
        with open("/proc/vmstat") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith(_OOM_KILLS))
    except OSError:
        return 0
