"""What a running experiment can be made to do otherwise; a part of `Run`."""

import math
import threading
from abc import ABC, abstractmethod
from pathlib import Path

from workbench.cluster.errors import ClusterError
from workbench.cluster.following import Job
from workbench.cluster.replan import Replan, cost_of
from workbench.cluster.wished import Wished
from workbench.plan.experiment import Experiment
from workbench.plan.machine import Machine
from workbench.plan.plan import Plan
from workbench.train.wishes import LearningRate, SaveNow, Wishes


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
        self._wishes = Wishes(directory)
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
            wished = Replan(Wishes(self.directory), plan, cost, lambda: self.is_done)
            self._replans.append(wished)
        return wished

    def set_lr(self, value: float) -> Wished:
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
        return Wished(Wishes(self.directory), LearningRate(float(value)), lambda: self.is_done)

    def checkpoint_now(self) -> Wished:
        """Has all ranks write a checkpoint after their current step and go on; returns at once.

        Raises:
            ClusterError: the run has ended.
        """
        self._require()
        return Wished(Wishes(self.directory), SaveNow(), lambda: self.is_done)

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
