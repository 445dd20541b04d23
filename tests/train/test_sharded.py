"""Optimizers whose state is cut over replicas: the same bits, a part of the memory."""

from pathlib import Path

import pytest

from tests.train import small
from tests.train.runs import same, trained
from tests.train.test_local_sgd import GRAPH as TAILED
from tests.train.test_local_sgd import net as tailed
from tests.train.test_local_sgd import plan as tailed_plan
from tests.train.test_session import GRAPH, session
from workbench.model.weights import initialize
from workbench.plan.errors import ExperimentError
from workbench.plan.experiment import SGD, Adam, AdamW, Experiment, LocalSGD, Synchronous, Synthetic
from workbench.plan.plan import Plan
from workbench.train import checkpoint

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
def ended(on_ranks, weights, tmp_path):
    """The logical tensors of a run's last checkpoint, and where it is."""

    def ended(plan, *, resume=None, stop_after=None, **fields):
        run = Experiment(plan=plan, optimizer=AdamW(lr=0.01), **{**FIELDS, **fields})
        directory = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        args = (run, weights["small"], directory, resume, stop_after)
        outcome = on_ranks.seated(plan.world_size, session, *args)[0][1]
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
def test_any_plan_goes_on_from_what_was_saved_in_parts(ended):
    _, path = ended(PLANS["unequal"], shard_optimizer=True, stop_after=1, precision="fp64")
    found, _ = ended(PLANS["hybrid-2x2"], shard_optimizer=True, resume=path, precision="fp64")
    expected, _ = ended(PLANS["hybrid-2x2"], resume=path, precision="fp64")
    same(found, expected)


def test_replicas_that_differ_cannot_share_a_state():
    with pytest.raises(ExperimentError, match=r"under LocalSGD each has its own; .*Synchronous"):
        Experiment(
            plan=PLANS["unequal"],
            optimizer=NESTEROV,
            sync=LocalSGD(),
            shard_optimizer=True,
            steps=1,
        )


def test_survives_its_text():
    run = Experiment(plan=PLANS["unequal"], optimizer=NESTEROV, shard_optimizer=True, steps=1)
    assert Experiment.from_toml(run.to_toml()) == run
    assert "sgd lr=0.05, sharded over replicas, fp32" in repr(run)
