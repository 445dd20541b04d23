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

import torch
from torch import Tensor

from workbench.layers.cut_model import CutModel
from workbench.program.buckets import Bucket
from workbench.program.instructions import (
    Adjust,
    Clip,
    HandOut,
    Instruction,
    Pass,
    Rescale,
    Unscale,
    Update,
    Wait,
    ZeroGrad,
)
from workbench.program.step import RankProgram
from workbench.train.optimizer.optimizer import ServingUpdater, Updater
from workbench.train.step.gradients import LossScaling
from workbench.train.step.state import (
    InFlight,
    Residuals,
    StepFunction,
    StepState,
    Strategy,
)
from workbench.train.strategy.reduction import GradientSum


class SynchronousStrategy(Strategy):
    """One process's step at any world size, to rounding.

    Where gradients of several steps are added up, each rank adds up its own. They are summed over
    the replicas when weights are to move, and when a checkpoint is to have them: from then on, one
    of the ranks that share a piece goes on from the sum, and the others from nothing.

    Args:
        left: sums of steps before, to which gradients are added; one at most.
    """

    def __init__(
        self,
        program: RankProgram,
        model: CutModel,
        updater: Updater,
        left: Sequence[InFlight] = (),
    ) -> None:
        super().__init__(program)
        self.updater = updater
        self._sums = GradientSum(program, model, updater.owned)
        self._newest: int | None = None  # of the steps whose gradients are added up
        self._has_sums = False  # of that step; it means nothing where there is none
        for each in left:
            self._sums.hold(each.gradients)
            self._newest, self._has_sums = each.step, True

    def bound(self, instruction: Instruction) -> StepFunction:
        match instruction:
            case ZeroGrad(names, every):
                zero_grad = self._sums.zeroing(names)
                return zero_grad if every == 1 else lambda run: self._add(zero_grad, run)
            case Wait():
                return lambda _: self._sums.wait()
            case Rescale(names, Pass() as on):
                return self._rescaling(names, int(on.rows.own.sum()))
            case Unscale():
                return self._unscale
            case Adjust(names):
                return lambda run: self._adjust(names, run.step)
            case Clip():
                return lambda _: self.updater.clip()
            case Update():
                return lambda run: self._step(run.step)
            case HandOut():
                return lambda _: self._hand_out()
        return super().bound(instruction)

    def reducing(self, buckets: Sequence[Bucket]) -> StepFunction:
        def start(_: StepState) -> None:
            self._sums.start(buckets)

        return start

    def expecting(self, names: Collection[str], buckets: Sequence[Bucket]) -> StepFunction | None:
        return self._sums.expecting(names, buckets)

    def move(self) -> None:
        """Moves the weights by the gradients that they have now, on all ranks that hold them."""
        self.updater.clip()
        self.updater.step()
        self._hand_out()

    def settle(self) -> None:
        """Sums what has been added up so far; replicas are always equal."""
        if self._newest is not None and not self._has_sums:
            self._sums.start()
            self._sums.wait()
            self._has_sums = True

    @property
    def in_flight(self) -> list[InFlight]:
        if self._newest is None:
            return []
        named = self._sums.parameters.items()
        every = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named}
        return [InFlight(self._newest, every)]

    @property
    def residuals(self) -> Residuals:
        return [self._sums.residuals] if self._sums.keeps_residuals else []

    @property
    def buffers(self) -> list[Tensor]:
        return self._sums.buffers

    @property
    def scaling(self) -> LossScaling | None:
        return self.updater.scaling

    def close(self) -> None:
        self._sums.close()

    def _add(self, zero_grad: StepFunction, run: StepState) -> None:
        """Before a step whose gradients are added to what there is."""
        if self._newest is None:
            zero_grad(run)
        elif self._has_sums:
            self._sums.go_on()
        self._newest, self._has_sums = run.step, False

    def _unscale(self, run: StepState) -> None:
        if self.scaling is not None:
            run.updates = self.scaling.unscale(list(self.updater.mine().values()))
        for owned in () if run.updates else self.updater.owned.values():
            owned.give_up()

    def _adjust(self, names: Sequence[str], step: int) -> None:
        assert self.updater.rules is not None
        named = {name: self._sums.parameters[name].grad for name in names}
        self.updater.rules.adjust(step, {n: grad for n, grad in named.items() if grad is not None})

    def _step(self, step: int) -> None:
        self.updater.begin(step)
        self.updater.step()
        self._newest = None

    def _hand_out(self) -> None:
        if isinstance(self.updater, ServingUpdater):
            self._sums.hand_out(self.updater.server)
        else:
            self.updater.hand_out()

    def _rescaling(self, names: Sequence[str], rows: int) -> StepFunction:
        parameters = [self._sums.parameters[name] for name in names]

        def rescale(run: StepState) -> None:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(run.samples / rows)

        return rescale
