"""The learning rate of every step of a run in which people change it.

    base ---- 0.1 from step 40 on ---- 0.05 from step 57 on ----

A step that is run again, after a fault, has the rate that it had: a run that goes on from a
checkpoint is the one that would have gone on without.
"""

from dataclasses import dataclass

import torch

from workbench.train.reshard.requests import CarriedOut, RunRequests


@dataclass(frozen=True)
class Change:
    """One wish that was carried out: `value` since `step`, and `before` until then."""

    step: int
    value: float
    before: float


@dataclass(frozen=True)
class LearningRates:
    """What was wished for, in that order.

    Attributes:
        base: where nothing was.
        changes: those that were carried out; where two are for one step, the later wish counts.
    """

    base: float
    changes: tuple[Change, ...] = ()

    @classmethod
    def of(cls, base: float, wishes: RunRequests) -> "LearningRates":
        """Those of a run, as its directory says.

        Args:
            base: of its experiment, which may have another one by now.
            wishes: for the run.
        """
        changes = tuple(
            Change(done.step, value, base if done.before is None else done.before)
            for _, value, done in wishes.rates()
        )
        return cls(changes[0].before if changes else base, changes)

    def at(self, step: int) -> float:
        """Of a step, by its index."""
        due = [change.value for change in self.changes if change.step <= step]
        return due[-1] if due else self.base

    def then(self, step: int, value: float) -> tuple["LearningRates", CarriedOut]:
        """With another rate from a step on, and what is to be noted of that."""
        before = self.at(step)
        changed = LearningRates(self.base, (*self.changes, Change(step, value, before)))
        return changed, CarriedOut(step, before=before)


def set_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Has an optimizer move weights at this rate from now on; what it remembers stays."""
    for group in optimizer.param_groups:
        group["lr"] = value
