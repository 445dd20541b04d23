"""What a rank calls in a step is what the program lists for it, in this order."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.layers import nets
from tests.layers.drawn import GRAPHS, plans
from tests.train.runs import started
from workbench.comm.groups.world import World
from workbench.comm.messages.recorder import Doing, RecordedCall
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.experiment import (
    SGD,
    AdamW,
    Experiment,
    LocalSGD,
    Loss,
    ParameterServer,
    Pipelined,
    Synchronous,
    Synthetic,
)
from workbench.plan.plans.plan import Plan
from workbench.program.step import program_of
from workbench.train.run.loop import agree

RANKS, STEPS = 4, 3
SMALL = 600  # bytes of a bucket, of which there are then several


class Heard:
    """A listener that notes which collective begins."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str, str]] = []

    def begun(self, call: RecordedCall) -> None:
        self.calls.append((call.key.group, call.key.op, call.key.layer, call.key.phase))

    def received(self, call: RecordedCall, num_bytes: int) -> None:
        """Of no interest."""

    def entered(self, call: RecordedCall, doing: Doing) -> None:
        """Of no interest."""

    def left(self, call: RecordedCall, doing: Doing) -> None:
        """Of no interest."""


def called(world: World, experiment: Experiment, weights: Path) -> list[tuple[str, ...]]:
    """(group, op, layer, phase) of each collective that this rank begins in the last step."""
    state = started(world, experiment, weights)
    heard = Heard()
    for step in range(STEPS):
        world.recorder.listener = heard if step == STEPS - 1 else None
        result = state.stepper.run(step)
        agree(state.everyone, result.loss, False, result.blocked_s)
        state.stepper.update()
    world.recorder.listener = None
    state.strategy.rest()
    return heard.calls


def listed(experiment: Experiment, rank: int, ranks_per_host: int | None) -> list[tuple[str, ...]]:
    """The same by the program."""
    found = []
    for call in program_of(experiment, ranks_per_host).of(rank).calls():
        members = next(group for group in call.groups(RANKS) if rank in group)
        group = f"{call.purpose}({','.join(map(str, members))})"
        found.append((group, call.op, call.label, call.phase))
    return found


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    found = {}
    for net in nets.NETS:
        torch.manual_seed(0)
        graph = GRAPHS[net]
        found[net] = initialize(graph, 0, folder / graph.fingerprint, module=net())
    return found


STRATEGIES = {
    "synchronous": dict(sync=Synchronous(bucket_bytes=SMALL)),
    "direct": dict(sync=Synchronous(bucket_bytes=SMALL, algorithm="direct")),
    "ring": dict(sync=Synchronous(bucket_bytes=SMALL, algorithm="ring")),
    "halving-doubling": dict(sync=Synchronous(bucket_bytes=SMALL, algorithm="halving_doubling")),
    "hierarchical": dict(sync=Synchronous(bucket_bytes=SMALL, algorithm="hierarchical")),
    "codec": dict(sync=Synchronous(bucket_bytes=SMALL, codec="int8")),
    "updates of parts": dict(sync=Synchronous(bucket_bytes=SMALL), shard_optimizer=True),
    "fused": dict(
        sync=Synchronous(bucket_bytes=SMALL, algorithm="direct"), shard_optimizer=(1, 0, 2, 1)
    ),
    "pipelined, 2": dict(sync=Pipelined(width=2)),
    "pipelined, 3, parts": dict(sync=Pipelined(width=3), shard_optimizer=True),
    "compensated": dict(sync=Pipelined(width=2, compensation="delay")),
    "local SGD": dict(sync=LocalSGD(every=3, bucket_bytes=SMALL)),
    "local SGD, momentum": dict(
        sync=LocalSGD(every=1, bucket_bytes=SMALL, momentum="average"), optimizer=AdamW()
    ),
    "parameter server": dict(sync=ParameterServer(server=1, bucket_bytes=SMALL)),
    "clipped": dict(clip_norm=0.1),
    "clipped, late": dict(sync=Pipelined(width=2, compensation="delay"), clip_norm=0.1),
    "clipped by value": dict(clip_value=0.1),
}
IN_ROUNDS = Synchronous(bucket_bytes=SMALL, per_round=True)
PLANS = {
    "data parallel": (nets.Images, lambda graph: Plan.data_parallel(graph, RANKS), {}),
    "batch norm": (
        nets.Images,
        lambda graph: Plan.hybrid(graph, RANKS, 2).with_batch_norm("synchronized"),
        {},
    ),
    "in groups of 4": (nets.Images, lambda graph: Plan.hybrid(graph, RANKS, 4), {}),
    "recomputed": (nets.Images, lambda g: Plan.hybrid(g, RANKS, 2).with_recompute("*"), {}),
    "micro-batches": (nets.Images, lambda g: Plan.hybrid(g, RANKS, 2), dict(accumulate=3)),
    "residual": (nets.Residual, lambda graph: Plan.hybrid(graph, RANKS, 2), {}),
    "attention": (nets.Attending, lambda graph: Plan.hybrid(graph, RANKS, 2), {}),
    "a vocabulary in groups": (
        nets.Words,
        lambda g: Plan.hybrid(g, RANKS, 2).with_layer("table", scheme="shard_in", group_size=4),
        {},
    ),
    "rounds B": (nets.Picture, lambda g: Plan.hybrid(g, RANKS, 2, rounds="B"), {}),
    "rounds B/K": (
        nets.Picture,
        lambda g: Plan.hybrid(g, RANKS, 2, rounds="B/K"),
        dict(accumulate=2),
    ),
    "recomputed in rounds": (
        nets.Picture,
        lambda g: Plan.hybrid(g, RANKS, 4, rounds="B/K").with_recompute("*"),
        {},
    ),
    "own loss, cut": (
        nets.Images,
        lambda g: Plan.hybrid(g, RANKS, 2).with_layer(
            g.outputs[0], scheme="shard_out", group_size=4
        ),
        dict(loss=F.cross_entropy),
    ),
    "own loss, weighted": (
        nets.Images,
        lambda g: Plan.hybrid(g, RANKS, 2),
        dict(
            loss=Loss(nn.CrossEntropyLoss(reduction="none"), weights=torch.ones_like), accumulate=2
        ),
    ),
    "own loss, of a group's rows": (
        nets.Picture,
        lambda g: Plan.hybrid(g, RANKS, 2, rounds="B").with_layer(
            g.outputs[0], scheme="duplicate", group_size=2
        ),
        dict(loss=F.cross_entropy),
    ),
    "a step each round": (
        nets.Picture,
        lambda g: Plan.hybrid(g, RANKS, 2, rounds="B"),
        dict(sync=IN_ROUNDS),
    ),
    "a step of parts each round": (
        nets.Picture,
        lambda g: Plan.hybrid(g, RANKS, 2, rounds="B/K"),
        dict(sync=IN_ROUNDS, shard_optimizer=True),
    ),
}


def check(on_ranks, weights, net, plan, fields, hosts="aaaa"):
    given = dict(data=Synthetic(samples=64, classes=5), optimizer=SGD(lr=0.1, momentum=0.9))
    run = Experiment(
        plan=plan(GRAPHS[net]),
        batch_size=16,
        steps=STEPS,
        **given | dict(sync=Synchronous(bucket_bytes=SMALL)) | fields,
    )
    answers = on_ranks(RANKS, called, run, weights[net], hosts=hosts)
    for rank, found in enumerate(answers):
        assert found == listed(run, rank, hosts.count("a"))


@st.composite
def cases(draw):
    """Any net under any schemes, group sizes and shares, and any strategy."""
    net = draw(st.sampled_from(nets.NETS))
    plan, _ = draw(plans(net, world=RANKS))
    seeing = [layer.name for layer in plan.graph.layers if layer.rows]
    plan = plan.with_recompute(*draw(st.lists(st.sampled_from(seeing), max_size=3)))
    fields = draw(st.sampled_from(list(STRATEGIES.values())))
    return net, plan, fields | dict(accumulate=draw(st.integers(1, 2)))


@pytest.mark.slow
@settings(
    max_examples=25,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=cases())
def test_any_plan_under_any_strategy(on_ranks, weights, case):
    net, plan, fields = case
    check(on_ranks, weights, net, lambda _: plan, fields)


@pytest.mark.parametrize("fields", STRATEGIES.values(), ids=STRATEGIES.keys())
def test_every_strategy(on_ranks, weights, fields):
    check(on_ranks, weights, nets.Images, lambda graph: Plan.hybrid(graph, RANKS, 2), fields)


@pytest.mark.parametrize(("net", "plan", "fields"), PLANS.values(), ids=PLANS.keys())
def test_every_kind_of_plan(on_ranks, weights, net, plan, fields):
    check(on_ranks, weights, net, plan, fields)


@pytest.mark.parametrize("hosts", ["abcd", "aabb"])
def test_rounds_are_gathered_ahead_over_hosts(on_ranks, weights, hosts):
    plan = PLANS["rounds B/K"][1]
    check(on_ranks, weights, nets.Picture, plan, {}, hosts)
