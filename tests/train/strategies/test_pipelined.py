"""Pipelined steps: the recurrence bit by bit, whatever is trained, and in whatever pieces."""

import pytest
import torch

from tests.train.recurrence import both, stepwise
from tests.train.runs import same
from tests.train.small import GRAPH
from workbench.plan.experiment.experiment import (
    SGD,
    AdamW,
    Experiment,
    Pipelined,
    Synchronous,
    Synthetic,
)
from workbench.plan.plans.plan import Plan

MOMENTUM = SGD(lr=0.02, momentum=0.9, weight_decay=0.01)
NESTEROV = SGD(lr=0.02, momentum=0.9, nesterov=True)
FIELDS = dict(data=Synthetic(samples=50), batch_size=20, steps=7)
DATA = Plan.data_parallel(GRAPH, 3)
HYBRID = Plan.hybrid(GRAPH, 4, 2).with_batch_norm("synchronized")
UNEQUAL = Plan.hybrid(GRAPH, 3, 3).with_layer("5", shares=(3, 0, 1))


def check(on_ranks, weights, *runs, **options):
    """Every rank's weights after every step are those of the serial recurrence; they and notes."""
    per_rank = on_ranks(runs[0].plan.world_size, both, [*runs], weights, **options)
    for rank in per_rank:
        for run, (trained, serial, _) in zip(runs, rank, strict=True):
            for step, (now, then) in enumerate(zip(trained, serial, strict=True)):
                assert now.keys() == then.keys()
                for name in now:
                    assert torch.equal(now[name], then[name]), (run.sync, step, name)
    return [[(trained, notes) for trained, _, notes in rank] for rank in per_rank]


def alike(found):
    """All ranks have the same parameters after every step (each its own rows' statistics)."""
    for trained, _ in found[1:]:
        for step, now in enumerate(trained):
            for name in parameters(now):
                assert torch.equal(now[name], found[0][0][step][name]), (step, name)


def parameters(values):
    return {n: v for n, v in values.items() if "running" not in n and "tracked" not in n}


@pytest.mark.parametrize(
    ("plan", "value", "fields"),
    [
        pytest.param(DATA, MOMENTUM, {}, id="data"),
        pytest.param(
            HYBRID, AdamW(lr=0.01), dict(accumulate=3), id="hybrid", marks=pytest.mark.slow
        ),
        pytest.param(
            HYBRID.with_rounds("B/K"),
            NESTEROV,
            dict(precision="bf16"),
            id="rounds",
            marks=pytest.mark.slow,
        ),
        pytest.param(UNEQUAL, MOMENTUM, dict(precision="fp64", steps=5), id="unequal"),
    ],
)
def test_steps_are_the_recurrence(on_ranks, weights, plan, value, fields):
    run = Experiment(plan=plan, optimizer=value, **{**FIELDS, **fields})
    runs = [run.replace(sync=Pipelined(width=width)) for width in (1, 2, 3, 4)]
    found = check(on_ranks, weights, *runs)
    for index, mine in enumerate(zip(*found, strict=True)):
        assert [len(notes) for _, notes in mine] == [index] * plan.world_size
        if plan is DATA:
            alike(mine)


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "hosts"), [("auto", "aab"), ("hierarchical", "aabb")])
def test_ranks_are_alike_between_hosts(on_ranks, weights, algorithm, hosts):
    size = len(hosts)
    run = Experiment(
        plan=Plan.data_parallel(GRAPH, size),
        optimizer=MOMENTUM,
        sync=Pipelined(width=3, algorithm=algorithm),
        **FIELDS,
    )
    found = on_ranks(size, both, [run], weights, hosts=hosts)
    alike([(trained, notes) for ((trained, _, notes),) in found])
    (trained, serial, _) = found[0][0]  # sums are taken in another order than serially
    for now, then in zip(trained, serial, strict=True):
        torch.testing.assert_close(parameters(now), parameters(then))


@pytest.mark.slow
def test_messages_between_hosts(on_ranks, weights):
    """What goes on in rounds, which a thread advances, and what gloo does by itself."""
    run = Experiment(plan=DATA, optimizer=MOMENTUM, **FIELDS)
    check(
        on_ranks,
        weights,
        *(run.replace(sync=Pipelined(width=k, algorithm="direct")) for k in (2, 4)),
        shared_memory=False,
    )
    pair = run.replace(plan=Plan.data_parallel(GRAPH, 2))  # of two, every order is the same
    others = ("ring", "backend", "halving_doubling")
    check(
        on_ranks,
        weights,
        *(pair.replace(sync=Pipelined(width=3, algorithm=name)) for name in others),
        shared_memory=False,
    )


def test_the_first_steps_can_be_synchronous(on_ranks, weights):
    sync = Pipelined(width=3, warmup=2, bucket_bytes=1000)
    run = Experiment(plan=DATA, optimizer=MOMENTUM, sync=sync, **FIELDS)
    found = check(on_ranks, weights, run)
    plain = run.replace(sync=Synchronous(bucket_bytes=1000), steps=2)
    expected = on_ranks(3, stepwise, plain, weights)
    for ((mine, notes),), (whole, *_) in zip(found, expected, strict=True):
        for now, then in zip(mine[:2], whole, strict=True):
            same(now, then)
        for skipped in (2, 3):
            same(parameters(mine[skipped]), parameters(mine[1]))
        assert notes == [f"step {t} moved no weights: it filled the pipeline" for t in (2, 3)]


@pytest.mark.slow
def test_delay_can_be_compensated(on_ranks, weights):
    sync = Pipelined(width=3, warmup=1, compensation="delay", compensation_lambda=0.5)
    run = Experiment(plan=HYBRID, optimizer=MOMENTUM, sync=sync, precision="fp64", **FIELDS)
    plain = run.replace(sync=Pipelined(width=3, warmup=1))
    (corrected, _), (late, _) = check(on_ranks, weights, run, plain)[0]
    assert not torch.equal(corrected[-1]["0.weight"], late[-1]["0.weight"])


@pytest.mark.slow
def test_width_one_is_synchronous(on_ranks, weights):
    run = Experiment(plan=DATA, optimizer=MOMENTUM, sync=Pipelined(width=1), **FIELDS)
    plain = run.replace(sync=Synchronous())
    for options in (dict(), dict(shared_memory=False)):
        one = on_ranks(3, stepwise, run, weights, **options)
        other = on_ranks(3, stepwise, plain, weights, **options)
        for (mine, *_), (whole, *_) in zip(one, other, strict=True):
            for now, then in zip(mine, whole, strict=True):
                same(now, then)


def test_the_whole_gradient_travels_at_once(on_ranks, weights):
    run = Experiment(
        plan=HYBRID, optimizer=MOMENTUM, sync=Pipelined(width=2, bucket_bytes=100), **FIELDS
    )
    for _, _, rows in on_ranks(4, stepwise, run, weights):
        calls = [calls for op, layer, calls, *_ in rows if layer == "gradients"]
        assert calls == [7, 7]  # of the whole world, and of the replicas of the pieces


@pytest.mark.slow
def test_a_cut_optimizer_takes_the_same_steps(on_ranks, weights):
    run = Experiment(plan=HYBRID, optimizer=MOMENTUM, sync=Pipelined(width=3), **FIELDS)
    whole = on_ranks(4, stepwise, run, weights)
    parts = on_ranks(4, stepwise, run.replace(shard_optimizer=True), weights)
    for (mine, *_), (expected, *_) in zip(parts, whole, strict=True):
        for now, then in zip(mine, expected, strict=True):
            same(now, then)
