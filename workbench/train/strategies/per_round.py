"""The variable batch: weights behind the gather step after every round, the others once.

After each round, the sum of its gradients over the replica groups is divided by the rows of that
round alone. The gradient that goes back to the head is that of the mean over the whole batch,
taken where the tail's weights were in each round.

Source: One Weird Trick (arXiv:1404.5997, sec. 4.2); the factors are those of SplitBrain's table
(divided by G only, not by k).
"""

from torch import Tensor

from workbench.layers.cut_model import CutModel
from workbench.plan.experiment import Synchronous
from workbench.plan.plan import Plan
from workbench.train.checkpoint.residuals import Residuals
from workbench.train.strategies.gradients import GradientSum
from workbench.train.strategies.optimizer import Updater
from workbench.train.strategies.synchronous import ImmediateStrategy


def weights_behind(plan: Plan) -> set[str]:
    """The weights of the plan's tail."""
    assert plan.tail is not None
    layers = (layer for layer in plan.graph.layers if layer.name in plan.tail.layers)
    return {weight.name for layer in layers for weight in layer.weights}


class PerRoundUpdates(ImmediateStrategy):
    """Two sums of gradients: the tail's once a round, the head's once a step.

    Args:
        sync: the value.
        model: this rank's part; its plan has a tail.
        updater: of its pieces. What has no gradient does not move, so it serves both.
    """

    def __init__(self, sync: Synchronous, model: CutModel, updater: Updater) -> None:
        tail = weights_behind(model.plan)
        self.updater = updater
        head, by, codec = set(model.trainable()) - tail, sync.algorithm, sync.codec
        self._head = GradientSum(model, sync.bucket_bytes, head, algorithm=by, codec=codec)
        self._tail = GradientSum(model, sync.bucket_bytes, tail, algorithm=by, codec=codec)

    def begin(self) -> None:
        self._head.begin()
        self._begin_round()

    def last(self) -> None:
        self._head.last()

    def after_round(self, rows: int, samples: int) -> None:
        self._tail.finish()
        if rows:  # the mean over no rows moves nothing
            for parameter in self._tail.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(samples / rows)
            self.updater.step()
        self._begin_round()

    def finish(self, rows: tuple[int, ...]) -> None:
        self._head.finish()

    def update(self, step: int) -> None:
        self.updater.step()

    def settle(self) -> None:
        """Replicas are always equal."""

    @property
    def residuals(self) -> Residuals:
        both = self._head.residuals | self._tail.residuals
        return [both] if self._head.keeps_residuals else []

    @property
    def buffers(self) -> list[Tensor]:
        return self._head.buffers + self._tail.buffers

    def _begin_round(self) -> None:
        """Forgets the last round's gradients; each round's backward is the last one for them."""
        self._tail.begin()
        self._tail.last()
