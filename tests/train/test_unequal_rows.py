"""Ranks with unequal rows, of every batch of an epoch: gradients of one process (sec. 2.2)."""

import pytest
import torch

from tests.train.small import net
from workbench.model.tracing.trace import trace
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.experiment import SGD, Experiment, Synthetic
from workbench.plan.plans.plan import Plan
from workbench.train.run.rank import RankState, group_specs_of

GRAPH = trace(net(), input_shape=(3, 8, 8))
SAMPLES, BATCH = 25, 10  # the last batch of an epoch has five rows


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return initialize(GRAPH, 0, tmp_path_factory.mktemp("weights"), module=net())


def experiment(plan):
    return Experiment(
        plan=plan.with_batch_norm("synchronized"),
        data=Synthetic(samples=SAMPLES),
        batch_size=BATCH,
        optimizer=SGD(lr=0.1),
        steps=1,
        precision="fp64",
    )


def gradients(world, value, weights):
    """This rank's rows and all gradients of three steps, of which the last has a short batch."""
    state = RankState.start(value, world, world.groups(group_specs_of(value.plan)), weights, None)
    found = []
    for step in range(3):
        (batch,) = state.stepper.run(step).batches
        grads = {n: p.grad.clone() for n, p in state.model.trainable().items()}
        found.append((len(batch.inputs[0]), grads))
        state.stepper.update()
    return found


@pytest.mark.parametrize("shares", [(0, 2, 1), (1, 1, 1), (5, 0, 0)], ids=str)
def test_gradients_are_weighted_with_rows(on_ranks, weights, shares):
    (alone,) = on_ranks(1, gradients, experiment(Plan.data_parallel(GRAPH, 1)), weights)
    every = on_ranks(3, gradients, experiment(Plan.data_parallel(GRAPH, 3, shares)), weights)
    for step, (count, expected) in enumerate(alone):
        assert sum(rank[step][0] for rank in every) == count == (BATCH, BATCH, 5)[step]
        for rank, share in zip(every, shares, strict=True):
            rows, found = rank[step]
            assert (rows == 0) == (share == 0)
            for name, gradient in expected.items():
                torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-13)
