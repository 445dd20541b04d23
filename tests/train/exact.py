"""Steps of a split net on ranks, held against one process: every value, to rounding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from tests.layers import nets
from tests.train.runs import stepper_of
from workbench.comm.groups.world import World
from workbench.layers.cut_model import RankGroups, group_specs
from workbench.layers.local.context import BatchContext
from workbench.plan.experiment.experiment import SGD, Experiment, Synchronous, Synthetic
from workbench.plan.placement.placement import Shard
from workbench.plan.plans.plan import Plan
from workbench.train.data.feed import MicroBatch
from workbench.train.step.loss import own_rows
from workbench.train.verify.whole_model import place_draws

OPTIMIZER = SGD(lr=0.1, momentum=0.9)


@dataclass(frozen=True, repr=False)
class Case:
    """A net under a plan, and the rows of each rank in each step."""

    net: type[nn.Module]
    plan: Plan
    steps: tuple[tuple[int, ...], ...]

    def __repr__(self) -> str:
        chosen = {name: tuple(vars(choice).values()) for name, choice in self.plan.layers.items()}
        return f"{self.net.__name__}, rows {self.steps}, rounds {self.plan.rounds}, {chosen}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # hypothesis would write out the graph


@dataclass(frozen=True)
class Step:
    """What one rank, or one process, computes in a step: of its rows, of its pieces."""

    outputs: Tensor
    loss: float
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Found:
    """What the steps were, what weights and buffers became of them, and the traffic."""

    steps: tuple[Step, ...]
    values: dict[str, Tensor]
    traffic: tuple[tuple[object, ...], ...] = ()


def check(run: Callable[..., list[Any]], cases: Sequence[Case]) -> list[list[Found]]:
    """Holds every rank's part of every case against the whole; [[of rank 0, ...] of a case]."""
    per_rank = run(cases[0].plan.world_size, split, cases)
    per_case = [list(found) for found in zip(*per_rank, strict=True)]
    for case, ranks in zip(cases, per_case, strict=True):
        expected = whole(case)
        for index, rows in enumerate(case.steps):
            _check_step(case, rows, expected.steps[index], [r.steps[index] for r in ranks])
        for rank, found in enumerate(ranks):
            _check_pieces(case, rank, found.values, expected.values)
    return per_case


def _check_step(case: Case, rows: tuple[int, ...], expected: Step, ranks: list[Step]) -> None:
    assert sum(step.loss for step in ranks) == pytest.approx(expected.loss, rel=1e-12), case
    for rank, step in enumerate(ranks):
        mine = expected.outputs.narrow(0, *Shard(0, rows).span(rank))
        _check_equal(case, "outputs", step.outputs, mine)
        _check_pieces(case, rank, step.gradients, expected.gradients)


def _check_pieces(
    case: Case, rank: int, found: dict[str, Tensor], expected: dict[str, Tensor]
) -> None:
    assert found.keys() == expected.keys()
    for name, got in found.items():
        _check_equal(case, name, got, nets.piece_of(case.plan, name, expected[name], rank))


def _check_equal(case: Case, name: str, found: Tensor, expected: Tensor) -> None:
    assert_close(found, expected, rtol=1e-10, atol=1e-12, msg=lambda m: f"{case}, {name}: {m}")


def whole(case: Case) -> Found:
    """The steps of one process, with the masks of a split model."""
    model = nets.made(case.net)
    context = BatchContext(0, (0,), seed=nets.SEED)
    place_draws(model, case.plan.graph, context)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(parameters.values(), lr=OPTIMIZER.lr, momentum=OPTIMIZER.momentum)
    steps = []
    for index, rows in enumerate(case.steps):
        context.set((sum(rows),), step=index)
        images, labels = nets.batch(case.net, sum(rows), index)
        optimizer.zero_grad()
        outputs = model(images)
        loss = F.cross_entropy(outputs, labels)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        steps.append(Step(outputs.detach(), loss.item(), gradients))
        optimizer.step()
    values = {name: p.detach() for name, p in parameters.items()}
    return Found(tuple(steps), values | dict(model.named_buffers()))


def split(world: World, cases: Sequence[Case]) -> list[Found]:
    """All cases on this rank, one after the other in the same groups."""
    specs = dict.fromkeys(spec for case in cases for spec in group_specs(case.plan))
    groups = world.groups(list(specs))
    return [_split(world, groups, case) for case in cases]


def _split(world: World, groups: RankGroups, case: Case) -> Found:
    world.recorder.reset()
    model = nets.cut_net(world, case.plan, case.net, (0,) * world.size, groups)
    parameters, sync = model.trainable(), Synchronous(bucket_bytes=600)
    run = Experiment(
        plan=case.plan,
        optimizer=OPTIMIZER,
        steps=1,
        batch_size=64 * world.size,
        data=Synthetic(samples=64 * world.size, classes=5),
        sync=sync,
        precision="fp64",
    )
    stepper = stepper_of(world, model, run)
    steps = []
    for index, rows in enumerate(case.steps):
        images, labels = nets.batch(case.net, sum(rows), index)
        span = Shard(0, rows).span(world.rank)
        batch = MicroBatch(rows, 0, (images.narrow(0, *span),), labels.narrow(0, *span))
        result = stepper.run(index, (batch,))
        with torch.no_grad():
            mine = own_rows(model, case.plan.graph.outputs[0], result.outputs[0])
        gradients = {  # an empty piece may have none
            name: p.grad.clone() if p.numel() else p.detach() for name, p in parameters.items()
        }
        steps.append(Step(mine, result.loss, gradients))
        stepper.update()
    traffic = tuple((r.op, r.layer, r.phase, r.messages, r.bytes) for r in world.recorder.rows())
    return Found(tuple(steps), {n: piece.detach() for n, piece in model.pieces().items()}, traffic)
