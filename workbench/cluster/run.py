"""A training run, seen from a notebook while it goes on and after it ended."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from workbench.cluster import comparing, files, report
from workbench.cluster.errors import ClusterError, Diverged
from workbench.cluster.following import Job, Waits
from workbench.cluster.frame import Frame
from workbench.cluster.recalibrating import recalibrated
from workbench.cluster.replan import Replan, cost_of
from workbench.cluster.subscribers import Callback, Subscribers
from workbench.cluster.timeline import timeline_of
from workbench.cluster.waiting import Waiting
from workbench.plan.experiment import Experiment
from workbench.plan.machine import Machine
from workbench.plan.metrics import Row
from workbench.plan.plan import Plan
from workbench.predict.compare import Comparison, compare
from workbench.predict.measured import Timeline
from workbench.predict.prediction import Prediction
from workbench.train.checkpoint import latest
from workbench.train.control import Outcome
from workbench.train.taken_home import StateDict, state_dict
from workbench.train.wishes import PlanWishes

if TYPE_CHECKING:
    import pandas

State = Literal["queued", "starting", "running", "paused", "finished", "stopped", "failed"]


class Run(Waiting):
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
        super().__init__()
        self.experiment, self.directory, self._again = experiment, directory, again
        self.state: State = "starting"
        self.reason = ""
        self.rows: list[Row] = []
        self.outcomes: tuple[Outcome, ...] = ()
        self.notes: list[str] = []
        self._lock = threading.RLock()
        self._subscribers = Subscribers()
        self._frame = Frame()
        self._replans: list[Replan] = []
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

    def _watch(self, job: Job) -> None:
        """The run's thread, from start to end."""
        state: State = "failed"
        try:
            self.outcomes = tuple(job.watch(self))
            state = self._judge()
        except BaseException as error:
            self.error = error
        finally:
            self._notice_replans()
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
        self._notice_replans()
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
            self.experiment = PlanWishes(self.directory).in_force(experiment)

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
                self._job.goes_on_as(self.experiment)
                last = self._replans.index(carried_out[-1][0])
                del self._replans[: last + 1]

    def _tell(self, rows: list[Row]) -> None:
        self.notes.extend(self._subscribers.tell(rows))

    def __repr__(self) -> str:
        return report.run_line(self)

    def _repr_html_(self) -> str:
        return report.run_html(self)
