"""Every optimizer on ranks that share its work: the same bits, and as many bytes as predicted."""

import pytest
import torch

from tests.train import small
from tests.train.runs import same, trained
from tests.train.small import GRAPH
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.experiment import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    Experiment,
    NAdam,
    ParameterGroup,
    ParameterServer,
    RAdam,
    RMSprop,
    Rprop,
    Synchronous,
    Synthetic,
)
from workbench.plan.plans.plan import Plan
from workbench.predict.memory.resident import optimizer_bytes
from workbench.program.step import program_of

VALUES = (
    SGD(0.05, momentum=0.9, dampening=0.1, groups=[ParameterGroup(dims=1, momentum=0.0)]),
    Adam(0.01, amsgrad=True, groups=[ParameterGroup("5.*", amsgrad=False, lr=0.02)]),
    Adagrad(0.05, initial_accumulator_value=0.1),
    Adadelta(weight_decay=0.1),
    Adamax(0.01),
    NAdam(0.01, weight_decay=0.1),
    RAdam(0.01, betas=(0.5, 0.8)),
    RMSprop(0.01, momentum=0.9, centered=True),
    Rprop(0.02),
    ASGD(0.05, t0=1.0, lambd=0.1),
)
PLAN = Plan.hybrid(GRAPH, 4, 2).with_batch_norm("synchronized")
SHARED = (
    dict(shard_optimizer=True),
    dict(shard_optimizer=(1, 0, 2, 3), sync=Synchronous(algorithm="direct", bucket_bytes=3000)),
    dict(sync=ParameterServer(server=1)),
)


def every(world, runs, weights):
    return [trained(world, run, weights)[:2] for run in runs]


# Groups, numbers that are no counts, and first values; the others take as long.
FEW = ("sgd", "nadam", "rprop")
EVERY = [
    pytest.param(one, id=one.kind, marks=() if one.kind in FEW else pytest.mark.slow)
    for one in VALUES
]


@pytest.mark.slow
@pytest.mark.parametrize("value", EVERY)
def test_same_bits_and_predicted_bytes(on_ranks, tmp_path_factory, value):
    folder = tmp_path_factory.mktemp("weights")
    weights = initialize(GRAPH, 0, folder, module=small.net())
    direct = Synchronous(algorithm="direct", bucket_bytes=3000)
    whole = Experiment(
        plan=PLAN,
        optimizer=value,
        sync=direct,
        data=Synthetic(samples=50),
        batch_size=20,
        steps=3,
    )
    runs = [whole, *(whole.replace(**fields) for fields in SHARED)]
    assert runs[2].fused
    programs = [program_of(run) for run in runs]
    predicted = [sum(optimizer_bytes(one, one.handed).values()) for one in programs]
    for rank, found in enumerate(on_ranks(4, every, runs, weights)):
        assert [held for _, held in found] == [bytes_[rank] for bytes_ in predicted]
        for shared, _ in found[1:]:
            same(shared, found[0][0])
        assert all(torch.isfinite(tensor).all() for tensor in found[0][0].values())
