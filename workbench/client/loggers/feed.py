"""Feeds a run's loggers from the rows that whoever holds the run has anyway; ranks do nothing.

    the run's thread     rows of ranks  ->  whole steps  --+
    the feed's thread                                      +->  each logger, in turn

A logger that takes long, over a network perhaps, delays nobody who watches the run: it has a thread
of its own, for which the run's end waits, though not for ever.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

from workbench.client.loggers.logger import Log, LoggedRun, Logger, step_of
from workbench.client.records.runs import fields_of, short
from workbench.client.run.rows import Rows
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.metrics import Row
from workbench.store.run_folder import read_evaluations

LAST_S = 60.0
OVER = frozenset(("finished", "stopped", "failed", "unfinished"))


class Fed(Protocol):
    """A run, as far as it is logged; see `Run`."""

    directory: Path
    notes: list[str]

    @property
    def rows(self) -> Rows:
        """Its metrics."""

    @property
    def experiment(self) -> Experiment:
        """What runs."""

    @property
    def state(self) -> str:
        """Its state."""

    @property
    def evaluation(self) -> dict[str, float]:
        """Loss and accuracy on the test split."""


class Feed:
    """Subscribes loggers to a run, from its first step on; and again, when it is resumed.

    A logger that raises is told of in the run's notes, once, and gets no more steps.

    Args:
        last_s: the seconds that the run's end waits for them.
    """

    def __init__(self, run: Fed, loggers: Sequence[Logger], *, last_s: float = LAST_S) -> None:
        self._run, self._loggers, self._last_s = run, tuple(loggers), last_s
        self._lock = threading.Lock()
        self._read = 0
        self._begun: dict[int, dict[int, Row]] = {}  # steps that some ranks have reported
        self._steps: SimpleQueue[Row | None] | None = None
        self._thread: threading.Thread | None = None

    def __call__(self, _rows: list[Row]) -> None:
        """Takes notice of new rows, or of another state; the run calls it."""
        with self._lock:
            rows, self._read = self._run.rows.since(self._read)
            for row in rows:
                self._take(row)
            if self._run.state in OVER and self._thread is not None and self._steps is not None:
                self._steps.put(None)
                self._thread.join(self._last_s)
                if self._thread.is_alive():
                    self._run.notes.append(
                        f"loggers were not done {self._last_s:g} s after the run had ended"
                    )
                self._thread = self._steps = None
                self._begun.clear()

    def _take(self, row: Row) -> None:
        number = int(row["step"])
        ranks = self._begun.setdefault(number, {})
        ranks[int(row["rank"])] = row
        if len(ranks) < self._run.experiment.plan.world_size:
            return
        del self._begun[number]
        if self._steps is None:
            self._steps = SimpleQueue()
            arguments = (self._steps, self._described())
            self._thread = threading.Thread(
                target=self._serve, args=arguments, name="loggers", daemon=True
            )
            self._thread.start()
        self._steps.put(step_of(tuple(ranks.values())) | self._evaluated(number + 1))

    def _evaluated(self, done: int) -> Row:
        """The figures of an evaluation behind so many steps; none where none was due."""
        experiment = self._run.experiment
        every = experiment.evaluate_every
        if done != experiment.steps and (every is None or done % every):
            return {}
        found = read_evaluations(self._run.directory).get(done, {})
        return {f"test_{name}": value for name, value in found.items()}

    def _serve(self, steps: "SimpleQueue[Row | None]", described: LoggedRun) -> None:
        """The feed's thread, from the first step to the run's end."""
        logs = [_Guarded(logger, self._run.notes) for logger in self._loggers]
        for log in logs:
            log.open(described)
        while (step := steps.get()) is not None:
            for log in logs:
                log.write(step)
        for log in logs:
            log.close(self._run.state, self._run.evaluation)

    def _described(self) -> LoggedRun:
        experiment, directory = self._run.experiment, self._run.directory
        plan = experiment.plan
        configuration = {
            "model": plan.graph.source.name,
            "plan": short(plan),
            "world_size": plan.world_size,
            **fields_of(experiment),
        }
        return LoggedRun(directory.name, directory, configuration)


class _Guarded:
    """A logger whose first error ends it, and is told: it is no reason to lose a run.

    Args:
        notes: the run's notes, which get the error.
    """

    def __init__(self, logger: Logger, notes: list[str]) -> None:
        self._logger, self._notes = logger, notes
        self._log: Log | None = None

    def open(self, described: LoggedRun) -> None:
        with self._told():
            self._log = self._logger.open(described)

    def write(self, step: Row) -> None:
        if self._log is not None:
            with self._told():
                self._log.write(dict(step))

    def close(self, state: str, evaluation: dict[str, float]) -> None:
        if self._log is not None:
            with self._told():
                self._log.close(state, evaluation)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._log = None
            self._notes.append(f"{self._logger!r} failed and gets no more steps: {error!r}")
