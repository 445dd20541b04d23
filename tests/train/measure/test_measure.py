"""What ranks measure: every layer once, every collective with its counts."""

from collections import Counter

import numpy as np
import pytest

from tests.train.small import GRAPH
from workbench.plan.experiment.experiment import SGD, Experiment, Synthetic
from workbench.plan.machine.device import BY_BACKEND, EXCHANGE, INTO_NEW
from workbench.plan.plans.plan import Plan
from workbench.train.measure.device import device
from workbench.train.measure.layers import layers, works_on
from workbench.train.measure.links import families, links

PLAN = Plan.hybrid(GRAPH, 2)


def experiment(plan=PLAN) -> Experiment:
    return Experiment(
        plan=plan,
        data=Synthetic(samples=64),
        batch_size=8,
        optimizer=SGD(lr=1e-9, momentum=0.9),
        steps=1,
    )


def measured(config, weights, plan):
    return layers(config, experiment(plan), weights=weights, rows=[4, 2], within_s=0.5)


@pytest.mark.parametrize("plan", [PLAN, Plan.data_parallel(GRAPH, 2)])
def test_every_distinct_layer_of_a_rank_is_measured(on_ranks, weights, plan):
    for rank, found in enumerate(on_ranks.seated(2, measured, weights, plan)):
        assert [own.rows for own in found] == [4, 2]
        for own in found:
            works = works_on(plan, rank, own.rows, "fp32")
            assert own.layers.shape == (len(works), 3)
            forward, backward, error = own.layers.T
            assert np.all(forward > 0)
            assert np.all(error >= 0)
            trained = [work.weight_bytes > 0 for work in works]
            assert np.all(backward[trained] > 0)
            assert own.load_s > 0
            assert own.update_s > 0
            assert np.isfinite(own.besides_s)  # a difference: less than nothing, now and then
            assert own.image_bytes == own.rows * 3 * 8 * 8 * 4
            assert own.steps >= 2


def test_equal_layers_are_one_work():
    works = works_on(Plan.data_parallel(GRAPH, 2), 0, 4, "fp32")
    named = [name for names in works.values() for name in names]
    assert sorted(named) == sorted(layer.name for layer in GRAPH.layers)


def linked(config):
    return links(config, experiment(Plan.data_parallel(GRAPH, config.world_size)), within_s=0.3)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_collectives_are_timed_in_every_group(on_ranks, size):
    for rank, found in enumerate(on_ranks.seated(size, linked)):
        groups = [ranks for family in families(size) for ranks in family if rank in ranks]
        assert set(found.overlap_costs) == set(groups)
        assert all(0 <= cost.busy <= 1 <= cost.slowdown for cost in found.overlap_costs.values())
        seen = Counter((timed.op, timed.ranks) for timed in found.collectives)
        in_memory = ("all_reduce", INTO_NEW, "all_gather", "reduce_scatter", "all_to_all")
        ops = (*in_memory, BY_BACKEND, EXCHANGE, "broadcast")
        assert set(seen) == {(op, ranks) for op in ops for ranks in groups}
        for timed in found.collectives:
            assert timed.seconds > 0
            assert (timed.received > 0) != (timed.op == "broadcast" and timed.ranks[0] == rank)
            assert timed.rounds >= 1


def alone(config):
    plan = Plan.data_parallel(GRAPH, 1)
    return links(config, experiment(plan), within_s=0.1)


def test_one_rank_has_nobody_to_talk_to(on_ranks):
    assert on_ranks.seated(1, alone)[0].collectives == ()


def test_families_are_neighbours_and_replicas():
    assert families(4) == [
        ((0, 1), (2, 3)),
        ((0, 2), (1, 3)),
        ((0, 1, 2, 3),),
    ]
    assert families(1) == []


def attained(config):
    return device(config, experiment(), within_s=0.2)


@pytest.mark.slow
def test_a_device_s_figures_are_rates(on_ranks):
    for found in on_ranks.seated(2, attained):
        assert found.bandwidth > 1e8
        assert all(rate > 1e7 for rate in found.flops.values())
        assert set(found.flops) == {"fp32", "bf16", "fp16", "fp64"}
        assert 0 < found.call_s < 1e-2
        assert set(found.update_s_per_byte) == {"sgd", "adam", "adamw"}
