"""A training run, seen from the notebook while it goes on and after it ended."""

import asyncio
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from workbench.cluster import comparing, files, report
from workbench.cluster.errors import ClusterError, Diverged
from workbench.cluster.frame import Frame
from workbench.cluster.job import Job
from workbench.cluster.recalibrating import recalibrated
from workbench.cluster.replan import Replan, cost_of
from workbench.cluster.subscribers import Callback, Subscribers
from workbench.cluster.timeline import timeline_of
from workbench.plan.experiment import Experiment
from workbench.plan.machine import Machine
from workbench.plan.metrics import Row
from workbench.plan.plan import Plan
from workbench.predict.compare import Comparison, compare
from workbench.predict.measured import Timeline
from workbench.predict.prediction import Prediction
from workbench.train.checkpoint import latest
from workbench.train.control import Outcome
from workbench.train.wishes import PlanWishes

if TYPE_CHECKING:
    import pandas

State = Literal["starting", "running", "finished", "stopped", "failed"]
Launch = Callable[["Run"], Job | None]
Release = Callable[[], None]

# Short, because neither a thread nor a kernel's event loop notices an interrupt before its
# current sleep ends.
TICK_S = 0.1
INTERRUPTED = "interrupted; the engines stop after their current step and leave a checkpoint"


class Run:
    """One experiment on engines: goes on by itself, and can be watched, awaited and stopped.

    `await run`, or `run.wait()` outside a notebook, returns when it ended, and raises if it
    failed. Everything that it measured is kept either way.

    Args:
        experiment: what runs.
        directory: the run's own; `experiment.toml`, `metrics.csv` and checkpoints are there.
        launch: starts it; is called on the run's thread, and gives None where the run was
            stopped before its ranks began.
        release: gives its engines back.
        again: takes engines once more; gives what `launch` and `release` are then.

    Attributes:
        experiment: what runs.
        directory: where its files are.
        state: "starting", then "running" from the first step on, then "finished", "stopped"
            (on request) or "failed"; once more "starting" when it is resumed.
        rows: one for each step and rank, in the order of arrival; grows.
        outcomes: what each rank reported at its end.
        error: why it failed, or None.
        notes: what else should be known, for people.
    """

    def __init__(
        self,
        experiment: Experiment,
        directory: Path,
        launch: Launch,
        release: Release,
        again: Callable[["Run"], tuple[Launch, Release]],
    ) -> None:
        self.experiment, self.directory, self._again = experiment, directory, again
        self.state: State = "starting"
        self.rows: list[Row] = []
        self.outcomes: tuple[Outcome, ...] = ()
        self.error: BaseException | None = None
        self.notes: list[str] = []
        self._lock = threading.RLock()
        self._subscribers = Subscribers()
        self._frame = Frame()
        self._replans: list[Replan] = []
        self._stopping, self._done = threading.Event(), threading.Event()
        self._job: Job | None = None
        self._begin(launch, release)

    def _begin(self, launch: Launch, release: Release) -> None:
        self._launch: Launch | None = launch
        self._release = release
        name = f"run {self.directory.name}"
        threading.Thread(target=self._follow, name=name, daemon=True).start()

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
    def is_done(self) -> bool:
        """Whether it has ended, in whatever way, and its files are written."""
        return self._done.is_set()

    @property
    def is_stopping(self) -> bool:
        """Whether it was asked to stop."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Asks all ranks to stop after their current step and leave a checkpoint; returns at once.

        A run that has ended stays as it is.
        """
        self._stopping.set()
        if (job := self._job) is not None:
            job.stop()

    def resume(self) -> Self:
        """Goes on from the newest checkpoint, on engines that are free; returns at once.

        Steps after that checkpoint are run again; of each, `metrics` has what came last.

        Raises:
            ClusterError: the run has not ended, or has nothing left to do; it left no
                checkpoint; its cluster is gone, or has too few free engines.
            CheckpointError: the checkpoint is damaged.
        """
        with self._lock:
            if not self.is_done:
                raise ClusterError(f"{self!r} has not ended: it can be resumed once it was stopped")
            if self.state == "finished":
                raise ClusterError(
                    f"all {self.experiment.steps} steps are done; for more of them, "
                    "cluster.train(run.experiment.replace(steps=...), resume=run)"
                )
            launch, release = self._again(self)
            self._job, self.outcomes, self.error, self.state = None, (), None, "starting"
            self._stopping.clear()
            self._done.clear()
            self._tell([])
            self._begin(launch, release)
        return self

    def replan(self, plan: Plan, machine: Machine | None = None) -> Replan:
        """Has the run go on under another plan after its current step; returns at once.

        Weights and optimizer state move straight from rank to rank, and only what changes hands.
        `experiment` has the new plan from then on.

        Args:
            plan: of the same model and number of ranks.
            machine: to predict how long it takes.

        Raises:
            PlanError: the plan is of another model or number of ranks.
            ExperimentError: the experiment cannot run under it.
            ClusterError: the run has ended.
        """
        with self._lock:
            if self.is_done:
                raise ClusterError(f"{self!r} has ended; cluster.train(..., resume=run) goes on")
            last = self._replans[-1].plan if self._replans else self.experiment.plan
            self.experiment.replace(plan=plan)  # raises where it cannot be
            cost = cost_of(self.experiment.replace(plan=last), plan, machine)
            wished = Replan(PlanWishes(self.directory), plan, cost, lambda: self.is_done)
            self._replans.append(wished)
        return wished

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Has a function called with new rows, and with [] when the state changes.

        It is called on the run's thread and should be quick. One that raises is not called again.

        Returns:
            A function that ends the subscription.
        """
        return self._subscribers.add(callback)

    def wait(self, timeout: float | None = None) -> Self:
        """Returns when the run has ended.

        An interrupt (of the kernel, or Ctrl-C) stops the run after its current step.

        Raises:
            TimeoutError: it did not end in time; it goes on.
            RunError: it failed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while not self._done.wait(TICK_S):
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(f"{self!r} goes on after {timeout:g} s")
        except KeyboardInterrupt:
            self.stop()
            raise KeyboardInterrupt(INTERRUPTED) from None
        return self._ended()

    def join(self, timeout: float) -> bool:
        """Waits for the run to end, at most so many seconds; whether it did. Raises nothing."""
        return self._done.wait(timeout)

    def __await__(self) -> Generator[Any, None, Self]:
        """As `wait`, while the event loop, and so the widgets of a notebook, go on."""
        return self._wait().__await__()

    async def _wait(self) -> Self:
        try:
            while not self._done.is_set():
                await asyncio.sleep(TICK_S)
        except (asyncio.CancelledError, KeyboardInterrupt):
            self.stop()
            if _is_cell():
                raise KeyboardInterrupt(INTERRUPTED) from None
            raise
        return self._ended()

    def _ended(self) -> Self:
        if self.error is not None:
            raise self.error
        return self

    def _follow(self) -> None:
        """The run's thread, from start to end."""
        state: State = "failed"
        try:
            assert self._launch is not None
            self._job = self._launch(self)
            if self._stopping.is_set() and self._job is not None:
                self._job.stop()  # asked between launch and assignment
            if self._job is None:
                state = "stopped"
            else:
                self.outcomes = tuple(self._job.watch(self._take))
                self.notes += self.outcomes[0].notes
                state = self._judge()
        except BaseException as error:
            self.error = error
        finally:
            self._release()
            self._notice_replans()
            # What launched us is the cluster. Where nobody else refers to it, it ends here,
            # before we say that we are done and the interpreter may end under this thread.
            self._launch = None
            self._conclude(state)

    def _judge(self) -> State:
        outcome = self.outcomes[0]
        if outcome.reason == "diverged":
            raise Diverged(outcome.message)
        return outcome.reason

    def _conclude(self, state: State) -> None:
        if self._job is not None and self._job.has_lost_rows:
            self.notes.append("some rows of metrics were lost on their way")
        try:
            files.write_metrics(self.directory, self.metrics)
        except OSError as error:
            self.notes.append(f"metrics.csv could not be written: {error}")
        self.state = state
        self._tell([])
        self._done.set()

    def _take(self, rows: list[Row]) -> None:
        self.rows.extend(rows)
        self._notice_replans()
        if self.state == "starting":
            self.state = "running"
            self._tell([])
        self._tell(rows)

    def _notice_replans(self) -> None:
        """The run's plan is the last one that it goes on under."""
        with self._lock:
            carried_out = [
                (wished, done) for wished in self._replans if (done := wished.carried_out)
            ]
            for wished, done in carried_out:
                self.experiment = self.experiment.replace(plan=wished.plan)
                self.notes.append(
                    f"under another plan since step {done.step}: {done.seconds:.3g} s, "
                    f"{sum(done.received_bytes):,} bytes moved"
                )
            if carried_out:  # those before the last one are over, too
                last = self._replans.index(carried_out[-1][0])
                del self._replans[: last + 1]

    def _tell(self, rows: list[Row]) -> None:
        self.notes.extend(self._subscribers.tell(rows))

    def __repr__(self) -> str:
        return report.run_line(self)

    def _repr_html_(self) -> str:
        return report.run_html(self)


def _is_cell() -> bool:
    """Whether the caller was cancelled as a notebook's cell.

    ipykernel turns the interrupt of a cell that awaits into a cancellation. Elsewhere a
    cancellation is just that, and KeyboardInterrupt would end the whole event loop.
    """
    task = asyncio.current_task()
    return task is not None and getattr(task.get_coro(), "__name__", "") == "run_cell_async"
