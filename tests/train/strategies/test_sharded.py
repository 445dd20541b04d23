"""Optimizers whose state is cut over replicas: the same bits, a part of the memory."""

from pathlib import Path

import pytest

from tests.train import small
from tests.train.runs import same, trained
from tests.train.small import GRAPH
from tests.train.strategies.test_local_sgd import GRAPH as TAILED
from tests.train.strategies.test_local_sgd import net as tailed
from tests.train.strategies.test_local_sgd import plan as tailed_plan
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.experiment import (
    SGD,
    Adam,
    AdamW,
    Experiment,
    LocalSGD,
    Pipelined,
    Synchronous,
    Synthetic,
)
from workbench.plan.io.errors import ExperimentError
from workbench.plan.plans.plan import Plan
from workbench.train.checkpoint import checkpoint

NESTEROV = SGD(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)
FIELDS = dict(data=Synthetic(samples=50), batch_size=20, steps=4, checkpoint_every=2)
PLANS = {
    "data-parallel-3": Plan.data_parallel(GRAPH, 3).with_batch_norm("synchronized"),
    "hybrid-2x2": Plan.hybrid(GRAPH, 4, 2).with_batch_norm("synchronized"),
    "unequal": Plan.hybrid(GRAPH, 3, 3)
    .with_layer("5", shares=(3, 0, 1))
    .with_batch_norm("synchronized"),
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    nets = {"small": (GRAPH, small.net()), "tailed": (TAILED, tailed())}
    return {
        name: initialize(graph, 0, folder / name, module=module)
        for name, (graph, module) in nets.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("value", [NESTEROV, AdamW(lr=0.01)], ids=["nesterov", "adamw"])
def test_weights_and_state_are_the_same_bit_by_bit(on_either, weights, name, value):
    plan = PLANS[name]
    sync = Synchronous(bucket_bytes=3000)
    run = Experiment(plan=plan, optimizer=value, sync=sync, accumulate=2, **FIELDS)
    whole = on_either(plan.world_size, trained, run, weights["small"])
    parts = run.replace(shard_optimizer=True)
    for mine, expected in zip(
        on_either(plan.world_size, trained, parts, weights["small"]), whole, strict=True
    ):
        same(mine[0], expected[0])


FUSED = {
    "nesterov": dict(plan=PLANS["data-parallel-3"], optimizer=NESTEROV, accumulate=2),
    "adamw-2x2": dict(plan=PLANS["hybrid-2x2"], optimizer=AdamW(lr=0.01), precision="fp64"),
    "shares": dict(plan=PLANS["unequal"], optimizer=AdamW(lr=0.01), shard_optimizer=(0, 2, 1)),
    "shares-2x2": dict(
        plan=PLANS["hybrid-2x2"],
        optimizer=Adam(lr=0.01, weight_decay=0.1),
        shard_optimizer=(1, 0, 0, 3),
        precision="bf16",
    ),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_into_the_all_reduce_they_are_the_same_as_well(on_either, weights, name):
    """Under shares of 0 a rank of a pair moves nothing of what both hold."""
    sync = Synchronous(algorithm="direct", bucket_bytes=3000)
    parts = Experiment(sync=sync, **FIELDS | dict(shard_optimizer=True) | FUSED[name])
    assert parts.fused
    world = parts.plan.world_size
    whole = on_either(world, trained, parts.replace(shard_optimizer=False), weights["small"])
    fused = on_either(world, trained, parts, weights["small"])
    for mine, expected in zip(fused, whole, strict=True):
        same(mine[0], expected[0])
    ops = [{row[0] for row in traffic if row[1] == "gradients"} for _, _, traffic in fused]
    assert ops == [{"reduce_scatter"}] * world


@pytest.mark.slow
def test_two_synchronisations_with_the_update_in_between(on_either, weights):
    """2 (k - 1) messages and (k - 1) s additions a step, for s of 2,066 elements moved."""
    plan = PLANS["data-parallel-3"].with_batch_norm("local")
    sync = Synchronous(algorithm="direct")
    run = Experiment(plan=plan, optimizer=AdamW(), sync=sync, shard_optimizer=(1, 0, 1), **FIELDS)
    for rank, rows in enumerate(on_either(3, synchronisations, run, weights["small"])):
        there, back = rows
        own = [350 + 704, 0, 832 + 180][rank]
        assert (there.rounds, back.rounds) == (run.steps, run.steps)
        assert there.messages == run.steps * 2 * (own > 0)
        assert back.messages == run.steps * (2 - (own > 0))
        assert there.additions == run.steps * 2 * own
        assert (there.bytes, back.bytes) == (4 * run.steps * 2 * own, 4 * run.steps * (2066 - own))


def synchronisations(world, run, weights):
    trained(world, run, weights)
    layers = ("gradients", "parameters")
    return [row for row in world.recorder.rows() if row.layer in layers]


@pytest.mark.slow
@pytest.mark.parametrize("per_round", [False, True])
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_tails_that_step_by_themselves(on_ranks, weights, per_round, precision):
    run = Experiment(
        plan=tailed_plan(4, 2, "B/K"),
        optimizer=Adam(lr=0.01, weight_decay=0.1),
        sync=Synchronous(per_round=per_round),
        precision=precision,
        **FIELDS,
    )
    whole = on_ranks(4, trained, run, weights["tailed"])
    parts = on_ranks(4, trained, run.replace(shard_optimizer=True), weights["tailed"])
    for mine, expected in zip(parts, whole, strict=True):
        same(mine[0], expected[0])


def test_memory_and_traffic(on_either, weights):
    """By hand, in fp32: one bucket of 2,066 parameters, last layer first.

    The largest weight has elements 350 to 1886 of it. Thirds end at 688 and 1377, which is 338
    and 1027 into that weight, and of the multiples of 64 there 320 and 1024 are nearest.
    """
    plan = PLANS["data-parallel-3"]
    run = Experiment(plan=plan, optimizer=AdamW(), shard_optimizer=True, **FIELDS)
    answers = on_either(3, trained, run, weights["small"])
    lengths = [p.numel() for p in reversed(list(small.net().parameters()))]
    own = [350 + 320, 1024 - 320, 1886 - 1374 + 180]
    counts = [6, 1, 5]  # parameters that each rank has a part of, and a number of steps for
    assert lengths == [10, 120, 12, 192, 16, 1536, 6, 6, 6, 162]
    for rank, (_, held, traffic) in enumerate(answers):
        assert held == 4 * (2 * own[rank] + counts[rank])
        gathered = [row[2:] for row in traffic if row[:2] == ("all_gather", "parameters")]
        assert gathered == [(2 * run.steps, 4 * run.steps * (2066 - own[rank]))]


@pytest.fixture
def ended(whole_run, weights):
    """The logical tensors of a run's last checkpoint, and where it is."""

    def ended(plan, *, resume=None, stop_after=None, **fields):
        run = Experiment(plan=plan, optimizer=AdamW(lr=0.01), **{**FIELDS, **fields})
        _, _, (outcome, *_) = whole_run(run, weights["small"], resume, stop_after)
        path = Path(outcome.checkpoint)
        reader = checkpoint.load(path, GRAPH).reader
        return {name: reader.read(name) for name in reader.names}, path

    return ended


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_a_run_goes_on_bitwise_with_and_without(ended, name):
    """Stopped after step 2 of 4; what is saved says nothing of how it was held."""
    plan = PLANS[name]
    straight, _ = ended(plan)
    half, path = ended(plan, shard_optimizer=True, stop_after=1)
    _, other = ended(plan, stop_after=1)
    same(half, ended(plan, stop_after=1)[0])
    for at, sharded in [(path, True), (path, False), (other, True)]:
        same(ended(plan, shard_optimizer=sharded, resume=at)[0], straight)


@pytest.mark.slow
def test_a_fused_run_goes_on_bitwise_with_and_without(ended):
    """What one rank moved half-way may be another's to move from then on."""
    plan, direct = PLANS["hybrid-2x2"], dict(sync=Synchronous(algorithm="direct"))
    straight, _ = ended(plan, **direct)
    _, path = ended(plan, shard_optimizer=(1, 0, 0, 3), stop_after=1, **direct)
    for shares in [(0, 1, 1, 1), False]:
        same(ended(plan, shard_optimizer=shares, resume=path, **direct)[0], straight)


@pytest.mark.slow
def test_any_plan_goes_on_from_what_was_saved_in_parts(ended):
    _, path = ended(PLANS["unequal"], shard_optimizer=True, stop_after=1, precision="fp64")
    found, _ = ended(PLANS["hybrid-2x2"], shard_optimizer=True, resume=path, precision="fp64")
    expected, _ = ended(PLANS["hybrid-2x2"], resume=path, precision="fp64")
    same(found, expected)


def test_replicas_that_differ_cannot_share_a_state():
    with pytest.raises(ExperimentError, match=r"under LocalSGD each has its own; .*Synchronous"):
        Experiment(
            plan=PLANS["unequal"],
            data="digits",
            optimizer=NESTEROV,
            sync=LocalSGD(),
            shard_optimizer=True,
            steps=1,
        )


@pytest.mark.parametrize(
    ("name", "shares", "said"),
    [
        ("unequal", (1, 2), r"must be 3 numbers >= 0, one for each rank, got \(1.0, 2.0\)"),
        ("unequal", (0, 0, 0), r"ranks \[0, 1, 2\] alone hold their part of '0.weight'"),
        ("hybrid-2x2", (1, 0, 1, 0), r"ranks \[1, 3\] alone hold .* one must be larger"),
        ("unequal", (1, 2, -1), "greater than or equal to 0"),
    ],
)
def test_shares_in_which_somebody_moves_every_weight(name, shares, said):
    with pytest.raises(ExperimentError, match=said):
        Experiment(
            plan=PLANS[name], data="digits", optimizer=NESTEROV, shard_optimizer=shares, steps=1
        )


@pytest.mark.parametrize("shares", [True, (1, 0, 2.5)])
def test_survives_its_text(shares):
    run = Experiment(
        plan=PLANS["unequal"], data="digits", optimizer=NESTEROV, shard_optimizer=shares, steps=1
    )
    assert Experiment.from_toml(run.to_toml()) == run
    assert "sgd lr=0.05, sharded over replicas, fp32" in repr(run)
    fused = run.replace(sync=Synchronous(algorithm="direct"))
    assert "sgd lr=0.05, sharded over replicas and fused, fp32" in repr(fused)


@pytest.mark.parametrize(
    "sync",
    [
        Synchronous(),
        Synchronous(algorithm="ring"),
        Synchronous(algorithm="direct", codec="int8"),
        Pipelined(algorithm="direct"),
    ],
)
def test_nothing_else_is_fused(sync):
    plan = PLANS["unequal"]
    run = Experiment(
        plan=plan, data="digits", optimizer=NESTEROV, sync=sync, shard_optimizer=True, steps=1
    )
    assert not run.fused
