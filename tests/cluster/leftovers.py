"""What clusters leave behind."""

import time

import psutil

from workbench.cluster.processes import MARK


def of(owner: int) -> list[psutil.Process]:
    """Processes that still run of all clusters that the process `owner` started."""
    found = []
    for process in psutil.process_iter():
        try:
            mark = process.environ().get(MARK, "")
        except psutil.Error:
            continue
        if mark.startswith(".cluster-") and mark.split("-")[-2] == str(owner):
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
