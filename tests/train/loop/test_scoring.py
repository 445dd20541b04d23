"""Evaluation of split models, held against plain modules in evaluation mode."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.layers import nets
from tests.ranks import all_ranks
from workbench.comm.groups.world import World
from workbench.layers.cut_model import group_specs
from workbench.layers.local.loss import PLAIN
from workbench.model import trace
from workbench.plan.plans.plan import Plan
from workbench.train.run.scoring import ScoringOfClasses, evaluate


class Branching(nn.Module):
    """Another way in training than in evaluation, between layers that are cut."""

    shape = (6,)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 9), nn.BatchNorm1d(9)
        self.second, self.last = nn.Linear(9, 7), nn.Linear(7, 5)
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training:
            x = torch.cumsum(x, 1)  # reads whole rows
        x = torch.relu(self.norm(x))
        x = F.dropout(x, 0.4, self.training)
        return self.last(torch.relu(self.second(x)))


class AlwaysDropping(Branching):
    """`F.dropout` without `training=` drops in evaluation, too."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(torch.relu(self.second(torch.relu(self.first(x)))), 0.4))


class Samples:
    """17 samples with labels."""

    num_classes = 5

    def __len__(self) -> int:
        return 17

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        images, labels = nets.batch(Branching, len(self))
        return images[indices], labels[indices]


def found(world: World, plan: Plan, net: type[nn.Module]) -> list[dict[str, float]]:
    """Two evaluations, and the mode in which they leave the model."""
    specs = [*group_specs(plan), ("world", tuple(range(world.size)))]
    groups = world.groups(list(dict.fromkeys(specs)))
    model = nets.cut_net(world, plan, net, (0,) * world.size, groups)
    everyone, double = all_ranks(world, "control"), torch.float64
    given = Samples(), 6, everyone, world.device, double, ScoringOfClasses(plan.graph, PLAIN)
    twice = [evaluate(model, *given) for _ in range(2)]
    assert model.training
    return twice


def plans(net: type[nn.Module]) -> list[Plan]:
    graph = trace(net(), input_shape=net.shape)
    cut = Plan.data_parallel(graph, 3, (2, 0, 1))
    cut = cut.with_layer("first", scheme="shard_out", shares=(3, 0, 1))
    return [
        Plan.data_parallel(graph, 1),
        Plan.data_parallel(graph, 3),
        cut,
        cut.with_layer("second", scheme="shard_in"),
    ]


@pytest.mark.slow
def test_the_way_of_evaluation_is_taken(on_ranks):
    module = nets.made(Branching).eval()
    images, labels = Samples().batch(torch.arange(17))
    logits = module(images)
    loss = F.cross_entropy(logits, labels).item()
    accuracy = (logits.argmax(1) == labels).double().mean().item()
    for plan in plans(Branching):
        for first, second in on_ranks(plan.world_size, found, plan, Branching):
            assert first == second
            assert first["loss"] == pytest.approx(loss, rel=1e-12)
            assert first["accuracy"] == accuracy


def test_what_is_drawn_in_evaluation_is_drawn_alike_under_every_plan(on_ranks):
    every = [
        evaluation["loss"]
        for plan in plans(AlwaysDropping)
        for evaluations in on_ranks(plan.world_size, found, plan, AlwaysDropping)
        for evaluation in evaluations
    ]
    assert every == [pytest.approx(every[0], rel=1e-12)] * len(every)
    images, labels = Samples().batch(torch.arange(17))
    off = nets.made(AlwaysDropping)
    off = off.last(torch.relu(off.second(torch.relu(off.first(images)))))
    assert not math.isclose(every[0], F.cross_entropy(off, labels).item(), rel_tol=1e-3)
