"""Balancing during a run: every step's times are points of the time models.

    start       equal sizes, or given ones
    each time   measured (size, seconds) join the models; while the devices differ by more than a
                threshold for some steps in a row, sizes are chosen anew from all points so far
    the end     the rest is less than a unit, or not worth a change

Source: Lastovetsky and Reddy 2009, the distributed functional partitioning algorithm (DFPA);
waiting for several steps in a row, and the worth of a change, are ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from workbench.predict.balance.partition import Partition, partition
from workbench.predict.balance.time_model import Kind, Point, TimeModel

_WORTH = 0.25
"""The part of the tolerated imbalance by which a new division must end earlier."""


@dataclass(frozen=True)
class Balancer:
    """The time models of the devices, and how their work is divided; an immutable value.

    Attributes:
        sizes: the units of each device now [devices].
        models: the time model of each device; None: it was never measured [devices].
        threshold: the imbalance that is tolerated, relative to the slowest device.
        patience: the number of successive measurements that must exceed it.
        grain: the units that stay together.
        kind: the kind of the time models.
        exceeded: the number of successive measurements that have exceeded the threshold.
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
        """The balancer after a step, in which each device took so many seconds.

        Its sizes change once the devices have differed for long enough, and a new division promises
        an earlier end.
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
        """Seconds that a device takes for its units, as last known; None: it was never measured."""
        model, size = self.models[device], self.sizes[device]
        return None if model is None else float(model.seconds(size)[size])

    def _learnt(self, model: TimeModel | None, size: int, seconds: float) -> TimeModel | None:
        """The time model with one more point; a device without work gives none.

        Points that the new one contradicts are dropped: the device has changed its speed.
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
