"""Plans evaluated by the full prediction, once each, and the fastest of those that fit.

The garbage collector is off meanwhile. A full collection visits all that torch has imported, which
takes a tenth of a second, and a search allocates so many small values that it triggers some: a
quarter of its time (ResNet-152 at 8 ranks). These values have no cycles, and are freed by reference
counting.
"""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.machine.machine import Machine
from workbench.plan.plans.plan import Plan
from workbench.predict.prediction import Prediction, predict

_GAIN = 0.002  # a plan that is faster by less is not much of a find


@dataclass(frozen=True)
class EvaluatedPlan:
    """A plan and its prediction."""

    plan: Plan
    prediction: Prediction

    @cached_property
    def step_time(self) -> float:
        """Predicted seconds of a step."""
        return float(self.prediction.step_time)

    @cached_property
    def peak_bytes(self) -> int:
        """The peak memory of the rank that needs most, in bytes."""
        return self.prediction.memory.peak_bytes


class Evaluator:
    """Evaluates plans, and keeps the fastest one that fits.

    Args:
        experiment: the experiment for which every plan is predicted.
        machine: the machine for which every plan is predicted.
        limit: the memory limit of a rank, in bytes.
    """

    def __init__(self, experiment: Experiment, machine: Machine, limit: int) -> None:
        self.experiment, self.machine, self.limit = experiment, machine, limit
        self.best: EvaluatedPlan | None = None
        self.leanest: EvaluatedPlan | None = None
        self._known: dict[Plan, EvaluatedPlan] = {}
        self.tight = False  # whether a plan that was faster than the best so far did not fit
        self.gained = time.thread_time()  # when the best one last became much faster
        self._before = float("inf")

    def __len__(self) -> int:
        return len(self._known)

    @property
    def seconds(self) -> float:
        """The predicted step time of the best plan; infinite while there is none."""
        return float("inf") if self.best is None else self.best.step_time

    def evaluate(self, plan: Plan) -> EvaluatedPlan:
        """Predicts a plan, which becomes the best if it fits and is faster."""
        known = self._known.get(plan)
        if known is None:
            known = EvaluatedPlan(plan, predict(plan, self.machine, self.experiment))
            self._known[plan] = known
            if self.best is None:
                self._weigh(known)
            elif known.step_time < self.seconds:
                self._weigh(known)
        return known

    def _weigh(self, judged: EvaluatedPlan) -> None:
        """Compares memory first while no plan fits, since that is quicker to predict."""
        if self.leanest is None or judged.peak_bytes < self.leanest.peak_bytes:
            self.leanest = judged
        if judged.peak_bytes <= self.limit:
            self.best = judged
            if self.seconds < (1 - _GAIN) * self._before:
                self.gained, self._before = time.thread_time(), self.seconds
        else:
            self.tight = True

    def take(self, other: "Evaluator") -> None:
        """Takes over the predictions of another evaluator."""
        self._known.update(other._known)

    def front(self) -> tuple[EvaluatedPlan, ...]:
        """The evaluated plans that none beats in both time and memory, the fastest first."""
        found: list[EvaluatedPlan] = []
        for one in sorted(self._known.values(), key=lambda one: (one.step_time, one.peak_bytes)):
            if not found or one.peak_bytes < found[-1].peak_bytes:
                found.append(one)
        return tuple(found)


@contextmanager
def uncollected() -> Iterator[None]:
    """Turns garbage collection off for a while; where it is off already, it stays off."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
