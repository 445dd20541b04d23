"""Every gradient is used in the step that computed it: summed over its replicas, then applied."""

from torch import Tensor

from workbench.layers.cut_model import CutModel
from workbench.plan.experiment import Synchronous
from workbench.train.checkpoint.in_flight import InFlight
from workbench.train.checkpoint.residuals import Residuals
from workbench.train.strategies.gradients import GradientSum
from workbench.train.strategies.optimizer import Updater


class ImmediateStrategy:
    """Between steps nothing travels or waits to be used; without a codec nothing is left out."""

    @property
    def is_settled(self) -> bool:
        return True

    def rest(self) -> None:
        """Nothing travels."""

    @property
    def in_flight(self) -> list[InFlight]:
        return []

    @property
    def residuals(self) -> Residuals:
        return []


class SynchronousUpdates(ImmediateStrategy):
    """One process's step at any world size, to rounding.

    Args:
        sync: the value.
        model: this rank's part.
        updater: of its pieces.
    """

    def __init__(self, sync: Synchronous, model: CutModel, updater: Updater) -> None:
        self.updater = updater
        self._sums = GradientSum(
            model,
            sync.bucket_bytes,
            algorithm=sync.algorithm,
            codec=sync.codec,
            owned=updater.owned,
        )

    def begin(self) -> None:
        self._sums.begin()

    def last(self) -> None:
        self._sums.last()

    def after_round(self, rows: int, samples: int) -> None:
        """Gradients of all rounds add up."""

    def finish(self, rows: tuple[int, ...]) -> None:
        self._sums.finish()

    def update(self, step: int) -> None:
        self.updater.step()

    def settle(self) -> None:
        """Replicas are always equal."""

    @property
    def residuals(self) -> Residuals:
        return [self._sums.residuals] if self._sums.keeps_residuals else []

    @property
    def buffers(self) -> list[Tensor]:
        return self._sums.buffers

    def close(self) -> None:
        """Leaves the parameters to another strategy."""
        self._sums.close()
