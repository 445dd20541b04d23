"""Every gradient is used in the step that computed it: summed over its replicas, then applied.

By an all-reduce, all replicas move their weights by the same sums. With a parameter server, each
sum is in one rank, which moves the weights and hands them out: of the n bytes of parameters that
p ranks hold, in every step

    gradients    p - 1 ranks send them all, while backward goes on      (p - 1) n into the server
    update       at the server alone, which alone has its state
    weights      the server sends them to all, all at once              (p - 1) n out of the server

A layer that lies over groups of k ranks has k pieces, each with p / k holders; the server of each
is in the group of ranks that the world's server is in.

With a variable batch, the weights behind the gather step after every round, the others once. After
each round, the sum of its gradients over the replica groups is divided by the rows of that round
alone. The gradient that goes back to the head is that of the mean over the whole batch, taken
where the tail's weights were in each round.

Source: PS-Sync, the baseline of Pipe-SGD (arXiv:1811.03619); nothing here is slower than it need
be, so that what it is compared with is not flattered. One Weird Trick (arXiv:1404.5997, sec. 4.2);
the factors are those of SplitBrain's table (divided by G only, not by k).
"""

from collections.abc import Collection, Sequence

from torch import Tensor

from workbench.layers.cut_model import CutModel
from workbench.plan.experiment.experiment import ParameterServer
from workbench.program.buckets import Bucket
from workbench.program.instructions import (
    Clip,
    HandOut,
    Instruction,
    Pass,
    Rescale,
    Update,
    Wait,
    ZeroGrad,
)
from workbench.program.step import RankProgram
from workbench.train.checkpoint.in_flight import InFlight, Residuals
from workbench.train.loop.passes import Action, Execution
from workbench.train.strategies.gradients import GradientSum, OutOfOrder
from workbench.train.strategies.optimizer import Updater


class ImmediateStrategy:
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


class SynchronousUpdates(ImmediateStrategy):
    """One process's step at any world size, to rounding.

    Args:
        program: what this rank executes in every step.
        model: this rank's part.
        updater: the updater of its pieces. What has no gradient does not move, so that it serves
            weights that step apart.
    """

    def __init__(self, program: RankProgram, model: CutModel, updater: Updater) -> None:
        super().__init__(program)
        self.updater = updater
        self._sums = GradientSum(program, model, updater.owned)
        self._served = isinstance(program.program.experiment.sync, ParameterServer)

    def bound(self, instruction: Instruction) -> Action:
        match instruction:
            case ZeroGrad(names):
                zero_grad = self._sums.zeroing(names)
                return lambda _: zero_grad()
            case Wait():
                return lambda _: self._sums.wait()
            case Rescale(names, Pass() as on):
                return self._rescaling(names, int(on.rows.own.sum()))
            case Clip():
                return lambda _: self.updater.clip()
            case Update():
                return lambda run: self._step(run.step)
            case HandOut():
                return lambda _: self._hand_out()
        raise OutOfOrder(f"synchronous steps do nothing at {instruction.word!r}")

    def reducing(self, buckets: Sequence[Bucket]) -> Action:
        return lambda _: self._start(buckets)

    def expecting(self, names: Collection[str], buckets: Sequence[Bucket]) -> Action | None:
        expect = self._sums.expecting(names, buckets) if names or buckets else None
        return None if expect is None else lambda _: expect()

    def move(self) -> None:
        """Moves the weights by the gradients that they have now, on all ranks that hold them."""
        self.updater.clip()
        self.updater.step()
        self._hand_out()

    @property
    def residuals(self) -> Residuals:
        return [self._sums.residuals] if self._sums.keeps_residuals else []

    @property
    def buffers(self) -> list[Tensor]:
        return self._sums.buffers

    def close(self) -> None:
        """Leaves the parameters to another strategy."""
        self._sums.close()

    def _step(self, step: int) -> None:
        self.updater.begin(step)
        self.updater.step()

    def _start(self, buckets: Sequence[Bucket]) -> None:
        self._sums.start(buckets)

    def _hand_out(self) -> None:
        if self._served:
            self._sums.hand_out()
        else:
            self.updater.hand_out()

    def _rescaling(self, names: Sequence[str], rows: int) -> Action:
        parameters = [self._sums.parameters[name] for name in names]

        def rescale(run: Execution) -> None:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(run.samples / rows)

        return rescale
