"""Sums of gradients in buckets."""

import gc
import weakref

import pytest

from tests.layers import nets
from tests.train.runs import stepper_of
from workbench.comm.groups.world import World
from workbench.model.tracing.trace import trace
from workbench.plan.collective.algorithm import Algorithm
from workbench.plan.experiment.experiment import SGD, Experiment, Synchronous, Synthetic
from workbench.plan.placement.placement import Shard
from workbench.plan.plans.plan import Plan
from workbench.train.data.feed import MicroBatch
from workbench.train.step.state import StepState
from workbench.train.strategy.reduction import GradientSum, OutOfOrder

GRAPH = trace(nets.Images(), input_shape=nets.Images.shape)


def stepping(world: World, plan: Plan, sync: Synchronous):
    """What executes steps, and this rank's rows of one."""
    rows = (2, 1, 3)[: world.size]
    model = nets.cut_net(world, plan, nets.Images, rows)
    run = Experiment(
        plan=plan,
        optimizer=SGD(lr=0.1),
        steps=1,
        batch_size=64,
        data=Synthetic(samples=64, classes=5),
        sync=sync,
        precision="fp64",
    )
    images, labels = nets.batch(nets.Images, sum(rows))
    span = Shard(0, rows).span(world.rank)
    batch = MicroBatch(rows, 0, (images.narrow(0, *span),), labels.narrow(0, *span))
    return stepper_of(world, model, run), batch


def summed(world: World, plan: Plan, bucket_bytes: int, algorithm: Algorithm = "auto"):
    """Gradients of one step, how many buckets, and whether the model is gone afterwards."""
    sync = Synchronous(bucket_bytes=bucket_bytes, algorithm=algorithm)
    steps, batch = stepping(world, plan, sync)
    for step in range(2):  # a second step starts from nothing
        steps.run(step, (batch,))
    found = {name: p.grad.clone() for name, p in steps.model.trainable().items()}
    rounds = {row.rounds for row in world.recorder.rows() if row.layer == "gradients"}
    buckets, gone = len(steps.strategy.buffers), weakref.ref(steps.model.traced)
    del steps
    gc.collect()
    return found, buckets, rounds, gone() is None


@pytest.mark.slow
def test_buckets_of_any_size_sum_alike(on_ranks):
    plan = Plan.data_parallel(GRAPH, 3)
    few = on_ranks(3, summed, plan, 10**9)
    many = on_ranks(3, summed, plan, 1)
    assert {buckets for _, buckets, *_ in few} == {1}
    assert {buckets for _, buckets, *_ in many} == {len(few[0][0])}
    for name, gradient in few[0][0].items():
        for found, *_ in (*few, *many):
            assert (found[name] - gradient).abs().max() < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["auto", "hierarchical", "ring"])
def test_sums_are_the_same_across_hosts(on_ranks, algorithm):
    plan = Plan.data_parallel(GRAPH, 3)
    together = on_ranks(3, summed, plan, 1000)
    across = on_ranks(3, summed, plan, 1000, algorithm, hosts="aab")
    for name, gradient in together[0][0].items():
        assert all((found[name] - gradient).abs().max() < 1e-12 for found, *_ in across)
    assert all(gone for *_, gone in across)


@pytest.mark.slow
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


def surprised(world: World, plan: Plan):
    """What is said of a backward pass that no instruction lists, while sums are under way."""
    steps, batch = stepping(world, plan, Synchronous())
    steps.run(0, (batch,))
    sums = GradientSum(steps.strategy.program, steps.model)
    sums.zeroing(list(steps.model.trainable()))(StepState(1, batch.rows, sum(batch.rows)))
    sums.start()
    try:
        sum(p.sum() for p in steps.model.trainable().values()).backward()
    except OutOfOrder as error:
        return str(error)
    finally:
        sums.wait()


def test_a_gradient_that_comes_too_late_is_no_part_of_a_sum(on_ranks):
    for said in on_ranks(2, surprised, Plan.data_parallel(GRAPH, 2)):
        assert said.startswith("a backward pass left a gradient of '")
        assert "when the sum of '" in said
