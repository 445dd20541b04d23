"""Plans evaluated by the full prediction, once each, and the best of those that fit."""

from dataclasses import dataclass
from functools import cached_property

from workbench.plan.experiment import Experiment
from workbench.plan.machine import Machine
from workbench.plan.plan import Plan
from workbench.predict.prediction import Prediction, predict


@dataclass(frozen=True)
class EvaluatedPlan:
    """A plan and what is predicted for it."""

    plan: Plan
    prediction: Prediction

    @cached_property
    def step_time(self) -> float:
        """Seconds."""
        return float(self.prediction.step_time)

    @cached_property
    def peak_bytes(self) -> int:
        """Of the rank that needs most."""
        return self.prediction.memory.peak_bytes


class Evaluator:
    """Keeps the fastest plan that fits.

    Args:
        experiment: the run for which every plan is predicted.
        machine: the machine for which it is predicted.
        limit: bytes of a rank.
    """

    def __init__(self, experiment: Experiment, machine: Machine, limit: int) -> None:
        self.experiment, self.machine, self.limit = experiment, machine, limit
        self.best: EvaluatedPlan | None = None
        self.leanest: EvaluatedPlan | None = None
        self._known: dict[Plan, EvaluatedPlan] = {}
        self.tight = False  # whether a plan that was faster than the best so far did not fit

    def __len__(self) -> int:
        return len(self._known)

    @property
    def seconds(self) -> float:
        """Of the best plan; infinite while there is none."""
        return float("inf") if self.best is None else self.best.step_time

    def evaluate(self, plan: Plan) -> EvaluatedPlan:
        """What is predicted for a plan, which becomes the best if it fits and is faster."""
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
        """Whether it fits is asked for first while nothing does: that is the quicker question."""
        if self.leanest is None or judged.peak_bytes < self.leanest.peak_bytes:
            self.leanest = judged
        if judged.peak_bytes <= self.limit:
            self.best = judged
        else:
            self.tight = True

    def take(self, other: "Evaluator") -> None:
        """Knows what another one knows."""
        self._known.update(other._known)

    def front(self) -> tuple[EvaluatedPlan, ...]:
        """Of all plans that were evaluated, those that none beats in time and memory.

        The fastest first.
        """
        found: list[EvaluatedPlan] = []
        for one in sorted(self._known.values(), key=lambda one: (one.step_time, one.peak_bytes)):
            if not found or one.peak_bytes < found[-1].peak_bytes:
                found.append(one)
        return tuple(found)
