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

import torch
from torch import Tensor

from workbench.comm.algorithms.attendant import ProgressThread
from workbench.layers.cut_model import CutModel
from workbench.plan.experiment import Pipelined, Sync, Synchronous
from workbench.train.checkpoint.in_flight import InFlight
from workbench.train.checkpoint.residuals import Residuals
from workbench.train.strategies.gradients import GradientSum
from workbench.train.strategies.optimizer import Updater
from workbench.train.strategies.synchronous import SynchronousUpdates

# One sum of the whole gradient, whose latency is hidden: there is nothing to gain from parts.
WHOLE = 2**62


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
        sync: the value; its width is at least 2.
        model: this rank's part.
        updater: of its pieces.
        first_step: that this session begins with.
        left: in flight from the session before, the oldest first; fewer than `width`.
        notes: takes what people should know of steps that were unlike others.
    """

    def __init__(
        self,
        sync: Pipelined,
        model: CutModel,
        updater: Updater,
        first_step: int,
        left: Sequence[InFlight],
        notes: list[str],
    ) -> None:
        self.sync, self.model, self.updater, self._notes = sync, model, updater, notes
        self._step = first_step
        self._attendant = ProgressThread()
        self._flying: deque[_Flight] = deque()  # the oldest first
        self._idle: list[GradientSum] = []
        self._filling: GradientSum | None = None
        self._then: dict[str, Tensor] = {}
        self._warm: SynchronousUpdates | None = None
        if first_step < sync.warmup:
            self._warm = SynchronousUpdates(as_synchronous(sync), model, updater)
        for each in left:
            self._flying.append(_Flight(each.step, self._holding(each), each.weights))

    def begin(self) -> None:
        if self._warm is not None and self._step >= self.sync.warmup:
            self._cool()
        if self._warm is not None:
            self._warm.begin()
            return
        self._filling = self._idle.pop() if self._idle else self._new()
        if self.sync.compensation is not None:
            self._then = {n: p.detach().clone() for n, p in self.model.trainable().items()}
        self._filling.begin()

    def last(self) -> None:
        if self._warm is not None:
            self._warm.last()

    def after_round(self, rows: int, samples: int) -> None:
        """Gradients of all rounds add up."""

    def finish(self, rows: tuple[int, ...]) -> None:
        if self._warm is not None:
            self._warm.finish(rows)
            return
        if len(self._flying) == self.sync.width - 1:
            self._flying[0].sums.wait()

    def update(self, step: int) -> None:
        self._step = step + 1
        if self._warm is not None:
            self._warm.update(step)
            return
        assert self._filling is not None
        self._attendant.attend(self._filling.start())
        self._flying.append(_Flight(step, self._filling, self._then))
        self._filling, self._then = None, {}
        if len(self._flying) < self.sync.width:
            self._notes.append(f"step {step} moved no weights: it filled the pipeline")
        else:
            self._move(step)

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
        sync = self.sync
        return GradientSum(
            self.model, WHOLE, algorithm=sync.algorithm, codec=sync.codec, alone=True
        )

    def _holding(self, left: InFlight) -> GradientSum:
        sums = self._new()
        for name, view in sums.views.items():
            view.copy_(left.gradients[name])
        return sums

    @torch.no_grad()
    def _move(self, step: int) -> None:
        flight = self._flying.popleft()
        assert flight.step == step - (self.sync.width - 1), "gradients are equally late"
        views = flight.sums.views
        for name, parameter in self.model.trainable().items():
            if name in views:
                parameter.grad = views[name]
                if name in flight.weights:
                    moved = parameter - flight.weights[name]
                    strength = self.sync.compensation_lambda
                    parameter.grad.add_(strength * views[name] * views[name] * moved)
        self.updater.step()
        self._idle.append(flight.sums)


def as_synchronous(sync: Pipelined) -> Synchronous:
    """What pipelined steps are that are not late."""
    return Synchronous(bucket_bytes=sync.bucket_bytes, algorithm=sync.algorithm, codec=sync.codec)


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
        move: moves the weights by their gradients.
        notes: takes what was done.
    """
    for left in oldest_first:
        for name, parameter in model.trainable().items():
            parameter.grad = left.gradients.get(name)
        move()
        notes.append(f"the gradient of step {left.step}, in flight until then, was used at once")
    for parameter in model.trainable().values():
        parameter.grad = None
