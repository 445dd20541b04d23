"""The store of a cluster: who may open it, and how one that is damaged or lost is made again."""

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import psutil
from pydantic import TypeAdapter

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.io.errors import ExperimentError, PlanError
from workbench.plan.io.files import text_of, write_whole
from workbench.store import messages, registry
from workbench.store.cluster_spec import key_of
from workbench.store.errors import ClusterError, StoreDamaged, StoreError
from workbench.store.process import SUPERVISOR, holder
from workbench.store.record import Request
from workbench.store.run_folder import (
    ENVIRONMENT,
    EXPERIMENT,
    INITIAL,
    JobTimes,
    RunOutcome,
    last_attempt,
    newest_whole,
)
from workbench.store.store import Store

STORE = "server.sqlite"
"""The name of the store's file."""
_FOLDER = "folder"  # the note in a store that says whose it is
# The note that says which store it is, and the file in the cluster's folder that says the same, and
# where it is: where stores lie apart, each host has one, and all but the last are of the past.
_IDENTITY, _NEWEST = "identity", "store.id"

# File systems of this host that no device stands for; those of other hosts have none either.
_HERE = {"tmpfs", "ramfs", "rootfs", "overlay", "aufs", "zfs"}


def store_of(folder: Path) -> Path:
    """Returns where the store of a cluster is: in its folder, unless that comes over a network.

    SQLite takes what it has written and locked for written and locked, which a file system of
    another host may lose with its connection (sqlite.org/howtocorrupt.html, sections 2.1 and 3).
    Then the store is in this host's folder for state, if that is on a file system of its own; the
    cluster's folder says where, to processes with another environment.
    """
    _, noted = _noted(folder)
    if noted is not None and noted.exists():
        return noted
    apart = registry.place_of(folder)
    if _is_remote(folder) and not _is_remote(apart):
        return apart / STORE
    return folder / STORE


def _is_remote(folder: Path) -> bool:
    """Whether a folder, which need not be there yet, comes from another host."""
    path, found = os.path.realpath(folder), ("", True)
    for mount in psutil.disk_partitions(all=True):  # a later one covers an earlier one
        inside = os.path.commonpath([path, mount.mountpoint]) == mount.mountpoint
        if inside and len(mount.mountpoint) >= len(found[0]):
            is_here = mount.device.startswith("/dev/") or mount.fstype in _HERE
            found = mount.mountpoint, not is_here
    return found[1]


def sign(folder: Path, store: Store) -> None:
    """Notes whose a store is; and in the cluster's folder which store, where it lies apart.

    Raises:
        OSError: the folder cannot be written into.
        StoreError: the store cannot.
    """
    store.set_meta(_FOLDER, str(folder))
    if store.path.parent == folder:
        (folder / _NEWEST).unlink(missing_ok=True)
        return
    identity = store.meta(_IDENTITY) or uuid.uuid4().hex
    store.set_meta(_IDENTITY, identity)
    write_whole(folder / _NEWEST, f"{identity}\n{store.path}\n")


def _noted(folder: Path) -> tuple[str, Path | None]:
    """Which store a cluster's folder calls the newest, and where it was; "" and None: none.

    What is at no place for a store of this very folder is no note: what is noted is removed, too.
    """
    with suppress(OSError, ValueError):  # it lies in the folder
        identity, text = (folder / _NEWEST).read_text().splitlines()
        path = Path(text)
        if identity and path.parts[-2:] == (registry.place_of(folder).name, STORE):
            return identity, path
    return "", None


def is_here(folder: Path) -> bool:
    """Whether all that is known of a cluster's jobs is known here: no other host kept it since.

    Raises:
        StoreError: the store cannot be used.
    """
    path, (identity, _) = store_of(folder), _noted(folder)
    if path.parent != folder and (folder / STORE).exists():
        return False  # of when the folder was on this host
    return not identity or (path.exists() and _identity_of(path) == identity)


def _identity_of(path: Path) -> str:
    with closing(Store(path)) as store:
        return store.meta(_IDENTITY) or ""


def forget(folder: Path) -> None:
    """Removes what another cluster of the same folder has left apart, which is there no more."""
    if (store := store_of(folder)).parent != folder:
        shutil.rmtree(store.parent, ignore_errors=True)


def remove(folder: Path) -> None:
    """Removes a cluster that has ended: its name, its store and its folder."""
    forget(folder)
    registry.remove(folder)
    shutil.rmtree(folder, ignore_errors=True)


def open_store(folder: Path, *, create: bool = False, read_only: bool = False) -> Store:
    """Opens the store of a cluster, of whose host alone processes may do so.

    SQLite's log (WAL) is shared memory: another host would not see it, and what it wrote could
    damage the file (sqlite.org/wal.html).

    Args:
        create: whether to make the store where it is not there.
        read_only: whether to open it for reading alone.

    Raises:
        ClusterError: the cluster is kept on another host.
        StoreError: the store is missing, outdated, or cannot be used.
    """
    supervisor = holder(folder / SUPERVISOR)
    if supervisor is not None and not supervisor.is_near:
        raise ClusterError(
            f"the cluster in {folder} is kept on another host, or in another container: its store "
            "is open to processes there alone. What its runs have measured can be read anywhere: "
            "wb.runs(folder), wb.Run.load(folder)"
        )
    path = store_of(folder)
    if create:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{path} cannot be made: {error.strerror}") from None
    elif not is_here(folder):
        raise StoreError(
            f"another host kept the cluster in {folder} since this one: Cluster.attach finds out "
            "from its runs' folders what became of them"
        )
    return Store(path, create=create, read_only=read_only)


def rebuild(folder: Path) -> None:
    """Makes a cluster's store again, if it is gone, damaged, another's or outdated.

    It is made from the folders of the cluster's runs; what was there is kept under another name. A
    run whose folder does not say how it ended is parked: `cluster.jobs.resume(number)` goes on from
    its checkpoint, or where its model is a module of somebody's own, whose code no run's folder
    holds, `cluster.train(experiment, resume=run)`. To be called before any process opens the store.

    Args:
        folder: the cluster's folder, beside those of its runs.

    Raises:
        OSError: the folder may not be written into.
        StoreError: the store is of another version, or locked.
    """
    path = store_of(folder)
    if path.exists():
        with suppress(StoreDamaged), closing(Store(path)) as store:
            store.check()
            whose, identity = store.meta(_FOLDER), store.meta(_IDENTITY) or ""
            if whose in (None, str(folder)) and identity == _noted(folder)[0]:
                return
        _put_aside(path)
    taken: set[int] = set()
    with closing(open_store(folder, create=True)) as store:
        for run in sorted(_runs(folder), key=lambda run: (run.job is None, run.directory.name)):
            number = run.job
            if number is None or number in taken:  # the folder does not say, or is a copy
                number = max(taken, default=0) + 1
            taken.add(number)
            store.submit(run.request(folder), number=number)
            store.update(number, **run.fields())
        if taken:
            text = f"the store was made again from the folders of {len(taken)} runs"
            store.event(text, kind="restored", level="warning")


@dataclass(frozen=True)
class _Run:
    """What the folder of a run says."""

    directory: Path
    experiment: Experiment
    outcome: RunOutcome | None
    times: JobTimes

    @property
    def job(self) -> int | None:
        return None if self.outcome is None else self.outcome.job

    def request(self, folder: Path) -> Request:
        key, initial = key_of(folder), self.directory / INITIAL
        weights = initial if initial.exists() else None
        keywords = {"weights": weights, "directory": self.directory, "resume": None}
        return Request(
            kind="train",
            name=self.experiment.plan.graph.source.name,
            task="train",
            packed=messages.sendable(messages.pack(self.experiment), folder / "experiments"),
            keywords=messages.pack_keywords(keywords, key),
            engines=self.experiment.plan.world_size,
            directory=str(self.directory),
            steps=self.experiment.steps,
            needs_weights=weights is None,
        )

    def fields(self) -> dict[str, Any]:
        """What is known of the job besides what was submitted."""
        found, _ = newest_whole(self.directory, checked=False)
        fields: dict[str, Any] = {
            "attempt": last_attempt(self.directory),
            "checkpoint": None if found is None else str(found.path),
            "submitted_at": self.times.submitted or 0.0,
            "started_at": self.times.started,
            "ended_at": self.times.ended,
            "step": 0 if found is None else found.step,
            "state": "parked",
            "reason": "the cluster's store was lost before it ended: cluster.jobs.resume goes on",
        }
        if self.outcome is not None:
            known = ("state", "reason", "step", "attempts", "error")
            fields |= {name: getattr(self.outcome, name) for name in known}
        return fields


def _runs(folder: Path) -> Iterator[_Run]:
    """The runs of a cluster whose folders can be read, beside its own."""
    name = registry.name_of(folder)
    for path in folder.parent.glob(f"*/{EXPERIMENT}"):
        with suppress(ClusterError, ExperimentError, PlanError, OSError, ValueError):
            directory = path.parent
            told = json.loads(text_of(directory / ENVIRONMENT, ValueError))
            if told.get("cluster") == name:
                times = TypeAdapter(JobTimes).validate_python(told["times"])
                yield _Run(directory, Experiment.load(path), RunOutcome.load(directory), times)


def _put_aside(path: Path) -> None:
    """Keeps a store that is no use any more, with its log of changes, under another name."""
    other = next(
        each for n in count(1) if not (each := path.with_name(f"{path.name}.aside-{n}")).exists()
    )
    for suffix in ("-wal", "-shm", ""):
        with suppress(FileNotFoundError):
            Path(f"{path}{suffix}").replace(f"{other}{suffix}")
