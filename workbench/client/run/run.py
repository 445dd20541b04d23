"""A training run, seen from a notebook while it goes on and after it ended."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from workbench.client import report
from workbench.client.calibration.recalibrating import recalibrated
from workbench.client.run import comparing
from workbench.client.run.changing import Changing
from workbench.client.run.comparing import timeline_of
from workbench.client.run.following import Job, Waits
from workbench.client.run.waiting import Waiting
from workbench.plan.experiment import Experiment
from workbench.plan.machine import Machine
from workbench.plan.metrics import COLUMNS, Row
from workbench.predict.compare import Comparison, compare
from workbench.predict.measured import Timeline
from workbench.predict.prediction import Prediction
from workbench.store import run_folder as files
from workbench.store.errors import ClusterError, Diverged
from workbench.store.outcome import Outcome
from workbench.store.record import Event
from workbench.train.checkpoint.checkpoint import latest
from workbench.train.checkpoint.full_state_dict import StateDict, state_dict
from workbench.train.reshard.requests import RunRequests

if TYPE_CHECKING:
    import pandas

    from workbench.client.cluster import Cluster


class Frame:
    """A table that is made anew only where there are more rows; any thread may ask for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._frame: pandas.DataFrame | None = None
        self._num_rows = 0

    def of(self, rows: Sequence[Row]) -> "pandas.DataFrame":
        """One line for each step and rank, sorted; of a step that was run again, the last."""
        import pandas  # only here: engines import this package too, and have no use for it

        with self._lock:
            if self._frame is None or self._num_rows != len(rows):
                frame = pandas.DataFrame(rows, columns=list(COLUMNS))
                frame = frame.drop_duplicates(["step", "rank"], keep="last")
                self._frame = frame.sort_values(["step", "rank"], ignore_index=True)
                self._num_rows = len(rows)
            return self._frame.copy()


Callback = Callable[[list[Row]], None]


class Subscribers:
    """Functions that are called with new rows; from any thread they may come and go."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Callback] = []

    def add(self, callback: Callback) -> Callable[[], None]:
        """Takes a function; gives one that lets go of it."""
        with self._lock:
            self._callbacks.append(callback)
        return partial(self._remove, callback)

    def tell(self, rows: list[Row]) -> Iterator[str]:
        """Calls all of them; says of which it let go, since they raised."""
        with self._lock:
            callbacks = list(self._callbacks)
        for callback in callbacks:
            try:
                callback(rows)
            except Exception as error:  # a broken view is no reason to lose a run
                self._remove(callback)
                yield f"a subscriber failed and was dropped: {error!r}"

    def _remove(self, callback: Callback) -> None:
        with self._lock, suppress(ValueError):
            self._callbacks.remove(callback)


State = Literal["queued", "starting", "running", "paused", "finished", "stopped", "failed"]


class Run(Waiting, Changing):
    """One experiment on engines: goes on by itself, and can be watched, awaited and stopped.

    `await run`, or `run.wait()` outside a notebook, returns when it ended, and raises if it
    failed. Everything that it measured is kept either way. Several runs, in this process or in
    others, may follow one job.

    Args:
        experiment: what runs.
        directory: the run's own; `experiment.toml`, `metrics.csv` and checkpoints are there.
        job: that runs it.
        again: has it go on once it has ended; gives the job to follow then.

    Attributes:
        experiment: what runs, under the plan that it has now.
        directory: where its files are.
        state: "queued" while there are too few free engines, "starting", then "running" from the
            first step on, "paused" (on request, or for a more important one), then "finished",
            "stopped" (on request) or "failed"; once more "starting" when it is resumed.
        reason: why it waits, for people; "" while it does not.
        rows: one for each step and rank, in the order of arrival; grows. Steps that are run again
            after a fault come again.
        outcomes: what each rank reported at its end.
        error: why it failed, or None.
        notes: what else should be known, for people.
    """

    def __init__(
        self,
        experiment: Experiment,
        directory: Path,
        job: Job,
        again: Callable[["Run"], Job],
    ) -> None:
        Waiting.__init__(self)
        Changing.__init__(self, directory)
        self.experiment, self._again = experiment, again
        self.state: State = "starting"
        self.reason = ""
        self.rows: list[Row] = []
        self.outcomes: tuple[Outcome, ...] = ()
        self.notes: list[str] = []
        self._subscribers = Subscribers()
        self._frame = Frame()
        self._stopping = threading.Event()
        self._follow(job)

    def _follow(self, job: Job) -> None:
        self._job = job
        name = f"run {self.directory.name}"
        threading.Thread(target=self._watch, args=[job], name=name, daemon=True).start()

    @property
    def id(self) -> int | None:
        """The number of its job: `cluster.jobs[run.id]`."""
        return self._job.id

    @property
    def cluster(self) -> "Cluster | None":
        """Whose engines it runs on; None: nobody has it any more."""
        return self._job.cluster

    @property
    def engines(self) -> tuple[int, ...]:
        """The engine of each rank, now or when it ran last; () before it ran.

        Raises:
            StoreError: the cluster's memory is gone.
        """
        return self._job.engines

    def events(self, after: int = 0) -> Sequence[Event]:
        """What the job server noted of it, oldest first: events with greater numbers than `after`.

        Raises:
            StoreError: the cluster's memory is gone.
        """
        return self._job.events(after)

    @property
    def metrics(self) -> "pandas.DataFrame":
        """One line for each step and rank, sorted; columns as in `plan.metrics.COLUMNS`."""
        return self._frame.of(self.rows[:])

    @property
    def evaluation(self) -> dict[str, float]:
        """Loss and accuracy on the test split, as last measured; empty before the run's end."""
        return dict(self.outcomes[0].evaluation) if self.outcomes else {}

    @property
    def checkpoint(self) -> Path | None:
        """The newest complete checkpoint; also while the run goes on, and after it failed."""
        reported = [outcome.checkpoint for outcome in self.outcomes if outcome.checkpoint]
        return Path(reported[0]) if reported else latest(self.directory)

    def state_dict(self) -> StateDict:
        """The newest checkpoint's weights and buffers, whole, on this process's CPU.

        `module.load_state_dict(run.state_dict())` makes an ordinary torch module of them.

        Raises:
            ClusterError: there is no checkpoint yet.
            CheckpointError: it is damaged.
        """
        if (newest := self.checkpoint) is None:
            raise ClusterError(
                f"{self!r} has left no checkpoint yet; run.stop() makes it leave one"
            )
        return state_dict(newest, self.experiment.plan.graph)

    def timeline(self, step: int | None = None) -> Timeline:
        """What every rank did when, in a step that was traced (`Experiment.trace_every`).

        Args:
            step: index of the step, of which the last few are kept; None: the last one.

        Raises:
            ClusterError: that step was not traced, or none was yet; it says how to have some.
            ValueError: a trace is damaged.
        """
        return timeline_of(comparing.samples_of(self.directory, self.experiment, step))

    def compare(self, prediction: Prediction) -> Comparison:
        """Sets `predict(plan, machine, experiment)` beside what every rank and layer took.

        Raises:
            ExperimentError: the prediction is for another plan or batch; the text says which.
            MachineError: the prediction was made without a machine.
            ClusterError: no step was traced; it says how to have some.
        """
        measured = comparing.measurement_of(self.directory, self.experiment, self.rows[:])
        return compare(prediction, measured)

    def calibrated(self, machine: Machine) -> Machine:
        """A machine, with the times of this run's layers as they were measured in it.

        Raises:
            ClusterError: no step was traced, or the machine has other ranks.
        """
        steps = comparing.whole_samples(self.directory, self.experiment)
        return recalibrated(machine, self.experiment, steps)

    @property
    def is_stopping(self) -> bool:
        """Whether it was asked to stop."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Asks all ranks to stop after their current step and leave a checkpoint; returns at once.

        One that waits for engines ends at once. A run that has ended stays as it is.
        """
        self._stopping.set()
        if not self.is_done:
            self._job.stop()

    def pause(self) -> None:
        """As `stop`, but the run goes on: its engines are free until `resume`."""
        if not self.is_done:
            self._job.pause()

    def resume(self) -> Self:
        """Goes on from the newest checkpoint, as soon as engines are free; returns at once.

        Steps after that checkpoint are run again; of each, `metrics` has what came last.

        Raises:
            ClusterError: the run is neither paused nor over, or has nothing left to do; it left
                no checkpoint; its cluster is gone.
            CheckpointError: the checkpoint is damaged.
        """
        with self._lock:
            if self.state == "paused":
                self._job.resume()
                return self
            if not self.is_done:
                raise ClusterError(f"{self!r} has not ended: it can be resumed once it was stopped")
            if self.state == "finished":
                raise ClusterError(
                    f"all {self.experiment.steps} steps are done; for more of them, "
                    "cluster.train(run.experiment.replace(steps=...), resume=run)"
                )
            job = self._again(self)
            self.outcomes, self.error, self.state, self.reason = (), None, "starting", ""
            self._stopping.clear()
            self._done.clear()
            self._tell([])
            self._follow(job)
        return self

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Has a function called with new rows, and with [] when the state changes.

        It is called on the run's thread and should be quick. One that raises is not called again.

        Returns:
            A function that ends the subscription.
        """
        return self._subscribers.add(callback)

    def _watch(self, job: Job) -> None:
        """The run's thread, from start to end."""
        state: State = "failed"
        try:
            self.outcomes = tuple(job.watch(self))
            state = self._judge()
        except BaseException as error:
            self.error = error
        finally:
            self._notice_changes()
            self._conclude(state, job)

    def _judge(self) -> State:
        if not self.outcomes:
            return "stopped"
        outcome = self.outcomes[0]
        self.notes += outcome.notes
        if outcome.reason == "diverged":
            raise Diverged(outcome.message)
        return outcome.reason

    def _conclude(self, state: State, job: Job) -> None:
        if job.has_lost_rows:
            self.notes.append("some rows of metrics were lost on their way")
        try:
            files.write_metrics(self.directory, self.metrics)
        except OSError as error:
            self.notes.append(f"metrics.csv could not be written: {error}")
        self.state, self.reason = state, ""
        self._tell([])
        self._done.set()

    def take(self, rows: list[Row]) -> None:
        """Takes new rows; the job calls it."""
        self.rows.extend(rows)
        self._notice_changes()
        if self.state != "running":
            self.state, self.reason = "running", ""
            self._tell([])
        self._tell(rows)

    def turn(self, state: Waits, reason: str) -> None:
        """Takes notice that no step is made now; the job calls it."""
        if (state, reason) != (self.state, self.reason):
            self.state, self.reason = state, reason
            self._tell([])

    def note(self, text: str) -> None:
        """Takes what people should know; the job calls it."""
        self.notes.append(text)
        self._tell([])

    def under(self, experiment: Experiment) -> None:
        """Takes notice of another number of ranks; the job calls it."""
        with self._lock:
            self.experiment = RunRequests(self.directory).in_force(experiment)

    def _tell(self, rows: list[Row]) -> None:
        self.notes.extend(self._subscribers.tell(rows))

    def __repr__(self) -> str:
        return report.run_line(self)

    def _repr_html_(self) -> str:
        return report.run_html(self)
