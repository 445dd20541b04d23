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
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workbench.comm.pending import ProgressThread
from workbench.layers.cut_model import CutModel
from workbench.plan.experiment.experiment import Pipelined, Sync
from workbench.program.buckets import Bucket
from workbench.program.instructions import (
    Clip,
    Compensate,
    HandOut,
    Instruction,
    KeepWeights,
    Update,
    Wait,
    ZeroGrad,
)
from workbench.program.step import RankProgram
from workbench.train.checkpoint.in_flight import InFlight, Residuals
from workbench.train.loop.passes import Action
from workbench.train.strategies.gradients import GradientSum, OutOfOrder
from workbench.train.strategies.optimizer import Updater
from workbench.train.strategies.synchronous import SynchronousUpdates


@dataclass(frozen=True)
class _Flight:
    """A step's gradient under way, and the weights it was computed at if they are needed."""

    step: int
    sums: GradientSum
    weights: Mapping[str, Tensor]


class PipelinedUpdates:
    """Moves the weights by sums that are `width` - 1 steps old; before `warmup`, by new ones.

    Parameters without replicas wait as long as the others, so that all are equally late.

    Args:
        program: what this rank executes in a step in the middle of a run, of width 2 or more.
        model: this rank's part.
        updater: the updater of its pieces.
        first_step: the step that this session begins with.
        left: the gradients in flight from the session before, the oldest first; fewer than the
            width.
        notes: takes what people should know of steps that were unlike others.
    """

    def __init__(
        self,
        program: RankProgram,
        model: CutModel,
        updater: Updater,
        first_step: int,
        left: Sequence[InFlight],
        notes: list[str],
    ) -> None:
        sync = program.program.experiment.sync
        assert isinstance(sync, Pipelined)
        self.sync, self.model, self.updater, self._notes = sync, model, updater, notes
        self._program = program
        self._progress = ProgressThread()
        self._flying: deque[_Flight] = deque()  # the oldest first
        self._idle: list[GradientSum] = []
        self._filling: GradientSum | None = None
        self._then: dict[str, Tensor] = {}
        self._warm: SynchronousUpdates | None = None
        if first_step < sync.warmup:
            self._warm = SynchronousUpdates(_as_synchronous(program), model, updater)
        for each in left:
            self._flying.append(_Flight(each.step, self._holding(each), each.weights))

    def program(self, step: int) -> RankProgram:
        if self._warm is not None and step >= self.sync.warmup:
            self._cool()
        return self._program if self._warm is None else self._warm.program(step)

    def bound(self, instruction: Instruction) -> Action:
        if self._warm is not None:
            return self._warm.bound(instruction)
        match instruction:
            case ZeroGrad(names):
                return lambda _: self._zero_grad(names)
            case KeepWeights():
                return lambda _: self._keep_weights()
            case Wait():
                return lambda _: self._wait()
            case Compensate(names):
                return lambda run: self._compensate(names, run.step)
            case Clip():
                return lambda run: self._clip(run.step)
            case Update():
                return lambda run: self._move(run.step)
            case HandOut():
                return lambda _: self.updater.hand_out()
        raise OutOfOrder(f"pipelined steps do nothing at {instruction.word!r}")

    def reducing(self, buckets: Sequence[Bucket]) -> Action:
        if self._warm is not None:
            return self._warm.reducing(buckets)
        return lambda run: self._start(run.step)

    def expecting(self, names: Collection[str], buckets: Sequence[Bucket]) -> Action | None:
        return None if self._warm is None else self._warm.expecting(names, buckets)

    def _zero_grad(self, names: Sequence[str]) -> None:
        self._filling = self._idle.pop() if self._idle else self._new()
        self._filling.zeroing(names)()

    def _keep_weights(self) -> None:
        self._then = {n: p.detach().clone() for n, p in self.model.trainable().items()}

    def _wait(self) -> None:
        if len(self._flying) == self.sync.width - 1:
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

    @property
    def is_settled(self) -> bool:
        return True

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
        if self._warm is not None:
            return self._warm.residuals
        if self.sync.codec is None or not self.sync.codec.error_feedback:
            return []
        while len(self._idle) + len(self._flying) < self.sync.width:
            self._idle.insert(0, self._new())
        turns = [*reversed(self._idle), *(flight.sums for flight in self._flying)]
        return [sums.residuals for sums in turns]

    @property
    def buffers(self) -> list[Tensor]:
        sums = [*self._idle, *(flight.sums for flight in self._flying)]
        sums += [self._filling] if self._filling is not None else []
        held = [flat for each in sums for flat in each.buffers]
        held += [weight for flight in self._flying for weight in flight.weights.values()]
        return held + (self._warm.buffers if self._warm is not None else [])

    def _cool(self) -> None:
        """Steps are late from now on; what the codec has left out is not forgotten."""
        assert self._warm is not None
        left_out = self._warm.residuals
        self._warm.close()
        self._warm = None
        for mine, before in zip(self.residuals, left_out, strict=False):
            for name, piece in before.items():
                mine[name].copy_(piece)

    def _new(self) -> GradientSum:
        """Memory for one more gradient; all ranks come here before the same step."""
        return GradientSum(self._program, self.model)

    def _holding(self, left: InFlight) -> GradientSum:
        sums = self._new()
        for name, view in sums.views.items():
            view.copy_(left.gradients[name])
        return sums

    def _due(self, step: int) -> _Flight | None:
        """The gradient that a step moves weights by; None: it fills the pipeline."""
        if self._flying and self._flying[0].step == step - (self.sync.width - 1):
            return self._flying[0]
        return None

    @torch.no_grad()
    def _compensate(self, names: Sequence[str], step: int) -> None:
        flight, parameters = self._due(step), self.model.trainable()
        if flight is None:
            return
        views, strength = flight.sums.views, self.sync.compensation_lambda
        for name in names:
            if name in views and name in flight.weights:
                moved = parameters[name] - flight.weights[name]
                views[name].add_(strength * views[name] * views[name] * moved)

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


def _as_synchronous(program: RankProgram) -> RankProgram:
    """What a rank executes while its steps are not late."""
    whole = program.program
    sync = whole.experiment.sync.replace(width=1, compensation=None)
    experiment = whole.experiment.replace(sync=sync)
    return replace(whole, experiment=experiment).of(program.rank)


def stays_in_flight(sync: Sync, first_step: int) -> int:
    """How many gradients of earlier steps may be in flight before a step, under any strategy."""
    if isinstance(sync, Pipelined) and first_step >= sync.warmup:
        return sync.width - 1
    return 0


def drain(
    oldest_first: Sequence[InFlight], model: CutModel, move: Callable[[], None], notes: list[str]
) -> None:
    """Moves the weights by sums for which a strategy has no place in its pipeline.

    Args:
        oldest_first: this rank's pieces of the sums.
        model: this rank's part.
        move: what moves the weights by their gradients.
        notes: the notes, which take what was done.
    """
    for left in oldest_first:
        for name, parameter in model.trainable().items():
            parameter.grad = left.gradients.get(name)
        move()
        notes.append(f"the gradient of step {left.step}, in flight until then, was used at once")
    for parameter in model.trainable().values():
        parameter.grad = None
