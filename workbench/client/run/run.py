"""A training run, seen from a notebook while it goes on and after it ended."""

import threading
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from workbench.client.calibration.recalibrating import recalibrated
from workbench.client.engines import Engines
from workbench.client.loggers.feed import Feed
from workbench.client.loggers.logger import Logs, loggers
from workbench.client.records import report
from workbench.client.records.environment import Environment, machine_of
from workbench.client.records.recorded import RecordedJob
from workbench.client.run import comparing, view, waiting
from workbench.client.run.job import Followed, Waits
from workbench.client.run.own_objects import kept
from workbench.client.run.requests import Changes, Replan, RequestHandle, learning_rate
from workbench.client.run.rows import Rows
from workbench.client.run.weights import weights_of
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.metrics import Row
from workbench.plan.extension.user_object import Own
from workbench.plan.io.files import write_whole
from workbench.plan.io.html import Markup, save
from workbench.plan.machine.machine import Machine
from workbench.plan.plans.plan import Plan
from workbench.predict.compare import Comparison, compare
from workbench.predict.measured import Timeline
from workbench.predict.prediction import Prediction
from workbench.store import run_folder
from workbench.store.errors import ClusterError, Diverged
from workbench.store.messages import TrainingOutcome
from workbench.store.record import EventRecord
from workbench.train.checkpoint.checkpoint import StateDict, latest
from workbench.train.run.requests import LearningRate, RunRequests, SaveNow

if TYPE_CHECKING:
    import pandas

State = Literal[
    "queued", "starting", "running", "paused", "finished", "stopped", "failed", "unfinished"
]


class Run:
    """One experiment on engines: goes on by itself, and can be watched, awaited and stopped.

    `await run`, or `run.wait()` outside a notebook, returns when it ended, and raises if it
    failed. Everything that it measured is kept either way. Several runs, in this process or in
    others, may follow one job.

    Args:
        experiment: what runs.
        directory: the run's folder; `experiment.toml`, `metrics.csv` and checkpoints are there.
        job: the job that runs it.
        again: has it go on once it has ended; gives the job to follow then.
        is_kept: whether its folder holds all of it already, and nothing is to be written there.

    Attributes:
        experiment: what runs, under the plan that it has now.
        state: "queued" while there are too few free engines, "starting", then "running" from the
            first step on, "paused" (on request, or for a more important one), then "finished",
            "stopped" (on request) or "failed"; once more "starting" when it is resumed.
            "unfinished": it was read from a folder that does not say how it ended.
        reason: why it waits, for people; "" while it does not.
        rows: metrics, one row for each step and rank, in the order of arrival; grows. Steps that
            are run again after a fault come again.
        outcomes: what each rank reported at its end.
        error: why it failed, or None.
        notes: what else should be known, for people.
    """

    def __init__(
        self,
        experiment: Experiment,
        directory: Path,
        job: Followed,
        again: Callable[["Run"], Followed],
        *,
        is_kept: bool = False,
    ) -> None:
        self.experiment, self.directory, self._again = experiment, directory, again
        self._is_kept = is_kept
        self.state: State = "starting"
        self.reason = ""
        self.rows = Rows()
        self.outcomes: tuple[TrainingOutcome, ...] = ()
        self.notes: list[str] = []
        self.error: BaseException | None = None
        self._done = threading.Event()
        self._lock = threading.RLock()
        self._changes = Changes(directory)
        self._subscribers = view.Subscribers()
        self._stopping = threading.Event()
        self._follow(job)

    @classmethod
    def load(cls, folder: str | Path, *, trust: bool = False) -> Self:
        """A run as its folder tells of it: of the past, or of another computer; without a cluster.

        It has metrics, evaluation, notes, environment and weights as far as the folder has them.
        Nothing is written there, and nothing in it is executed. What needs a cluster says so.

        Args:
            folder: the run's folder, `run.directory`.
            trust: whether `experiment` may import the functions and classes that the folder names,
                as `Experiment.load` has it: to go on with them.

        Raises:
            ClusterError: it is no run's folder, or a file in it cannot be read.
            ExperimentError, PlanError: the experiment in it is wrong, or its plan.
        """
        directory = Path(folder).resolve()
        job = RecordedJob(directory, trust=trust)
        run = cls(job.experiment, directory, job, job.again, is_kept=True)
        waiting.follow(run, None, False)
        if job.outcome is None:
            run.state = "unfinished"
        run.notes = list(dict.fromkeys(run.notes))  # some were kept, and told again
        return run

    def _follow(self, job: Followed) -> None:
        self._job = job
        name = f"run {self.directory.name}"
        threading.Thread(target=self._watch, args=[job], name=name, daemon=True).start()

    @property
    def id(self) -> int | None:
        """The number of its job: `cluster.jobs[run.id]`."""
        return self._job.id

    @property
    def cluster(self) -> Engines | None:
        """The cluster that it runs on; None: nobody has it any more."""
        return self._job.cluster

    @property
    def engines(self) -> tuple[int, ...]:
        """The engine of each rank, now or when it ran last; () before it ran.

        Raises:
            StoreError: the cluster's memory is gone.
        """
        return self._job.engines

    def events(self, after: int = 0) -> Sequence[EventRecord]:
        """What the job server noted of it, oldest first: events with greater numbers than `after`.

        Raises:
            StoreError: the cluster's memory is gone.
        """
        return self._job.events(after)

    @property
    def environment(self) -> Environment | None:
        """What it ran with: versions, hardware, commit, source; None: its folder does not say.

        Raises:
            ClusterError: the file cannot be read.
        """
        return Environment.load(self.directory)

    @property
    def machine(self) -> Machine | None:
        """The machine that had been calibrated for its hardware when it was submitted, if any."""
        return machine_of(self.directory)

    @property
    def metrics(self) -> "pandas.DataFrame":
        """A line for each step and rank, sorted; of a long run the older steps thinned: `Rows`."""
        return self.rows.to_frame()

    @property
    def evaluations(self) -> "pandas.DataFrame":
        """What each evaluation found on the test split: a line for each, by steps done."""
        return view.evaluations(self.directory)

    def to_frame(self) -> "pandas.DataFrame":
        """The same as `metrics`."""
        return self.metrics

    def svg(self) -> str:
        """Loss, accuracy, speed, time and memory, as a picture; a document of its own."""
        return report.curves_svg(self)

    def save(self, path: str | Path) -> None:
        """Writes "x.svg", which is `svg`, "x.html", what is shown, or "x.csv", `metrics`."""
        save(self, path, self.svg)

    def to_csv(self, path: str | Path) -> None:
        """Writes `metrics` as a text with commas."""
        write_whole(Path(path), self.metrics.to_csv(index=False))

    def to_parquet(self, path: str | Path) -> None:
        """Writes `metrics` as a Parquet file; a ModuleNotFoundError says if pyarrow is missing."""
        report.write_parquet(self.metrics, Path(path))

    def to_html(self, path: str | Path) -> None:
        """Writes one page to send to somebody: configuration, environment, curves and notes."""
        write_whole(Path(path), report.report(self))

    @property
    def evaluation(self) -> dict[str, float]:
        """Loss and metrics on the test split, as last measured; empty before the run's end."""
        return dict(self.outcomes[0].evaluation) if self.outcomes else {}

    @property
    def checkpoint(self) -> Path | None:
        """The newest complete checkpoint; also while the run goes on, and after it failed."""
        reported = [outcome.checkpoint for outcome in self.outcomes if outcome.checkpoint]
        return Path(reported[0]) if reported else latest(self.directory)

    def state_dict(self, *, ema: bool = False, best: bool = False) -> StateDict:
        """The newest checkpoint's weights and buffers, whole, on this process's CPU.

        `module.load_state_dict(run.state_dict())` makes a torch module of them.

        Args:
            ema: whether weights are the averaged ones, as evaluations use them.
            best: whether to take the best checkpoint, by `Experiment.keep_best`.

        Raises:
            ClusterError: there is no such checkpoint yet.
            CheckpointError: it is damaged; or it has no averages, without `Experiment.ema`.
        """
        given = self.directory, self.experiment, self.checkpoint
        return weights_of(*given, ema=ema, best=best)

    def timeline(self, step: int | None = None) -> Timeline:
        """What every rank did when, in a step that was traced (`Experiment.trace_every`).

        Args:
            step: the index of the step, of which the last few are kept; None: the last one.

        Raises:
            ClusterError: the step was not traced, or none was yet; it says how to have some.
            ValueError: a trace is damaged.
        """
        return comparing.timeline_of(comparing.samples_of(self.directory, self.experiment, step))

    def compare(self, prediction: Prediction) -> Comparison:
        """Sets `predict(plan, machine, experiment)` beside what every rank and layer took.

        Raises:
            ExperimentError: the prediction is for another plan or batch; the text says which.
            MachineError: the prediction was made without a machine.
            ClusterError: no step was traced; it says how to have some.
        """
        measured = comparing.measurement_of(self.directory, self.experiment, self.rows)
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

    def wait(self, timeout: float | None = None, *, progress: bool | None = None) -> Self:
        """Returns when the run has ended.

        An interrupt (of the kernel, or Ctrl-C) stops the run after its current step.

        Args:
            timeout: the seconds after which it gives up waiting; None: never.
            progress: whether to show a bar of the steps; None: in a notebook and on a terminal.

        Raises:
            TimeoutError: it did not end in time; it goes on.
            RunError: it failed.
        """
        waiting.end(self, timeout, progress)
        return self._ended()

    def join(self, timeout: float) -> bool:
        """Waits for the run to end, at most so many seconds; whether it did. Raises nothing."""
        return self._done.wait(timeout)

    def __await__(self) -> Generator[Any, None, Self]:
        """As `wait`, while the event loop, and so the widgets of a notebook, go on."""
        return self._wait().__await__()

    async def until(self, *, step: int) -> Self:
        """Returns when all ranks have made so many steps; interrupting it leaves the run alone.

        Raises:
            ValueError: its experiment has no such step.
            ClusterError: it ended before.
            RunError: it failed before.
        """
        if not await waiting.reach(self, step):
            self._ended()
            raise ClusterError(f"{self!r} ended before {step} steps were made")
        return self

    async def _wait(self) -> Self:
        await waiting.come(self._done.is_set, partial(waiting.interrupt, self))
        return self._ended()

    def _ended(self) -> Self:
        if self.error is not None:
            raise self.error
        return self

    @property
    def is_stopping(self) -> bool:
        """Whether it was asked to stop."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Asks all ranks to stop after their current step, with a checkpoint; returns at once."""
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
            ClusterError: the run is neither paused nor over, or has nothing left to do; it left no
                checkpoint; its cluster is gone.
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
            plan: the plan to go on under, for the same model and number of ranks.
            machine: the machine by which to predict how long it takes.

        Raises:
            PlanError: the plan is of another model or number of ranks.
            ExperimentError: the experiment cannot run under it, or no rank can have its schemes.
            ClusterError: the run has ended.
        """
        with self._lock:
            self._require()
            if (engines := self.cluster) is not None:
                plan = kept(plan, engines.folder, "plan")
                # Ranks read it from the run's folder, where others may write: files have a MAC.
                held = plan.with_own(lambda own, _: Own.of(own.loaded) if own.is_imported else own)
                plan = kept(held, engines.folder, "plan")
            return self._changes.replan(self.experiment, plan, machine, self._done.is_set)

    def set_lr(self, value: float) -> RequestHandle:
        """Has all ranks go on at another learning rate after their current step; returns at once.

        What the optimizer remembers stays; groups and a schedule keep their ratio to the rate, and
        checkpoints have it. Steps that are run again after a fault have the rate that they had.

        Raises:
            ValueError: the rate is no positive number; or Rprop would not read it any more.
            ClusterError: the run has ended.
        """
        return self._request(learning_rate(value, self.experiment.optimizer))

    def checkpoint_now(self) -> RequestHandle:
        """Has all ranks write a checkpoint after their current step and go on; returns at once.

        Raises:
            ClusterError: the run has ended.
        """
        return self._request(SaveNow())

    def _request(self, request: LearningRate | SaveNow) -> RequestHandle:
        self._require()
        return RequestHandle(RunRequests(self.directory), request, self._done.is_set)

    def subscribe(self, callback: view.Callback) -> Callable[[], None]:
        """Has a function called with new rows, and with [] when the state changes.

        Called on the run's thread, and not again once it raised. Returns a function that ends it.
        """
        return self._subscribers.add(callback)

    def log_to(self, *log: Logs) -> Callable[[], None]:
        """Has loggers told of every step, from the first on; see `Cluster.train`.

        Of a run that has ended, all that it reported; it returns when that is told. What it gives
        is a function that ends it.
        """
        feed = Feed(self, loggers(log))
        unsubscribe = self.subscribe(feed)
        feed([])  # what came before
        return unsubscribe

    def _watch(self, job: Followed) -> None:
        """The run's thread, from start to end."""
        state: State = "failed"
        try:
            self.outcomes = tuple(job.watch(self))
            state = self._ended_as()
        except BaseException as error:
            self.error = error
        finally:
            self._notice_changes()
            self._conclude(state, job)

    def _ended_as(self) -> State:
        if not self.outcomes:
            return "stopped"
        outcome = self.outcomes[0]
        self.notes += outcome.notes
        if outcome.reason == "diverged":
            raise Diverged(outcome.message)
        return outcome.reason

    def _conclude(self, state: State, job: Followed) -> None:
        if job.has_lost_rows:
            self.notes.append("some rows of metrics were lost on their way")
        if (stride := self.rows.stride) > 1:
            self.notes.append(f"metrics have one in {stride} of the oldest steps")
        self.state, self.reason = state, ""
        self._tell([])
        try:
            if not self._is_kept:
                run_folder.keep(self.directory, self.metrics, self.notes)
        except OSError as error:
            self.notes.append(f"metrics.csv and notes.json could not be written: {error}")
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

    def _tell(self, rows: list[Row]) -> None:
        self.notes.extend(self._subscribers.tell(rows))

    def _require(self) -> None:
        if self.is_done:
            raise ClusterError(f"{self!r} has ended; run.resume() or train(resume=run) goes on")

    def _notice_changes(self) -> None:
        """Says what was carried out meanwhile, whoever requested it."""
        with self._lock:
            news = self._changes.news(self.experiment)
            self.experiment = news.experiment
            self.notes.extend(news.notes)
            if news.is_replanned:
                self._job.goes_on_as(self.experiment)

    def __repr__(self) -> str:
        return f"<Run {self.directory.name}: {', '.join(view.standing(self))}>"

    def _repr_html_(self) -> Markup:
        return view.html(self)
