"""What clusters leave behind."""

import re
import time
from pathlib import Path

import psutil

from workbench.hosts.processes import MARK


def of(whose: int | Path) -> list[psutil.Process]:
    """Processes that still run: of a cluster, by its folder, or of all that a process started.

    Clusters that have names are not known as their owner's.
    """
    is_one = isinstance(whose, Path)
    name = re.escape(whose.name) if is_one else rf"\.cluster-.+-{whose}-[0-9a-f]{{8}}"
    own, found = re.compile(name), []
    for process in psutil.process_iter():
        try:
            told = [process.environ().get(MARK, ""), *process.cmdline()]
        except psutil.Error:
            continue
        if any(own.search(text) for text in told):
            found.append(process)
    return found


def gone_within(whose: int | Path, seconds: float) -> bool:
    """Whether nothing of these is left, at once or soon."""
    deadline = time.monotonic() + seconds
    while of(whose):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def of_kind(whose: int | Path, module: str) -> list[psutil.Process]:
    """Those that run a module, "ipyparallel.controller"; without what it has forked."""
    own = [process for process in of(whose) if module in process.cmdline()]
    pids = {process.pid for process in own}
    return [process for process in own if process.ppid() not in pids]
