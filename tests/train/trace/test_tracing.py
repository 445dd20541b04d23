"""Traced steps: what they tell, and that they are the same steps."""

from collections import Counter

import pytest

from tests.train import small
from tests.train.small import GRAPH
from tests.train.strategies.test_local_sgd import GRAPH as TAILED
from tests.train.strategies.test_local_sgd import net as tailed
from tests.train.strategies.test_local_sgd import plan as tailed_plan
from tests.train.trace.traced import Seen, step
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.experiment import (
    SGD,
    AdamW,
    Experiment,
    LocalSGD,
    Pipelined,
    Synchronous,
    Synthetic,
)
from workbench.plan.plans.plan import Plan
from workbench.train.trace.trace import RankTrace

FIELDS = dict(
    data=Synthetic(samples=60), batch_size=20, steps=3, optimizer=SGD(lr=0.05, momentum=0.9)
)
HYBRID = Plan.hybrid(GRAPH, 4, 2)
CASES = {
    "synchronized, recomputed, accumulate": (
        HYBRID.with_batch_norm("synchronized").with_recompute("*"),
        dict(accumulate=2),
    ),
    "bf16, sharded": (HYBRID, dict(precision="bf16", shard_optimizer=True)),
    "fp16, fused": (
        HYBRID,
        dict(precision="fp16", shard_optimizer=True, sync=Synchronous(algorithm="direct")),
    ),
    "rounds, per round": (
        tailed_plan(4, 2, "B/K"),
        dict(optimizer=AdamW(), sync=Synchronous(per_round=True, bucket_bytes=500)),
    ),
    "rounds B, recomputed": (tailed_plan(4, 2, "B").with_recompute("*"), {}),
    "local": (tailed_plan(4, 2), dict(sync=LocalSGD(every=3))),
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    nets = {GRAPH: small.net(), TAILED: tailed()}
    return {
        graph: initialize(graph, 0, folder / graph.fingerprint, module=module)
        for graph, module in nets.items()
    }


@pytest.fixture(params=CASES, scope="module")
def both(request, on_either, weights):
    """(experiment, every rank's untraced step, the same step traced, through shared memory?)."""
    plan, fields = CASES[request.param]
    experiment = Experiment(plan=plan, **{**FIELDS, **fields})
    runs = [on_either(4, step, experiment, weights[plan.graph], traced) for traced in (False, True)]
    return experiment, *runs, on_either.keywords["shared_memory"]


def traces(seen: list[Seen]) -> list[RankTrace]:
    found = [rank.trace for rank in seen if rank.trace is not None]
    assert len(found) == len(seen)
    return found


@pytest.mark.slow
def test_a_traced_step_is_the_same_step(both):
    """Bit by bit, byte by byte, and nothing is left behind."""
    _, plain, traced, shared = both
    for expected, found in zip(plain, traced, strict=True):
        assert found.tensors.keys() == expected.tensors.keys()
        assert all(found.tensors[n].equal(expected.tensors[n]) for n in expected.tensors)
        if shared:  # a thread of gloo drops its buffers sooner or later
            assert found.peak_bytes == expected.peak_bytes
        assert found.counts == expected.counts
        assert found.left == expected.left == []


def test_every_collective_is_told_with_the_bytes_of_the_record(both):
    _, _, traced, _ = both
    for seen, trace in zip(traced, traces(traced), strict=True):
        calls, received = Counter(), Counter()
        for call in trace.calls:
            key = call.group, call.op, call.layer, call.phase
            calls[key] += 1
            received[key] += call.bytes
        expected = {row[:4]: (row[4], row[6]) for row in seen.counts}
        assert {key: (calls[key], received[key]) for key in calls} == expected


def test_every_layer_is_there_once_in_each_pass(both):
    experiment, _, traced, _ = both
    plan = experiment.plan
    tail = plan.tail if plan.rounds != "BK" else None
    named = {layer.name for layer in plan.graph.layers}
    again = {name for segment in plan.segments for name in segment}
    for trace in traces(traced):
        forward = layers(trace, "forward")
        backward = layers(trace, "backward")
        for name in named:
            rounds = tail.group_size if tail is not None and name in tail.layers else 1
            passes = experiment.accumulate * rounds
            assert forward[name] == passes * (2 if name in again else 1), name
            assert backward[name] == passes, name


def layers(trace: RankTrace, what: str) -> Counter[str]:
    return Counter(s.label for s in trace.stretches if s.what == what and not s.conversion)


def test_stretches_lie_in_the_step_one_after_another(both):
    _, _, traced, _ = both
    for trace in traces(traced):
        at = 0.0
        for stretch in trace.stretches:
            begin, end = stretch.during
            assert at <= begin <= end
            at = end
        assert at <= trace.seconds
        for call in trace.calls:
            begin, end = call.during
            assert 0 <= begin <= end <= trace.seconds
            for since, until in (*call.blocked, *call.helped):
                assert begin <= since <= until <= end
        order = [stretch.what for stretch in trace.stretches]
        assert order[0] == "load"
        assert order[-1] == "update"
        whats = set(order)
        assert whats == {"load", "forward", "loss", "backward", "update"}


def test_layers_without_what_collectives_took(both):
    _, _, traced, _ = both
    for trace in traces(traced):
        held = sum(end - begin for begin, end in trace.held_up)
        own = trace.own_seconds()
        assert sum(own) + held <= trace.seconds
        for stretch, seconds in zip(trace.stretches, own, strict=True):
            assert 0 <= seconds <= stretch.during[1] - stretch.during[0]
        layers = [
            seconds
            for stretch, seconds in zip(trace.stretches, own, strict=True)
            if stretch.what in ("forward", "backward") and not stretch.conversion
        ]
        computed = sum(s.forward_s + s.backward_s for s in trace.layer_seconds().values())
        assert computed == pytest.approx(sum(layers))


@pytest.mark.slow
def test_sums_that_another_thread_looks_after_are_no_layer_s_time(on_ranks, weights):
    """Pipelined: a sum begins in one step and ends in a later one, beside the computation."""
    plan = tailed_plan(4, 2)
    sync = Pipelined(width=2, algorithm="ring")
    experiment = Experiment(plan=plan, **FIELDS, sync=sync)
    plain, traced = (
        on_ranks(4, step, experiment, weights[plan.graph], traced) for traced in (False, True)
    )
    for expected, found in zip(plain, traced, strict=True):
        assert all(found.tensors[n].equal(expected.tensors[n]) for n in expected.tensors)
        assert found.left == []
    for trace in traces(traced):
        sums = [call for call in trace.calls if call.layer == "gradients"]
        assert sums
        assert all(call.beside for call in sums)
