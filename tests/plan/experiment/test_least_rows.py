"""Batches in which some rank would have fewer rows than a layer takes are foreseen."""

from dataclasses import replace

import pytest

from tests.plan.graphs import Builder
from workbench.plan import (
    CIFAR10,
    SGD,
    Digits,
    Experiment,
    ExperimentError,
    LocalSGD,
    Plan,
    Synthetic,
)
from workbench.plan.experiment.checks import Schedule, check_rows
from workbench.plan.graph.graph import Input
from workbench.train.data.datasets import open_data


def normed(least=2, *, running=True):
    """A 1-D batch norm behind a linear layer, and a head."""
    graph = Builder((8,)).linear("a", 6).norm("bn").linear("b", 10).graph()
    layers = []
    for layer in graph.layers:
        if layer.name == "bn":
            weights = tuple(w for w in layer.weights if running or "running" not in w.name)
            layer = replace(layer, least_rows=least, weights=weights)
        layers.append(layer)
    return replace(graph, layers=tuple(layers))


def tried(least):
    """An operation that was shown to take so many rows."""
    graph = Builder((8,)).linear("a", 6).same("op", "op").linear("b", 10).graph()
    layers = [replace(x, least_rows=least) if x.name == "op" else x for x in graph.layers]
    return replace(graph, layers=tuple(layers))


NORMED = normed()
PAIR = Plan.data_parallel(NORMED, 2)
FIELDS = dict(optimizer=SGD(lr=0.1), steps=100)


def refusal(plan, samples, batch_size, **fields):
    data = Synthetic(samples=samples)
    with pytest.raises(ExperimentError) as caught:
        Experiment(plan=plan, data=data, batch_size=batch_size, **{**FIELDS, **fields})
    return str(caught.value)


def accepted(plan, samples, batch_size, **fields):
    data = Synthetic(samples=samples)
    return Experiment(plan=plan, data=data, batch_size=batch_size, **{**FIELDS, **fields})


def test_a_full_batch():
    said = refusal(PAIR, 30, 3)
    assert "of a batch of 3 samples, rank 1 has 1 row, and layer 'bn' (batch_norm)" in said
    assert "takes 2 or more, or none: choose a batch_size" in said
    assert 'plan.with_batch_norm("synchronized")' in said


def test_statistics_of_all_ranks_are_advised_where_there_are_two_rows_in_all():
    advice = 'or statistics of all ranks, plan.with_batch_norm("synchronized")'
    assert advice in refusal(PAIR, 32, 2)
    assert advice not in refusal(PAIR, 32, 1)
    assert advice not in refusal(Plan.data_parallel(tried(1), 2, (1, 0)), 32, 8)


def test_the_last_batch_of_an_epoch():
    said = refusal(PAIR, 31, 4)
    assert "an epoch's last batch of 3 samples (31 by 4), rank 1 has 1 row" in said
    accepted(PAIR, 32, 4)
    accepted(PAIR, 31, 4, steps=7)  # does not get there
    refusal(PAIR, 31, 4, steps=8)


def test_fewer_samples_than_a_batch():
    assert "a batch of 3 samples" in refusal(PAIR, 3, 128)


def test_micro_batches():
    assert "a micro-batch of 2 of a batch of 8 samples" in refusal(PAIR, 32, 8, accumulate=4)
    accepted(PAIR, 32, 8, accumulate=2)


def test_a_rank_without_rows_idles():
    accepted(Plan.data_parallel(NORMED, 3, (1, 0, 1)), 32, 8)
    assert "rank 1 has 1 row" in refusal(Plan.data_parallel(NORMED, 3, (4, 1, 3)), 32, 8)


def test_statistics_of_all_ranks_need_two_rows_of_all():
    accepted(PAIR.with_batch_norm("synchronized"), 30, 3)
    said = refusal(PAIR.with_batch_norm("synchronized"), 31, 3)
    assert "last batch of 1 samples (31 by 3), ranks 0 to 1 have 1 row" in said


def test_a_layer_over_a_group_sees_the_group_s_rows():
    groups = Plan.data_parallel(NORMED, 4).with_layer("a", scheme="shard_out", group_size=2)
    assert groups.flow.inputs["bn"].group_size == 2
    accepted(groups, 32, 4)  # one row on each rank
    assert "rank 0 has 1 row" in refusal(Plan.data_parallel(NORMED, 4), 32, 4)


def test_other_layers_are_not_restricted():
    accepted(Plan.data_parallel(normed(least=0), 2), 31, 1)


@pytest.mark.parametrize(("least", "shares"), [(1, (1, 0)), (2, (7, 1))])
def test_an_operation_that_fails_on_few_rows(least, shares):
    graph = tried(least)
    said = refusal(Plan.data_parallel(graph, 2, shares), 32, 8)
    assert f"layer 'op' (op) takes {least} or more: choose" in said
    accepted(Plan.data_parallel(graph, 2), 32, 8)


def test_the_test_split_is_met_too():
    """Batch norm takes its running statistics there, where it has some; an operation does not."""
    accepted(PAIR, 4 * 31, 4)
    tested = Plan.data_parallel(normed(running=False), 2)
    assert "3 samples of evaluation (31 by 4), rank 1 has 1 row" in refusal(tested, 4 * 31, 4)
    each = Plan.data_parallel(tried(1), 2)
    assert "1 samples of evaluation (33 by 4), rank 1 has 0 rows" in refusal(each, 4 * 33, 4)


def test_rounds_bring_a_part_of_the_rows():
    graph = tried(1)
    gathered = Plan.data_parallel(graph, 2).with_layer("a", scheme="duplicate", group_size=2)
    assert gathered.tail is not None
    assert "op" in gathered.tail.layers
    accepted(gathered, 32, 2)
    rounds = gathered.with_rounds("B").with_rows((1, 0))
    assert "layer 'op' (op) takes 1 or more" in refusal(rounds, 32, 2)


def test_every_strategy_steps_on_the_same_batches():
    refusal(PAIR, 30, 3, sync=LocalSGD(every=2))


def test_replacing_a_field_looks_again():
    experiment = accepted(PAIR, 32, 4)
    with pytest.raises(ExperimentError, match="rank 1 has 1 row"):
        experiment.replace(plan=PAIR.with_rows((3, 1)))


def test_what_is_only_known_when_the_run_starts():
    experiment = Experiment(plan=PAIR, data=CIFAR10(), batch_size=4, **FIELDS)
    experiment.check_rows((32, 8))
    with pytest.raises(ExperimentError, match=r"last batch of 3 samples \(31 by 4\)"):
        experiment.check_rows((31, 8))
    with pytest.raises(ExperimentError, match="rank 1 has 1 row"):
        check_rows(PAIR, Schedule(3, 1, 1, (3, 3)))


@pytest.mark.parametrize(("data", "shape"), [(Digits(), (1, 8, 8)), (Synthetic(samples=7), (3,))])
def test_samples_are_as_many_as_is_said(data, shape):
    splits = [open_data(data, (Input(shape),), 10, split) for split in ("train", "test")]
    assert data.known_samples == tuple(map(len, splits))
