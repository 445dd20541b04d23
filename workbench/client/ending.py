"""How clusters end, and what is removed of those that have."""

import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

from workbench.hosts.processes import is_alive, until
from workbench.store import registry
from workbench.store.errors import StoreError
from workbench.store.record import State
from workbench.store.store import Store
from workbench.supervisor import supervisor_of

STORE = "server.sqlite"
END_WITHIN_S = 5.0
TICK_S = 0.02
UNFINISHED: tuple[State, ...] = ("queued", "starting", "running", "stopping", "paused")


def end(folder: Path, *, keep_folder: bool = False, at_once: bool = False) -> None:
    """Ends a supervisor and all that it keeps.

    Args:
        folder: of the cluster.
        keep_folder: so that it can be attached to again.
        at_once: do not wait for a supervisor that was asked to end.
    """
    if (supervisor := supervisor_of(folder)) is not None:
        if at_once:
            os.kill(supervisor.pid, signal.SIGTERM)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if until(lambda: not supervisor.is_alive, END_WITHIN_S, TICK_S):
                break
            with suppress(ProcessLookupError):
                os.kill(supervisor.pid, number)
    if not keep_folder:
        registry.remove(folder)
        shutil.rmtree(folder, ignore_errors=True)


def sweep(directory: Path) -> None:
    """Removes what clusters without a given name have left, which have ended with their owners.

    Weights are there, which are large. What has unfinished jobs can be attached to, and stays.
    """
    for folder in directory.glob(f"{registry.PREFIX}*"):
        owner = registry.owner_of(registry.name_of(folder))
        if owner is None or is_alive(owner) or supervisor_of(folder) is not None:
            continue
        with suppress(StoreError):  # damaged, or of another version: it is not ours to remove
            if (folder / STORE).exists() and Store(folder / STORE).jobs(states=UNFINISHED):
                continue
            registry.remove(folder)
            shutil.rmtree(folder, ignore_errors=True)
