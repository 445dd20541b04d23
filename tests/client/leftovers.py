"""What clusters leave behind."""

import re
import time

import psutil

from workbench.hosts.processes import MARK


def of(owner: int) -> list[psutil.Process]:
    """Processes that still run of all clusters without a name that `owner` started."""
    own, found = re.compile(rf"\.cluster-.+-{owner}-[0-9a-f]{{8}}"), []
    for process in psutil.process_iter():
        try:
            told = [process.environ().get(MARK, ""), *process.cmdline()]
        except psutil.Error:
            continue
        if any(own.search(text) for text in told):
            found.append(process)
    return found


def gone_within(owner: int, seconds: float) -> bool:
    """Whether nothing of a process' clusters is left, at once or soon."""
    deadline = time.monotonic() + seconds
    while of(owner):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def of_kind(owner: int, module: str) -> list[psutil.Process]:
    """Those that run a module, "ipyparallel.controller"; without what it has forked."""
    own = [process for process in of(owner) if module in process.cmdline()]
    pids = {process.pid for process in own}
    return [process for process in own if process.ppid() not in pids]
