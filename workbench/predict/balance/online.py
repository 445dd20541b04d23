"""Balancing while work goes on: every step's times are points of the models.

    start       equal sizes, or given ones
    each time   measured (size, seconds) join the models; while the devices differ by more than a
                threshold for some steps in a row, sizes are chosen anew from all points so far
    the end     what is left is less than a unit, or than what is worth a change

Source: Lastovetsky and Reddy 2009, the distributed functional partitioning algorithm (DFPA);
waiting for several steps in a row, and the worth of a change, are ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from workbench.predict.balance.partition import Partition, partition
from workbench.predict.balance.time_model import Point, TimeModel
from workbench.predict.balance.time_tables import Kind

_WORTH = 0.25
"""Of the imbalance that is borne: an end that is earlier by less than this changes nothing."""


@dataclass(frozen=True)
class Balancer:
    """What is known of the devices, and how their work is divided. A value.

    Attributes:
        sizes: units of each device now.
        models: of each device; None: it was never measured.
        threshold: imbalance that is borne.
        patience: measurements in a row that must exceed it.
        grain: units that are handed out together.
        kind: of the models.
        exceeded: measurements in a row that did.
    """

    sizes: tuple[int, ...]
    models: tuple[TimeModel | None, ...] = ()
    threshold: float = 0.05
    patience: int = 3
    grain: int = 1
    kind: Kind = "linear"
    exceeded: int = 0

    def __post_init__(self) -> None:
        if not self.models:
            object.__setattr__(self, "models", (None,) * len(self.sizes))

    def measured(self, seconds: Sequence[float]) -> "Balancer":
        """What is known after a step, in which each device took so many seconds.

        Its sizes are others once the devices have differed for long enough, and dividing them
        anew promises an earlier end.
        """
        now = Partition(self.sizes, tuple(seconds))
        if now.imbalance <= self.threshold:
            return replace(self, exceeded=0)
        if self.exceeded + 1 < self.patience:
            return replace(self, exceeded=self.exceeded + 1)
        models = tuple(map(self._learnt, self.models, self.sizes, seconds))
        known = replace(self, models=models, exceeded=0)
        if any(model is None for model in models):
            return known
        every = [model for model in models if model is not None]
        better = partition(sum(self.sizes), every, grain=self.grain)
        worth = self.threshold * _WORTH
        return (
            replace(known, sizes=better.sizes) if better.end_s < now.end_s * (1 - worth) else known
        )

    def expected(self, device: int) -> float | None:
        """Seconds that a device takes for its units, as last known; None: it was not measured."""
        model, size = self.models[device], self.sizes[device]
        return None if model is None else float(model.seconds(size)[size])

    def _learnt(self, model: TimeModel | None, size: int, seconds: float) -> TimeModel | None:
        """A model with one more point; of a device without work nothing is learnt.

        Points that the new one contradicts are forgotten: the device has changed its speed.
        """
        if size == 0:
            return model
        point = Point(size, seconds)
        if model is None:
            return TimeModel((point,), self.kind)
        before = float(model.seconds(size)[size])
        if seconds > 0 and abs(before - seconds) / seconds > 2 * self.threshold:
            return TimeModel((point,), self.kind)
        return model.with_points([point])
