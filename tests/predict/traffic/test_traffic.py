"""Predicted calls, messages and bytes are those of the record, row by row."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.layers import nets
from tests.layers.drawn import GRAPHS, plans
from tests.predict import running
from workbench.plan.collective.codec import Codec
from workbench.plan.experiment.experiment import (
    SGD,
    Adam,
    CrossEntropy,
    Experiment,
    LocalSGD,
    ParameterServer,
    Pipelined,
    Synchronous,
)
from workbench.plan.placement.rounds import ROUNDS
from workbench.plan.plans.plan import Plan
from workbench.predict.traffic.traffic import pairs_of, traffic_of
from workbench.program.step import program_of


def experiment(plan, **fields):
    given = dict(
        optimizer=SGD(lr=0.1), batch_size=7, precision="fp64", sync=Synchronous(bucket_bytes=600)
    )
    return Experiment(plan=plan, data="digits", steps=1, **given | fields)


def check(on_ranks, run, net, hosts=""):
    """On one host, or on those that letters name for the ranks."""
    ranks_per_host = hosts.count("a") or None
    program = program_of(run, ranks_per_host)
    predicted, pairs = traffic_of(program), pairs_of(program)
    size = run.plan.world_size
    answers = on_ranks(size, running.received_in_a_step, run, net, hosts=hosts)
    for rank, (recorded, senders) in enumerate(answers):
        assert sorted(predicted.rows(rank)) == sorted(recorded)
        sums = Counter()
        for one in pairs:
            for sender in one.bytes[rank].nonzero()[0]:
                sums[one.op, one.phase, sender] += one.bytes[rank, sender]
        assert tuple((*of, size) for of, size in sorted(sums.items())) == senders


@st.composite
def runs(draw):
    """Any net under any schemes, group sizes and shares, in micro-batches."""
    net = draw(st.sampled_from(nets.NETS))
    plan, _ = draw(plans(net))
    plan = plan.with_batch_norm(draw(st.sampled_from(["local", "synchronized"])))
    seeing = [layer.name for layer in plan.graph.layers if layer.rows]
    plan = plan.with_recompute(*draw(st.lists(st.sampled_from(seeing), max_size=3)))
    count, parts = draw(st.integers(4, 9)), draw(st.integers(1, 2))
    cut = draw(st.sampled_from([False, True, tuple(range(plan.world_size, 0, -1))]))
    sync = Synchronous(algorithm=draw(st.sampled_from(["auto", "direct"])), bucket_bytes=600)
    fields = dict(batch_size=count, accumulate=parts, shard_optimizer=cut, sync=sync)
    return net, experiment(plan, **fields)


@pytest.mark.slow
@settings(
    max_examples=25,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=runs())
def test_any_plan(on_ranks, case):
    net, run = case
    check(on_ranks, run, net)


@pytest.mark.parametrize("scheme", ROUNDS)
@pytest.mark.parametrize("k", [2, 4])
def test_rounds(on_ranks, scheme, k):
    plan = Plan.hybrid(GRAPHS[nets.Picture], 4, k, rounds=scheme)
    check(on_ranks, experiment(plan), nets.Picture)


STRATEGIES = {
    "per round": dict(sync=Synchronous(per_round=True, bucket_bytes=600)),
    "local": dict(sync=LocalSGD(every=1, bucket_bytes=600)),
    "local, averaged momentum": dict(
        sync=LocalSGD(every=1, momentum="average", bucket_bytes=600), optimizer=Adam()
    ),
    "clipped": dict(clip_norm=0.1),
    "scaled": dict(precision="fp16", loss_scale=8.0),
    "scaled, clipped": dict(precision="fp16", loss_scale=8.0, clip_norm=0.1, accumulate=2),
}


@pytest.mark.parametrize("fields", STRATEGIES.values(), ids=STRATEGIES.keys())
def test_strategies(on_ranks, fields):
    plan = Plan.hybrid(GRAPHS[nets.Picture], 4, 2, rounds="B/K")
    check(on_ranks, experiment(plan, **fields), nets.Picture)


LOSSES = [
    CrossEntropy(label_smoothing=0.1),
    CrossEntropy(ignore_index=None, label_smoothing=0.1),
    CrossEntropy(weight=(0.5,) * 5),
]


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_cross_entropy_with_options(on_ranks, loss):
    plan = Plan.data_parallel(GRAPHS[nets.Images], 4)
    plan = plan.with_layer(plan.graph.layers[-1].name, scheme="shard_out", group_size=2)
    check(on_ranks, experiment(plan, loss=loss, accumulate=2), nets.Images)


HOSTS = ["aaaa", "aabb", "aaab", "abcd"]


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize(
    "algorithm", ["auto", "direct", "ring", "halving_doubling", "hierarchical"]
)
def test_algorithms_wherever_ranks_are(on_ranks, algorithm, hosts):
    plan = Plan.hybrid(GRAPHS[nets.Images], 4, 2).with_batch_norm("synchronized")
    sync = Synchronous(algorithm=algorithm, bucket_bytes=600)
    check(on_ranks, experiment(plan, sync=sync), nets.Images, hosts)


CODED = [
    ("auto", "fp16"),
    ("ring", "int8"),
    ("direct", Codec(name="top_k", fraction=0.2)),
    ("auto", Codec(name="int4", chunk=16)),
]


@pytest.mark.parametrize(("algorithm", "codec"), CODED)
@pytest.mark.parametrize("hosts", ["aaaa", "aabb", "aaab"])
def test_codecs(on_ranks, algorithm, codec, hosts):
    plan = Plan.hybrid(GRAPHS[nets.Images], 4, 2)
    sync = Synchronous(algorithm=algorithm, codec=codec, bucket_bytes=600)
    check(on_ranks, experiment(plan, sync=sync), nets.Images, hosts)


LATE = [Pipelined(width=2), Pipelined(width=3, codec="int8"), ParameterServer(server=1)]


@pytest.mark.parametrize("sync", LATE, ids=["two", "three", "server"])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_strategies_that_do_otherwise(on_ranks, sync, k):
    plan = Plan.hybrid(GRAPHS[nets.Images], 4, k)
    check(on_ranks, experiment(plan, sync=sync, batch_size=9), nets.Images)


@pytest.mark.parametrize("hosts", ["aabb", "aaab"])
def test_local_sgd_over_hosts(on_ranks, hosts):
    run = experiment(Plan.data_parallel(GRAPHS[nets.Images], 4), sync=LocalSGD(every=1))
    check(on_ranks, run, nets.Images, hosts)


@pytest.mark.parametrize("fields", [{}, dict(batch_size=2, sync=STRATEGIES["per round"]["sync"])])
def test_weights_that_whoever_moved_them_hands_out(on_ranks, fields):
    """In batches of two rows there are rounds without any, after which nothing moves."""
    plan = Plan.hybrid(GRAPHS[nets.Picture], 4, 2, rounds="B/K")
    check(on_ranks, experiment(plan, shard_optimizer=True, **fields), nets.Picture)


@pytest.mark.parametrize("hosts", ["aaaa", "aabb"])
@pytest.mark.parametrize("shares", [True, (1, 0, 0, 2)])
def test_updates_fused_into_the_all_reduce(on_ranks, hosts, shares):
    plan = Plan.hybrid(GRAPHS[nets.Images], 4, 2)
    sync = Synchronous(algorithm="direct", bucket_bytes=600)
    check(on_ranks, experiment(plan, sync=sync, shard_optimizer=shares), nets.Images, hosts)


ENDS = {
    "whole": {},
    "in parts": dict(shard_optimizer=True),
    "fused": dict(sync=Synchronous(algorithm="direct"), shard_optimizer=(1, 0, 0, 2)),
    "a server": dict(sync=ParameterServer(server=2)),
}


@pytest.mark.parametrize("hosts", ["aaaa", "aabb"])
@pytest.mark.parametrize("fields", ENDS.values(), ids=ENDS)
def test_losses_that_are_scaled(on_ranks, fields, hosts):
    plan = Plan.hybrid(GRAPHS[nets.Images], 4, 2).with_batch_norm("synchronized")
    check(
        on_ranks, experiment(plan, precision="fp16", loss_scale=8.0, **fields), nets.Images, hosts
    )


@pytest.mark.parametrize("rounds", ["BK", "B/K"])
@pytest.mark.parametrize("net", [nets.Picture, nets.Images], ids=lambda net: net.__name__)
def test_what_is_recomputed_communicates_again(on_ranks, net, rounds):
    plan = Plan.hybrid(GRAPHS[net], 4, 2, rounds=rounds).with_batch_norm("synchronized")
    check(on_ranks, experiment(plan.with_recompute("*")), net)


def test_what_comes_every_few_steps_counts_its_part():
    plan = Plan.data_parallel(GRAPHS[nets.Images], 2)
    often, rarely = (
        traffic_of(program_of(experiment(plan, sync=LocalSGD(every=every)))) for every in (1, 5)
    )
    status = sum(c.bytes[0] for c in often.collectives if c.layer == "status")
    assert rarely.received_bytes(0) - status == pytest.approx(
        (often.received_bytes(0) - status) / 5
    )
