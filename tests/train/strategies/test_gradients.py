"""Sums of gradients in buckets."""

import gc
import weakref

import pytest

from tests.layers import nets
from workbench.comm.groups.world import World
from workbench.model.trace import trace
from workbench.plan.all_reduce import Algorithm
from workbench.plan.placement import Shard
from workbench.plan.plan import Plan
from workbench.train.loop.objective import step_loss
from workbench.train.strategies.gradients import GradientSum

GRAPH = trace(nets.Images(), input_shape=nets.Images.shape)


def summed(world: World, plan: Plan, bucket_bytes: int, algorithm: Algorithm = "auto"):
    """Gradients of one step, how many buckets, and whether the model is gone afterwards."""
    rows = (2, 1, 3)[: world.size]
    model = nets.cut_net(world, plan, nets.Images, rows)
    gradients = GradientSum(model, bucket_bytes, algorithm=algorithm)
    images, labels = nets.batch(nets.Images, sum(rows))
    span = Shard(0, rows).span(world.rank)
    for _ in range(2):  # a second step starts from nothing
        gradients.begin()
        outputs = model(images.narrow(0, *span))
        loss, _ = step_loss(model, outputs, labels.narrow(0, *span), sum(rows))
        gradients.last()
        loss.backward()
        gradients.finish()
    found = {name: p.grad.clone() for name, p in model.trainable().items()}
    rounds = {row.rounds for row in world.recorder.rows() if row.layer == "gradients"}
    buckets, gone = len(gradients.buffers), weakref.ref(model.traced)
    del model, gradients, outputs, loss
    gc.collect()
    return found, buckets, rounds, gone() is None


def test_buckets_of_any_size_sum_alike(on_ranks):
    plan = Plan.data_parallel(GRAPH, 3)
    few = on_ranks(3, summed, plan, 10**9)
    many = on_ranks(3, summed, plan, 1)
    assert {buckets for _, buckets, *_ in few} == {1}
    assert {buckets for _, buckets, *_ in many} == {len(few[0][0])}
    for name, gradient in few[0][0].items():
        for found, *_ in (*few, *many):
            assert (found[name] - gradient).abs().max() < 1e-12


@pytest.mark.parametrize("algorithm", ["auto", "hierarchical", "ring"])
def test_sums_are_the_same_across_hosts(on_ranks, algorithm):
    plan = Plan.data_parallel(GRAPH, 3)
    together = on_ranks(3, summed, plan, 1000)
    across = on_ranks(3, summed, plan, 1000, algorithm, hosts="aab")
    for name, gradient in together[0][0].items():
        assert all((found[name] - gradient).abs().max() < 1e-12 for found, *_ in across)
    assert all(gone for *_, gone in across)


@pytest.mark.parametrize(("algorithm", "rounds"), [("ring", 4), ("halving_doubling", 2)])
def test_algorithms_sum_alike(on_ranks, algorithm, rounds):
    plan = Plan.data_parallel(GRAPH, 3)
    by_name = on_ranks(3, summed, plan, 1000, algorithm)
    chosen = on_ranks(3, summed, plan, 1000)
    for name, gradient in chosen[0][0].items():
        assert all((found[name] - gradient).abs().max() < 1e-12 for found, *_ in by_name)
    _, buckets, counted, _ = by_name[2]
    assert counted == {2 * buckets * rounds}  # of two steps


def test_nothing_is_kept_when_a_run_is_over(on_ranks):
    assert all(gone for *_, gone in on_ranks(2, summed, Plan.data_parallel(GRAPH, 2), 100))
