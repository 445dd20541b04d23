"""What a running experiment can be asked to do otherwise; it does so between two steps."""

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from workbench.client.run.following import Job
from workbench.plan.experiment import SGD, Experiment, Pipelined, Synchronous
from workbench.plan.machine import Machine
from workbench.plan.plan import Plan
from workbench.plan.recut import Recut
from workbench.store.errors import ClusterError
from workbench.train.reshard.requests import (
    CarriedOut,
    LearningRate,
    RunRequest,
    RunRequests,
    SaveNow,
)

TICK_S = 0.05


class RequestHandle:
    """The wish for another learning rate, or for a checkpoint.

    Args:
        wishes: for the run.
        wish: which.
        is_over: whether the run has ended.

    Attributes:
        wish: which.
    """

    def __init__(self, wishes: RunRequests, wish: RunRequest, is_over: Callable[[], bool]) -> None:
        self.wish, self._wishes, self._is_over = wish, wishes, is_over
        self._number = wishes.wish(wish)

    @property
    def carried_out(self) -> CarriedOut | None:
        """After how many steps it was, and how long it took; None: it was not yet."""
        return self._wishes.carried_out(self._number)

    @property
    def is_superseded(self) -> bool:
        """Whether a later wish was carried out, and this one never will be."""
        return self.carried_out is None and self._wishes.last_carried_out() > self._number

    def wait(self, timeout: float = 60.0) -> CarriedOut:
        """Returns once the run has carried it out.

        Raises:
            ClusterError: the run ended before, or a later wish came instead.
            TimeoutError: it did not in time; it may still.
        """
        deadline = time.monotonic() + timeout
        while (found := self.carried_out) is None:
            if self.is_superseded:
                raise ClusterError("another plan was wished for later, and carried out instead")
            if self._is_over() and self.carried_out is None:
                raise ClusterError(
                    f"the run ended before {self.wish!r} was carried out; it will be once the run "
                    "is resumed"
                )
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.wish!r} is not carried out yet")
            time.sleep(TICK_S)
        return found

    def __repr__(self) -> str:
        done = self.carried_out
        return f"<Wished: {self.wish!r}, {'not yet' if done is None else f'step {done.step}'}>"


@dataclass(frozen=True)
class Cost:
    """What a re-cut takes, as predicted.

    Attributes:
        received_bytes: of weights, optimizer state, and what pipelined steps and error feedback
            keep (as when a pipeline is full), on each rank.
        seconds: of the rank that receives most; None: without a machine nothing is claimed.
    """

    received_bytes: tuple[int, ...]
    seconds: float | None


def cost_of(experiment: Experiment, plan: Plan, machine: Machine | None = None) -> Cost:
    """What it takes for a run of an experiment to go on under another plan.

    Raises:
        PlanError: the plan is of another model or world size.
    """
    recut = Recut(experiment.plan, plan)
    value, width = experiment.optimizer, 8 if experiment.precision == "fp64" else 4
    states = (1 if value.momentum > 0 else 0) if isinstance(value, SGD) else 2
    sync, sums = experiment.sync, 1
    if isinstance(sync, Pipelined):
        sums = sync.width
        states += (sync.width - 1) * (1 if sync.compensation is None else 2)
    codec = sync.codec if isinstance(sync, Pipelined | Synchronous) else None
    residuals = sums if codec is not None and codec.error_feedback else 0
    received = tuple(
        width * recut.received(rank, states, residuals) for rank in range(plan.world_size)
    )
    if machine is None:
        return Cost(received, None)
    link = machine.link(range(plan.world_size))
    most = float(max(received))
    return Cost(received, link.seconds("all_to_all", plan.world_size, most, 1, 0.0))


class Replan(RequestHandle):
    """The wish that a run goes on under a plan.

    Attributes:
        plan: the plan.
        cost: as predicted.
    """

    def __init__(
        self, wishes: RunRequests, plan: Plan, cost: Cost, is_over: Callable[[], bool]
    ) -> None:
        self.plan, self.cost = plan, cost
        super().__init__(wishes, plan, is_over)

    def __repr__(self) -> str:
        done = self.carried_out
        predicted = f"{max(self.cost.received_bytes):,} bytes at most for a rank"
        if done is None:
            return f"<Replan: not carried out yet; {predicted}>"
        return (
            f"<Replan: since step {done.step}, in {done.seconds:.3g} s; "
            f"{max(done.received_bytes):,} bytes at most for a rank>"
        )


class Changing(ABC):
    """Another plan, another learning rate, a checkpoint: carried out between two steps.

    Args:
        directory: of the run.

    Attributes:
        experiment: what runs, under the plan and at the learning rate that it has now.
        notes: for people.
    """

    experiment: Experiment
    notes: list[str]
    directory: Path
    _job: Job

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = threading.RLock()
        self._replans: list[Replan] = []
        self._wishes = RunRequests(directory)
        self._noticed_at, self._noticed = 0, set[int]()

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether it has ended."""

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
            self._require()
            last = self._replans[-1].plan if self._replans else self.experiment.plan
            self.experiment.replace(plan=plan)  # raises where it cannot be
            cost = cost_of(self.experiment.replace(plan=last), plan, machine)
            wished = Replan(RunRequests(self.directory), plan, cost, lambda: self.is_done)
            self._replans.append(wished)
        return wished

    def set_lr(self, value: float) -> RequestHandle:
        """Has all ranks go on at another learning rate after their current step; returns at once.

        What the optimizer remembers stays. Checkpoints keep the rate; steps that are run again
        after a fault have the rate that they had.

        Raises:
            ValueError: no positive number.
            ClusterError: the run has ended.
        """
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < math.inf
        ):
            raise ValueError(f"a learning rate is a positive number, got {value!r}")
        self._require()
        return RequestHandle(
            RunRequests(self.directory), LearningRate(float(value)), lambda: self.is_done
        )

    def checkpoint_now(self) -> RequestHandle:
        """Has all ranks write a checkpoint after their current step and go on; returns at once.

        Raises:
            ClusterError: the run has ended.
        """
        self._require()
        return RequestHandle(RunRequests(self.directory), SaveNow(), lambda: self.is_done)

    def _require(self) -> None:
        if self.is_done:
            raise ClusterError(
                f"{self!r} has ended; run.resume() or train(..., resume=run) goes on"
            )

    def _notice_changes(self) -> None:
        """Says what was carried out meanwhile, whoever wished for it."""
        with self._lock:
            self._notice_replans()
            changed_at = self._wishes.changed_at
            if changed_at == self._noticed_at:
                return
            self._noticed_at = changed_at
            for number, value, done in self._wishes.rates():
                optimizer = self.experiment.optimizer.model_copy(update={"lr": value})
                self.experiment = self.experiment.replace(optimizer=optimizer)
                self._note_once(number, f"learning rate {value:g} since step {done.step}")
            for number, done in self._wishes.saved():
                text = f"checkpoint after step {done.step}, as wished, in {done.seconds:.3g} s"
                self._note_once(number, text)

    def _note_once(self, number: int, text: str) -> None:
        if number not in self._noticed:
            self._noticed.add(number)
            self.notes.append(text)

    def _notice_replans(self) -> None:
        """The run's plan is the last one that it goes on under."""
        carried_out = [(wished, done) for wished in self._replans if (done := wished.carried_out)]
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
