"""First steps that are synchronous, whatever a strategy does after them."""

from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from workbench.program.buckets import Bucket
from workbench.program.instructions import Instruction
from workbench.program.step import RankProgram
from workbench.train.checkpoint.in_flight import InFlight, Residuals
from workbench.train.loop.passes import Action
from workbench.train.strategies.rules import Rules
from workbench.train.strategies.scaling import LossScaling
from workbench.train.strategies.synchronous import SynchronousUpdates
from workbench.train.strategies.updates import Updates


class WarmingUpdates:
    """Synchronous until a step, then as the strategy wants it.

    Args:
        warm: the first steps' updates.
        until: the number of first steps.
        then: makes the updates that come after them.
        rules: what the strategy makes itself, whose states begin then.
    """

    def __init__(
        self,
        warm: SynchronousUpdates,
        until: int,
        then: Callable[[], Updates],
        rules: Rules | None,
    ) -> None:
        self._warm, self._until, self._then, self._rules = warm, until, then, rules
        self._now: Updates = warm

    def program(self, step: int) -> RankProgram:
        if self._now is self._warm and step >= self._until:
            self._cool()
        return self._now.program(step)

    def bound(self, instruction: Instruction) -> Action:
        return self._now.bound(instruction)

    def reducing(self, buckets: Sequence[Bucket]) -> Action:
        return self._now.reducing(buckets)

    def expecting(self, names: Collection[str], buckets: Sequence[Bucket]) -> Action | None:
        return self._now.expecting(names, buckets)

    def settle(self) -> None:
        self._now.settle()

    @property
    def is_settled(self) -> bool:
        return self._now.is_settled

    def rest(self) -> None:
        self._now.rest()

    @property
    def in_flight(self) -> list[InFlight]:
        return self._now.in_flight

    @property
    def residuals(self) -> Residuals:
        return self._now.residuals

    @property
    def buffers(self) -> list[Tensor]:
        return self._now.buffers

    @property
    def scaling(self) -> LossScaling | None:
        return self._now.scaling

    def _cool(self) -> None:
        """What the codec has left out is not forgotten; states begin with the weights of now."""
        left_out = self._warm.residuals
        self._warm.close()
        self._now = self._then()
        if self._rules is not None:
            self._rules.begin()
        for mine, before in zip(self._now.residuals, left_out, strict=False):
            for name, piece in before.items():
                mine[name].copy_(piece)
