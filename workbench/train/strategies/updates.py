"""What a rank does to make updates of gradients, whatever the strategy: what all have in common."""

from collections.abc import Collection, Sequence
from typing import Protocol

from torch import Tensor

from workbench.program.buckets import Bucket
from workbench.program.instructions import Instruction
from workbench.program.step import RankProgram
from workbench.train.checkpoint.in_flight import InFlight, Residuals
from workbench.train.loop.passes import Action
from workbench.train.strategies.scaling import LossScaling


class Updates(Protocol):
    """What a rank does at those instructions of its program that turn gradients into updates."""

    def program(self, step: int) -> RankProgram:
        """What a step executes, if all of its rows are there."""
        ...

    def bound(self, instruction: Instruction) -> Action:
        """What is done at an instruction of this program.

        Raises:
            OutOfOrder: its steps have no such instruction.
        """
        ...

    def reducing(self, buckets: Sequence[Bucket]) -> Action:
        """What begins to sum these buckets, at their own place in the list."""
        ...

    def expecting(self, names: Collection[str], buckets: Sequence[Bucket]) -> Action | None:
        """What is to be done before a backward pass in which sums may begin.

        Args:
            names: the parameters that get no more gradients after it, before they are summed.
            buckets: the buckets that may begin to be summed, in their order.
        """
        ...

    def settle(self) -> None:
        """Makes weights and optimizer state equal on all ranks that hold the same piece."""
        ...

    @property
    def is_settled(self) -> bool:
        """Whether all ranks that hold the same piece of a weight are to have the same now."""
        ...

    def rest(self) -> None:
        """Waits until nothing travels any more, whatever comes of it; moves no weights."""
        ...

    @property
    def in_flight(self) -> list[InFlight]:
        """What has been computed and will be used in later steps; sums once it has settled."""
        ...

    @property
    def residuals(self) -> Residuals:
        """What its codec has left out so far, of as many sums on all ranks; to be added to."""
        ...

    @property
    def buffers(self) -> list[Tensor]:
        """What it keeps from step to step, for the account of memory."""
        ...

    @property
    def scaling(self) -> LossScaling | None:
        """What backward passes begin with a multiple of the loss by; None: with the loss."""
        ...


class ImmediateUpdates:
    """Between steps nothing travels or waits to be used; without a codec nothing is left out.

    Args:
        program: what this rank executes in every step.
    """

    def __init__(self, program: RankProgram) -> None:
        self._program = program

    def program(self, step: int) -> RankProgram:
        return self._program

    def expecting(self, names: Collection[str], buckets: Sequence[Bucket]) -> Action | None:
        return None

    def settle(self) -> None:
        """Replicas are always equal."""

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

    @property
    def scaling(self) -> LossScaling | None:
        return None
