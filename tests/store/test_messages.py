"""Experiments on their way to engines."""

from dataclasses import replace

import pytest

from tests.plan.graphs import mlp, vgg
from workbench.plan import SGD, Experiment, Plan
from workbench.plan.extension.sealed import KEY_BYTES, SealError
from workbench.store import messages

KEY = bytes(range(KEY_BYTES))


def experiment(plan: Plan) -> Experiment:
    return Experiment(plan=plan, optimizer=SGD(lr=0.1), steps=3, data="synthetic")


def test_an_experiment_arrives_as_it_was():
    sent = experiment(Plan.hybrid(vgg(), 4, 2))
    assert messages.unpack(messages.pack(sent)) == sent


def test_the_user_s_own_module_comes_along():
    graph = mlp(4, 4)
    graph = replace(graph, source=replace(graph.source, skeleton=b"code\x00and shapes"))
    sent = messages.pack(experiment(Plan.data_parallel(graph, 2)), KEY)
    assert messages.unpack(sent).plan.graph.source.skeleton is None  # it is code
    with pytest.raises(SealError):
        messages.unpack(sent, KEY[::-1])
    arrived = messages.unpack(sent, KEY)
    assert arrived.plan.graph.source.skeleton == b"code\x00and shapes"


def test_so_does_its_way_in_evaluation():
    graph = mlp(4, 4)
    apart = replace(graph, source=replace(graph.source, skeleton=b"in evaluation"))
    here = replace(graph.source, skeleton=b"in training")
    graph = replace(graph, source=here, evaluation=apart)
    arrived = messages.unpack(
        messages.pack(experiment(Plan.data_parallel(graph, 2)), KEY), KEY
    ).plan.graph
    assert arrived.source.skeleton == b"in training"
    assert arrived.evaluation.source.skeleton == b"in evaluation"


def test_a_message_is_small():
    assert len(messages.pack(experiment(Plan.hybrid(vgg(), 4)))) < 4096
