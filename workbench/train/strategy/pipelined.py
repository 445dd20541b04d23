"""Pipelined steps: gradients are summed while later steps compute, and used late by a fixed count.

With width K, step t computes its gradient at w[t], waits for the sum S[t-(K-1)], which was started
K-1 steps ago, starts the sum S[t] of its own, and moves the weights by the old one. K gradients
have memory: one is being computed, K-1 are in flight; each carries the step that it is of.

The new sum starts last, after the ranks have agreed on the step: their few bytes would otherwise
queue behind it on the wire, and the next step's computing, which is to hide it, with them.

    step             t-1         t          t+1
    computes         G[t-1]      G[t]       G[t+1]
    sums, K=2                    S[t-1]     S[t]
    moves by, K=2    S[t-2]      S[t-1]     S[t]

On all ranks the same sums move the same weights, whenever they arrive.

Source: Pipe-SGD (arXiv:1811.03619); steps skipped while the pipeline fills: SAPipe's code.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from workbench.comm.pending import ProgressThread
from workbench.layers.cut_model import CutModel
from workbench.plan.experiment.sync import Timing
from workbench.program.buckets import Bucket
from workbench.program.instructions import (
    Adjust,
    Clip,
    HandOut,
    Instruction,
    KeepWeights,
    Update,
    Wait,
    ZeroGrad,
)
from workbench.program.step import RankProgram
from workbench.train.optimizer.optimizer import Updater
from workbench.train.step.state import InFlight, Residuals, StepFunction, StepState, Strategy
from workbench.train.strategy.reduction import GradientSum, has_error_feedback


@dataclass(frozen=True)
class _Flight:
    """A step's gradient under way, and the weights it was computed at if they are needed."""

    step: int
    sums: GradientSum
    weights: Mapping[str, Tensor]


class PipelinedStrategy(Strategy):
    """Moves the weights by sums that are `late` steps old.

    Parameters without replicas wait as long as the others, so that all are equally late.
    """

    def __init__(
        self,
        program: RankProgram,
        model: CutModel,
        updater: Updater,
        left: Sequence[InFlight],
        notes: list[str],
    ) -> None:
        super().__init__(program)
        (self.late,) = (i.late for i in program.program.instructions if isinstance(i, Wait))
        self.model, self.updater, self._notes = model, updater, notes
        self._progress = ProgressThread()
        self._flying: deque[_Flight] = deque()  # the oldest first
        self._idle: list[GradientSum] = []
        self._filling: GradientSum | None = None
        self._then: dict[str, Tensor] = {}
        for each in left:
            self._flying.append(_Flight(each.step, self._holding(each), each.weights))

    def bound(self, instruction: Instruction) -> StepFunction:
        match instruction:
            case ZeroGrad(names):
                return lambda run: self._zero_grad(names, run)
            case KeepWeights():
                return lambda _: self._keep_weights()
            case Wait():
                return lambda _: self._wait()
            case Adjust(names):
                return lambda run: self._adjust(names, run.step)
            case Clip():
                return lambda run: self._clip(run.step)
            case Update():
                return lambda run: self._move(run.step)
            case HandOut():
                return lambda _: self.updater.hand_out()
        return super().bound(instruction)

    def reducing(self, buckets: Sequence[Bucket]) -> StepFunction:
        return lambda run: self._start(run.step)

    def _zero_grad(self, names: Sequence[str], run: StepState) -> None:
        self._filling = self._idle.pop() if self._idle else self._new()
        self._filling.zeroing(names)(run)

    def _keep_weights(self) -> None:
        self._then = {n: p.detach().clone() for n, p in self.model.trainable().items()}

    def _wait(self) -> None:
        if len(self._flying) == self.late:
            self._flying[0].sums.wait()

    def _start(self, step: int) -> None:
        assert self._filling is not None
        self._progress.attend(self._filling.start())
        self._filling.takes_gradients = False
        self._flying.append(_Flight(step, self._filling, self._then))
        self._filling, self._then = None, {}

    def settle(self) -> None:
        """Waits for the sums in flight, which stay there; replicas are always equal."""
        for flight in self._flying:
            flight.sums.wait()

    def rest(self) -> None:
        for flight in self._flying:
            with suppress(RuntimeError):
                flight.sums.wait()

    @property
    def in_flight(self) -> list[InFlight]:
        return [InFlight(f.step, f.sums.views, f.weights) for f in self._flying]

    @property
    def residuals(self) -> Residuals:
        """Of all sums that take turns, the next one's first."""
        if not has_error_feedback(self.program):
            return []
        while len(self._idle) + len(self._flying) < self.late + 1:
            self._idle.insert(0, self._new())
        turns = [*reversed(self._idle), *(flight.sums for flight in self._flying)]
        return [sums.residuals for sums in turns]

    @property
    def buffers(self) -> list[Tensor]:
        sums = [*self._idle, *(flight.sums for flight in self._flying)]
        sums += [self._filling] if self._filling is not None else []
        held = [flat for each in sums for flat in each.buffers]
        held += [weight for flight in self._flying for weight in flight.weights.values()]
        return held

    def _new(self) -> GradientSum:
        """Memory for one more gradient; all ranks come here before the same step."""
        return GradientSum(self.program, self.model)

    def _holding(self, left: InFlight) -> GradientSum:
        sums = self._new()
        for name, view in sums.views.items():
            view.copy_(left.gradients[name])
        return sums

    def _due(self, step: int) -> _Flight | None:
        """The gradient that a step moves weights by; None: it fills the pipeline."""
        if self._flying and self._flying[0].step == step - self.late:
            return self._flying[0]
        return None

    def _adjust(self, names: Sequence[str], step: int) -> None:
        flight, rules = self._due(step), self.updater.rules
        if flight is None:
            return
        assert rules is not None
        views = {name: flight.sums.views[name] for name in names if name in flight.sums.views}
        rules.adjust(step, views, flight.weights)

    def _clip(self, step: int) -> None:
        flight = self._due(step)
        if flight is not None:
            self.updater.clip(flight.sums.views)

    def _move(self, step: int) -> None:
        flight = self._due(step)
        if flight is None:
            self._notes.append(f"step {step} moved no weights: it filled the pipeline")
            return
        self._flying.popleft()
        views = flight.sums.views
        for name, parameter in self.model.trainable().items():
            if name in views:
                parameter.grad = views[name]
        self.updater.begin(step)
        self.updater.step()
        self._idle.append(flight.sums)


def stays_in_flight(timing: Timing, first_step: int) -> int:
    """How many gradients of earlier steps may be in flight before a step, under any strategy."""
    if first_step < timing.warmup:
        return 0
    return int(not timing.begins(first_step)) if timing.adds_up else timing.late


def drain(
    oldest_first: Sequence[InFlight], model: CutModel, move: Callable[[], None], notes: list[str]
) -> None:
    """Moves the weights by sums for which a strategy has no place in its pipeline."""
    for left in oldest_first:
        for name, parameter in model.trainable().items():
            parameter.grad = left.gradients.get(name)
        move()
        notes.append(f"the gradient of step {left.step}, in flight until then, was used at once")
    for parameter in model.trainable().values():
        parameter.grad = None
