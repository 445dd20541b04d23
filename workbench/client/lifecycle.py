"""How a cluster's processes begin, where each of them runs, and what is removed once they end."""

import os
import signal
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from workbench.hosts.emulated.hosts import Hosts
from workbench.hosts.host import assign, probe, whole_host
from workbench.hosts.processes import is_alive, until
from workbench.store import registry
from workbench.store.cluster_spec import FILE, HERE, ClusterSpec, Launch
from workbench.store.cluster_store import forget, is_here, open_store, remove, store_of
from workbench.store.errors import ClusterError, StoreError
from workbench.store.process import ProcessIdentity
from workbench.store.record import JobState
from workbench.supervisor import supervisor_of

LOOPBACK = "127.0.0.1"
END_WITHIN_S = 5.0
TICK_S = 0.02
SECONDS = ("timeout_s", "lease_s", "suspicion_s", "linger_s")
"""Fields of `ClusterSpec` that say how long is waited for what."""
UNFINISHED: tuple[JobState, ...] = ("queued", "starting", "running", "stopping", "paused")


def validate(num_engines: int, hosts: object, profile: object) -> None:
    """Checks that hosts, profile and the number of engines go together.

    Raises:
        TypeError: `hosts` are no `wb.Hosts`.
        ValueError: both `hosts` and a profile were given, or fewer engines than hosts.
    """
    if hosts is None:
        return
    if not isinstance(hosts, Hosts):
        raise TypeError(f"hosts are made by wb.Hosts(...), got {type(hosts).__name__}")
    if profile is not None:
        raise ValueError("engines run on emulated hosts or on those of a profile, not both")
    hosts.seating(num_engines)


def cluster_spec(
    num_engines: int,
    hosts: Hosts | None = None,
    launch: Launch | None = None,
    **seconds: Any,
) -> tuple[ClusterSpec, Callable[[], None]]:
    """What a supervisor is told, and a function that ends what was made for its engines only.

    The last device is the assistant's, which has all of this host: it does what is done once, for
    all ranks.

    Args:
        hosts: emulated hosts to run on; those that are not up are started here.
        launch: how engines get to other hosts. Their devices are known when those have come.
        seconds: the fields of `SECONDS`.

    Raises:
        HostsError: the emulated hosts could not be made.
    """
    if launch is not None:
        return ClusterSpec(launch=launch, **seconds), _nothing
    host = probe()
    if hosts is None:
        devices = (*assign(num_engines, host), whole_host(host))
        return ClusterSpec(
            devices=devices,
            sites=(HERE,) * len(devices),
            address=LOOPBACK,
            **seconds,
        ), _nothing
    leave = _nothing
    if not hosts.is_up:
        hosts.start()
        leave = hosts.stop
    return ClusterSpec(
        devices=(*hosts.devices(num_engines), whole_host(host)),
        sites=(*(hosts.site(index) for index in hosts.seating(num_engines)), HERE),
        address=hosts.address,
        bound_to=ProcessIdentity.here(),
        **seconds,
    ), leave


def make(folder: Path) -> None:
    """Makes the folder of a new cluster; of several processes that try, one succeeds.

    Raises:
        ClusterError: there is a cluster of this name, or what a killed start has left of one.
    """
    try:
        folder.mkdir(mode=0o700)
        forget(folder)  # removed by hand, or from another host
    except FileExistsError:
        if not (folder / FILE).exists():
            raise ClusterError(
                f"a cluster is being started in {folder}; if none is, a start was killed: remove it"
            ) from None
        name = registry.name_of(folder)
        raise ClusterError(
            f"there is a cluster {name!r} in {folder.parent}: Cluster.attach({name!r}) goes on "
            "with it"
        ) from None


def end(folder: Path, *, keep_folder: bool = False, at_once: bool = False) -> None:
    """Ends a supervisor and all processes that it owns.

    Args:
        keep_folder: whether the folder stays, so that the cluster can be attached to again.
        at_once: whether to signal a supervisor that was not asked to end before.
    """
    if (supervisor := supervisor_of(folder)) is not None and supervisor.is_near:
        if at_once:
            supervisor.send(signal.SIGTERM)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if until(lambda: not supervisor.is_alive, END_WITHIN_S, TICK_S):
                break
            supervisor.send(number)
    if not keep_folder:
        remove(folder)


def sweep(directory: Path) -> None:
    """Removes what clusters without a given name have left, which have ended with their owners.

    Weights are there, which are large. What has unfinished jobs can be attached to, and stays.
    """
    for folder in directory.glob(f"{registry.PREFIX}*"):
        owner = registry.owner_of(registry.name_of(folder))
        if owner is None or is_alive(owner) or not _is_own(folder):
            continue
        if supervisor_of(folder) is not None:
            continue
        with suppress(StoreError):  # damaged, or of another version: it is not ours to remove
            if not is_here(folder):
                continue
            if store_of(folder).exists():
                with closing(open_store(folder)) as store:
                    if store.jobs(states=UNFINISHED):
                        continue
            remove(folder)


def _is_own(folder: Path) -> bool:
    """Whether this user made a folder: others may share the folder of runs."""
    with suppress(FileNotFoundError):  # they have removed it meanwhile
        return folder.lstat().st_uid == os.geteuid()
    return False


def _nothing() -> None:
    pass
