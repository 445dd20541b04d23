"""What a rank computes in a step, as its program lists it: forward passes, losses, backward passes.

Autograd runs a backward pass as a whole, and a part of the model runs forward in one call: those
instructions of a pass that follow each other are one action. With rounds (schemes b and c) the
head runs once in a micro-batch and the tail once in each round. Weight gradients of the tail add
up over the rounds, since every round's loss is divided by the step's samples; at any time one
round's activations of the tail are alive.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.utils._pytree import tree_map

from workbench.layers.cut_model import CutModel
from workbench.layers.rounds import PartedModel, TailRound, joined, rounds_of
from workbench.plan.placement.placement import shard_group
from workbench.program.instructions import Load, Loss, Pass
from workbench.program.step import Program
from workbench.train.data.feed import first_rows
from workbench.train.step.gradients import LossScaling
from workbench.train.step.loss import CrossEntropyLoss, OwnLoss, StepLoss, step_loss
from workbench.train.step.state import StepFunction, StepState

Precision = Callable[[], AbstractContextManager[object]]


class Passes:
    """The parts of a model that passes run through."""

    def __init__(
        self,
        model: CutModel,
        precision: Precision,
        loss: StepLoss = step_loss,
        scaling: LossScaling | None = None,
    ) -> None:
        self.model, self.precision, self.loss, self.scaling = model, precision, loss, scaling
        plan = model.plan
        parted = plan.rounds != "BK" and plan.tail is not None
        self.parted = PartedModel(model, plan.tail) if parted and plan.tail else None

    def weigh(self, run: StepState) -> None:
        """Adds up the weights of all rows of the step."""
        assert isinstance(self.loss, OwnLoss | CrossEntropyLoss)
        run.weight = self.loss.total(run.batches, self.model.context.rank)

    def compute_loss(self, run: StepState, targets: Any) -> float:
        """Sets what the next backward pass begins with.

        Returns:
            The part of the loss to report, which is not scaled.
        """
        objective, reported = self.loss(self.model, run.returned, targets, run.total)
        run.objective = objective if self.scaling is None else self.scaling.scaled(objective)
        return reported

    @property
    def parts(self) -> tuple[torch.fx.GraphModule, ...]:
        """The parts in the order in which they are executed; the last gives the model's outputs."""
        if self.parted is None:
            return (self.model.compute,)
        return self.parted.compute_head, self.parted.compute_tail

    def listed(self, program: Program) -> "WholePass | RoundsPass":
        if self.parted is None:
            return WholePass(self)
        load = program.instructions[0]
        assert isinstance(load, Load)
        batches = [tuple(rows.own.tolist()) for rows in load.micro_batches]
        losses = [one.on for one in program.instructions if isinstance(one, Loss)]
        rank, firsts = self.model.context.rank, first_rows(batches)
        rounds = []
        for index, first_row in enumerate(firsts):
            every = [tuple(on.rows.own.tolist()) for on in losses if on.micro_batch == index]
            rounds.append(list(rounds_of(every, first_row, rank)))
        return RoundsPass(self, self.parted, rounds)


class WholePass:
    """All rows of a group at once: scheme (a)."""

    def __init__(self, passes: Passes) -> None:
        self._passes, self._model = passes, passes.model

    def begin(self, micro_batch: int) -> StepFunction | None:
        """What comes before the instructions of a micro-batch."""
        return None

    def prefetch(self, on: Pass) -> StepFunction | None:
        """Begins to gather the rows of a round to come."""
        return None

    def forward(self, on: Pass) -> StepFunction | None:
        index, model, precision = on.micro_batch, self._model, self._passes.precision

        def forward(run: StepState) -> None:
            batch = run.batches[index]
            model.context.set(batch.rows, first_row=batch.first_row, step=run.step)
            with precision():
                run.returned = model(*batch.inputs)

        return forward

    def loss(self, on: Pass) -> StepFunction:
        index, compute_loss = on.micro_batch, self._passes.compute_loss

        def loss(run: StepState) -> None:
            run.reported = compute_loss(run, run.batches[index].targets)

        return loss

    def backward(self, on: Pass) -> StepFunction:
        def backward(run: StepState) -> None:
            assert run.objective is not None
            run.objective.backward()

        return backward

    def end(self, micro_batch: int) -> StepFunction:
        """What comes behind the instructions of a micro-batch."""

        def end(run: StepState) -> None:
            run.outputs = run.take()
            run.loss, run.reported = run.loss + run.reported, 0.0

        return end


class RoundsPass:
    """The head once, the tail in rounds: schemes (b) and (c)."""

    def __init__(
        self, passes: Passes, parted: PartedModel, rounds: Sequence[Sequence[TailRound]]
    ) -> None:
        self._passes, self._model = passes, passes.model
        self._parted, self._rounds = parted, rounds

    def begin(self, micro_batch: int) -> StepFunction | None:
        """The head: it gives the boundary also where it has no instructions."""
        parted, rounds = self._parted, self._rounds[micro_batch]
        context, precision = self._model.context, self._passes.precision

        def begin(run: StepState) -> None:
            batch = run.batches[micro_batch]
            context.set(batch.rows, first_row=batch.first_row, step=run.step)
            with precision():
                boundary = run.boundary = parted.compute_head(*batch.inputs)
            run.gradient = torch.empty_like(boundary) if parted.learns else None
            run.parts = [parted.part(boundary, brought, context) for brought in rounds]
            run.rounds = []

        return begin

    def prefetch(self, on: Pass) -> StepFunction | None:
        parted, (number, brought) = self._parted, self._round(on)
        return lambda run: parted.start(run.parts[number], brought)

    def forward(self, on: Pass) -> StepFunction | None:
        if on.round is None:
            return None  # it has begun the micro-batch
        parted, (number, brought) = self._parted, self._round(on)
        context, precision = self._model.context, self._passes.precision

        def forward(run: StepState) -> None:
            context.set(brought.rows, step=run.step, starts=brought.starts)
            with precision():
                run.returned = parted.compute_tail(run.parts[number])

        return forward

    def loss(self, on: Pass) -> StepFunction:
        index, (_, brought) = on.micro_batch, self._round(on)
        compute_loss, rows = self._passes.compute_loss, brought.rows[self._model.context.rank]

        def loss(run: StepState) -> None:
            every = run.batches[index].targets
            targets = tree_map(lambda each: each.narrow(0, brought.begin, rows), every)
            run.reported += compute_loss(run, targets)

        return loss

    def backward(self, on: Pass) -> StepFunction:
        if on.round is None:
            return self._backward_of_head(on.micro_batch)
        number, brought = self._round(on)
        each = self._parted.per_sample
        begin, rows = brought.begin * each, brought.rows[self._model.context.rank] * each

        def backward(run: StepState) -> None:
            assert run.objective is not None
            run.objective.backward()
            own = run.parts[number]
            if run.gradient is not None:
                assert own.grad is not None
                run.gradient.narrow(0, begin, rows).copy_(own.grad)
                own.grad = None
            run.rounds.append(run.take())

        return backward

    def end(self, micro_batch: int) -> StepFunction:
        rounds, context = self._rounds[micro_batch], self._model.context

        def end(run: StepState) -> None:
            batch = run.batches[micro_batch]
            context.set(batch.rows, first_row=batch.first_row, step=run.step)
            run.outputs = self._joined(run.rounds, rounds)
            run.boundary = run.gradient = None
            run.parts, run.rounds = [], []
            run.loss, run.reported = run.loss + run.reported, 0.0

        return end

    def _backward_of_head(self, micro_batch: int) -> StepFunction:
        context = self._model.context

        def backward(run: StepState) -> None:
            assert run.boundary is not None
            batch = run.batches[micro_batch]
            context.set(batch.rows, first_row=batch.first_row, step=run.step)
            run.boundary.backward(run.gradient)

        return backward

    def _round(self, on: Pass) -> tuple[int, TailRound]:
        number = on.round or 0
        return number, self._rounds[on.micro_batch][number]

    def _joined(
        self, given: Sequence[tuple[Tensor, ...]], every: Sequence[TailRound]
    ) -> tuple[Tensor, ...]:
        graph, flow = self._model.plan.graph, self._model.plan.flow
        found = []
        for index, name in enumerate(graph.outputs):
            ranks = shard_group(self._model.context.rank, flow.returned(name).group_size)
            parts = [outputs[index] for outputs in given]
            group = range(ranks[0], ranks[-1] + 1)
            found.append(joined(parts, list(every), group, graph[name].rows))
        return tuple(found)
