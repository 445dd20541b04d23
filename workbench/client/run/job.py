"""A job of the job server, watched from here: its row in the store, and its ranks' files."""

import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from workbench.client.connection import ClusterLink
from workbench.client.engines import Engines
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.metrics import Row
from workbench.store.errors import (
    ClusterError,
    Diverged,
    EngineDied,
    RankError,
    RunError,
    StoreDamaged,
    StoreError,
)
from workbench.store.messages import Answer
from workbench.store.rank_files import RankFiles
from workbench.store.record import AttemptRecord, ErrorRecord, EventRecord, JobRecord
from workbench.store.telemetry import ROWS_AT_ONCE, AttemptReader

TICK_S = 0.03
READ_WITHIN_S = 10.0  # after the end, where a disk cannot be read
_PLAIN = {each.__name__: each for each in (ClusterError, RunError, Diverged)}

Waits = Literal["queued", "starting", "paused"]
"""States in which no step is made."""


class Listener(Protocol):
    """Whoever watches a job that trains; all of it is called on the thread that does."""

    def take(self, rows: list[Row]) -> None:
        """Takes new rows, in each rank's order."""

    def turn(self, state: Waits, reason: str) -> None:
        """Takes notice that no step is made now, and why."""

    def note(self, text: str) -> None:
        """Takes what people should know."""


class Followed(Protocol):
    """A job as a run follows it: one of a job server, or one that a folder tells of."""

    has_lost_rows: bool

    @property
    def id(self) -> int | None:
        """The job's number; None: it is not known."""

    @property
    def cluster(self) -> Engines | None:
        """The cluster that it runs on; None: nobody has it any more."""

    @property
    def engines(self) -> tuple[int, ...]:
        """The engine of each rank, now or in its last attempt."""

    def events(self, after: int) -> tuple[EventRecord, ...]:
        """What the job server says of it: events with greater numbers, oldest first."""

    def stop(self) -> None:
        """Asks every rank to end after its current step."""

    def pause(self) -> None:
        """Asks for a checkpoint, and for its engines back."""

    def resume(self) -> None:
        """Lets it go on from there."""

    def goes_on_as(self, experiment: Experiment) -> None:
        """Notes what it is resumed as."""

    def watch(self, listener: Listener | None = None) -> list[Any]:
        """Returns what each rank returned, once it has ended; raises if it failed."""


@dataclass
class _Attempt:
    """An attempt whose rows are read."""

    number: int
    folder: Path
    num_ranks: int
    rows: AttemptReader

    @classmethod
    def of(cls, record: JobRecord, number: int) -> "_Attempt":
        past = {over.number: len(over.places) for over in record.attempts}
        num_ranks = past.get(number, len(record.held) or record.engines)
        folder = Path(record.directory) / "attempts" / str(number)
        return cls(number, folder, num_ranks, AttemptReader(folder, num_ranks))

    def answers(self, key: bytes) -> list[Answer] | None:
        """How the ranks ended; None where one gave no answer."""
        packed = [RankFiles(self.folder, rank).answer for rank in range(self.num_ranks)]
        if any(answer is None for answer in packed):
            return None
        return [Answer.unpack(answer, key) for answer in packed if answer is not None]


class Job:
    """A job of the job server. It does not depend on us: any number of these may watch it.

    Args:
        after: the attempt whose successors are watched; earlier rows are not told.
        keep: the engines of the cluster, which have to stay while the job goes on.

    Attributes:
        has_lost_rows: whether a rank says that it could not write some rows.
    """

    def __init__(
        self, link: ClusterLink, id: int, *, after: int = 0, keep: Engines | None = None
    ) -> None:
        self.id, self.has_lost_rows = id, False
        self._link, self._after, self._keep = link, after, keep
        self._cluster = None if keep is None else weakref.ref(keep)
        self._is_aborted = False
        self._told = 0  # attempts whose end was told

    @property
    def cluster(self) -> Engines | None:
        """The cluster that it runs on; None: nobody has it any more."""
        return None if self._cluster is None else self._cluster()

    @property
    def engines(self) -> tuple[int, ...]:
        """The engine of each rank, now or in its last attempt; () before the first."""
        record = self._link.store.job(self.id)
        return record.held or (record.attempts[-1].places if record.attempts else ())

    def events(self, after: int) -> tuple[EventRecord, ...]:
        """What the job server says of it: events with greater numbers, oldest first."""
        return self._link.store.events(after=after, job=self.id)

    def stop(self) -> None:
        """Asks every rank to end after its current step; a job that waits ends at once."""
        self._link.store.command("stop", self.id)

    def pause(self) -> None:
        """Asks for a checkpoint, and for its engines back."""
        self._link.store.command("pause", self.id)

    def resume(self) -> None:
        """Lets it go on from there, once engines are free."""
        self._link.store.command("resume", self.id)

    def abort(self) -> None:
        """Interrupts every rank."""
        self._is_aborted = True
        self._link.store.command("cancel", self.id)

    def goes_on_as(self, experiment: Experiment) -> None:
        """Notes what it is resumed as."""
        # The run's folder says it, too: for a cluster that has ended, or cannot write just now.
        with suppress(StoreError, OSError):
            self._link.store.repack(self.id, self._link.packed(experiment))

    def watch(self, listener: Listener | None = None) -> list[Any]:
        """Returns when it has ended.

        Args:
            listener: takes new rows, in each rank's order, and changes of state, on this thread;
                None for calls, which report nothing while they work.

        Returns:
            What each rank returned; nothing where it was stopped before they began.

        Raises:
            EngineDied: a process ended.
            RankError: a rank raised; the first one that did is told, others are counted.
            KeyboardInterrupt: `abort` was called.
            ClusterError: it was cancelled by others, or the cluster has ended.
            OSError: how the ranks ended cannot be read.
        """
        try:
            record = self._link.store.job(self.id)
            patience = time.monotonic() + READ_WITHIN_S
            attempt = _Attempt(self._after, Path(), 0, AttemptReader(Path(), 0))  # none is read yet
            while True:
                try:
                    while attempt.number < record.attempt:
                        self._read(attempt, listener)
                        attempt = _Attempt.of(record, attempt.number + 1)
                    self._tell(record, listener)
                    self._read(attempt, listener)
                    is_read = True
                except OSError:  # a disk that is gone for a moment
                    is_read = False
                if not record.has_ended:
                    patience = time.monotonic() + READ_WITHIN_S
                elif is_read or time.monotonic() > patience:
                    self.has_lost_rows = not is_read
                    return self._result(record, attempt, listener)
                time.sleep(TICK_S)
                record = self._refreshed(record)
        finally:
            self._keep = None

    def _refreshed(self, record: JobRecord) -> JobRecord:
        """The record as it is now; as it was, while the store's disk is full or slow."""
        try:
            return self._link.refreshed(record)
        except StoreDamaged:
            raise
        except StoreError:
            if not self._link.is_kept:
                raise
            return record

    def _read(self, attempt: _Attempt, listener: Listener | None) -> None:
        """All rows that are there; a long history comes in pieces."""
        while listener is not None and (rows := attempt.rows.read(ROWS_AT_ONCE)):
            rows.sort(key=lambda row: (row["step"], row["rank"]))
            listener.take(rows)

    def _tell(self, record: JobRecord, listener: Listener | None) -> None:
        if listener is None:
            return
        for over in record.attempts[self._told :]:
            goes_on = over.number < record.attempt or not record.has_ended
            without_last_step = record.state == "stopped" and over.is_lost
            if over.reason and over.number > self._after and (goes_on or without_last_step):
                listener.note(told(over))
        self._told = len(record.attempts)
        if record.state == "queued":
            # Without a reason the server has not thought of it yet.
            listener.turn("queued" if record.reason else "starting", record.reason)
        elif record.state == "starting" or record.state == "paused":
            listener.turn(record.state, record.reason)

    def _result(self, record: JobRecord, attempt: _Attempt, listener: Listener | None) -> list[Any]:
        if self._is_aborted:
            raise KeyboardInterrupt
        answers = attempt.answers(self._link.key) if attempt.number > self._after else None
        if answers is not None and all(answer.kind == "returned" for answer in answers):
            self.has_lost_rows |= any(answer.lost_rows for answer in answers)
            return [answer.value for answer in answers]
        if record.error is not None:
            if record.state == "parked" and record.reason and listener is not None:
                listener.note(record.reason)
            raise exception_of(record.error, _own_text(record.error, attempt.folder))
        if record.kind == "train" and record.state in ("stopped", "cancelled"):
            return []
        raise ClusterError(f"{record.name} was {record.state}: {record.reason}")


def told(over: AttemptRecord) -> str:
    """How an attempt ended, for people."""
    return f"attempt {over.number}, after {over.step} steps: {over.reason}"


def exception_of(error: ErrorRecord, own: str) -> Exception:
    """What the job server says went wrong, as the exception that it is."""
    if error.kind == "EngineDied":
        return EngineDied(error.text, error.rank, error.death)
    if error.kind in _PLAIN:
        return _PLAIN[error.kind](error.text)
    return RankError(
        error.text,
        error.rank,
        layer=error.layer,
        kind=error.kind,
        text=own,
        remote_traceback=error.remote_traceback,
    )


def _own_text(error: ErrorRecord, folder: Path) -> str:
    packed = RankFiles(folder, error.rank).answer
    return error.text if packed is None else Answer.unpack(packed).error[1]
