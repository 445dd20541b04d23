"""Forward and backward of one micro-batch: whole, or with the tail in rounds."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.fx
from torch import Tensor

from workbench.layers.cut_model import CutModel
from workbench.layers.rounds import PartedModel, Round, joined, rounds_of
from workbench.plan.mesh import shard_group
from workbench.train.loop.objective import StepLoss, step_loss

Precision = Callable[[], AbstractContextManager[object]]
AfterRound = Callable[[int, int], None]


@dataclass(frozen=True)
class MicroBatch:
    """This rank's rows of one micro-batch.

    Attributes:
        rows: rows of every rank.
        first_row: index of rank 0's first row in the step's global batch.
        images: [own rows, *input_shape].
        labels: [own rows].
    """

    rows: tuple[int, ...]
    first_row: int
    images: Tensor
    labels: Tensor


class Pass(Protocol):
    """Adds the gradients of one micro-batch."""

    @property
    def parts(self) -> tuple[torch.fx.GraphModule, ...]:
        """Of the model, in the order in which they are executed; the last gives its outputs."""
        ...

    def run(
        self, batch: MicroBatch, step: int, samples: int, before_last: Callable[[], None]
    ) -> tuple[tuple[Tensor, ...], float]:
        """Computes one micro-batch, forward and backward.

        Args:
            batch: this rank's rows.
            step: the optimizer step that it belongs to.
            samples: of the step over all ranks and micro-batches.
            before_last: called before the backward pass after which no parameter, but for
                those that it reaches, gets another gradient.

        Returns:
            The outputs as the plan's flow lays them, and this rank's part of the mean loss.
        """
        ...


def pass_of(
    model: CutModel, precision: Precision, after_round: AfterRound, loss: StepLoss = step_loss
) -> Pass:
    """The pass that the model's plan asks for.

    Args:
        model: this rank's part.
        precision: of forward passes.
        after_round: called after each round's backward pass, where there are rounds, with its
            rows and the step's, both over all ranks.
        loss: of a step.
    """
    plan = model.plan
    if plan.rounds == "BK" or plan.tail is None:
        return WholePass(model, precision, loss)
    return RoundsPass(PartedModel(model, plan.tail), precision, after_round, loss)


class WholePass:
    """All rows of a group at once: scheme (a)."""

    def __init__(self, model: CutModel, precision: Precision, loss: StepLoss) -> None:
        self.model, self.precision, self.loss = model, precision, loss

    @property
    def parts(self) -> tuple[torch.fx.GraphModule, ...]:
        return (self.model.compute,)

    def run(
        self, batch: MicroBatch, step: int, samples: int, before_last: Callable[[], None]
    ) -> tuple[tuple[Tensor, ...], float]:
        self.model.context.set(batch.rows, first_row=batch.first_row, step=step)
        with self.precision():
            outputs = self.model(batch.images)
        loss, reported = self.loss(self.model, outputs, batch.labels, samples)
        before_last()
        loss.backward()
        return tuple(output.detach() for output in outputs), reported


class RoundsPass:
    """The head once, the tail in rounds: schemes (b) and (c).

    Weight gradients of the tail add up over the rounds, since every round's loss is divided by
    the step's samples. At any time one round's activations of the tail are alive.

    Args:
        parted: the model.
        precision: of forward passes.
        after_round: called after each round's backward pass.
        loss: of a step.
    """

    def __init__(
        self,
        parted: PartedModel,
        precision: Precision,
        after_round: AfterRound,
        loss: StepLoss = step_loss,
    ) -> None:
        self.parted, self.model, self.precision = parted, parted.model, precision
        self.after_round, self.loss = after_round, loss

    @property
    def parts(self) -> tuple[torch.fx.GraphModule, ...]:
        return self.parted.compute_head, self.parted.compute_tail

    def run(
        self, batch: MicroBatch, step: int, samples: int, before_last: Callable[[], None]
    ) -> tuple[tuple[Tensor, ...], float]:
        context, plan = self.model.context, self.model.plan
        context.set(batch.rows, first_row=batch.first_row, step=step)
        with self.precision():
            boundary = self.parted.compute_head(batch.images)
        gradient = torch.empty_like(boundary) if self.parted.learns else None
        every = list(
            rounds_of(
                plan.rounds, batch.rows, batch.first_row, self.parted.tail.group_size, context.rank
            )
        )
        parts = [self.parted.part(boundary, brought, context) for brought in every]
        self.parted.start(parts[0], every[0])
        given: list[tuple[Tensor, ...]] = []
        total = 0.0
        for index, brought in enumerate(every):
            if not brought.last:
                self.parted.start(parts[index + 1], every[index + 1])
            context.set(brought.rows, step=step, starts=brought.starts)
            outputs, reported = self._round(
                parts[index], gradient, brought, batch.labels, samples, before_last
            )
            given.append(outputs)
            total += reported
            self.after_round(sum(brought.rows), samples)
        context.set(batch.rows, first_row=batch.first_row, step=step)
        if gradient is not None:
            boundary.backward(gradient)
        return self._joined(given, every), total

    def _round(
        self,
        own: Tensor,
        gradient: Tensor | None,
        brought: Round,
        labels: Tensor,
        samples: int,
        before_last: Callable[[], None],
    ) -> tuple[tuple[Tensor, ...], float]:
        """One round; what it keeps for its backward is gone when it returns."""
        with self.precision():
            outputs = self.parted.compute_tail(own)
        rows = brought.rows[self.model.context.rank]
        loss, reported = self.loss(
            self.model, outputs, labels.narrow(0, brought.begin, rows), samples
        )
        if brought.last:
            before_last()
        loss.backward()
        if gradient is not None:
            assert own.grad is not None
            c = self.parted.per_sample
            gradient.narrow(0, brought.begin * c, rows * c).copy_(own.grad)
            own.grad = None
        return tuple(output.detach() for output in outputs), reported

    def _joined(self, given: list[tuple[Tensor, ...]], every: list[Round]) -> tuple[Tensor, ...]:
        """The outputs as one pass would have given them."""
        graph, flow = self.model.plan.graph, self.model.plan.flow
        found = []
        for index, name in enumerate(graph.outputs):
            ranks = shard_group(self.model.context.rank, flow.returned(name).group_size)
            parts = [outputs[index] for outputs in given]
            found.append(joined(parts, every, range(ranks[0], ranks[-1] + 1), graph[name].rows))
        return tuple(found)
