"""The limits of stability, in the steps that train."""

import pytest
import torch
from torch import nn

from tests.train.checkpoint.saving import Alone, Memory, experiment
from tests.train.runs import stepper_of
from workbench.comm.messages.recorder import Recorder
from workbench.layers.cut import cut
from workbench.layers.cut_model import group_specs
from workbench.layers.local.context import BatchContext
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import SGD, Pipelined
from workbench.plan.plans.plan import Plan
from workbench.train.data.feed import MicroBatch

# Without momentum 2 sin(pi / (4d + 2)); with it 2 (1 + m), 1 - m, and then by simulation.
KNOWN = {0.0: (2.0, 1.0, 0.618, 0.445), 0.9: (3.8, 0.1, 0.05125, 0.03478)}


def amplitudes(lr, width, momentum, steps=600, every=100):
    """Of w under lr and a loss of w^2 / 2, the largest in each so many steps, on one rank."""
    graph = trace(nn.Sequential(nn.Flatten(), nn.Linear(1, 2)), input_shape=(1, 1, 1))
    run = experiment(Plan.data_parallel(graph, 1), SGD(lr=lr, momentum=momentum))
    run = run.replace(sync=Pipelined(width=width))
    groups = Alone().groups([("control", (0,)), *group_specs(run.plan)])
    start = Memory({"1.weight": torch.ones(2, 1).double(), "1.bias": torch.ones(2).double()})
    context = BatchContext(0, (0,), seed=0)
    model = cut(run.plan, context, groups, start, device=torch.device("cpu"), dtype=torch.float64)
    world = Alone()
    world.recorder, world.device = Recorder(), torch.device("cpu")

    def squares(model, *_):
        return sum((p * p).sum() / 2 for p in model.trainable().values()), 0.0

    stepper = stepper_of(world, model, run, loss=squares)
    batch = MicroBatch((1,), 0, (torch.zeros(1, 1, 1, 1).double(),), torch.zeros(1).long())
    places = []
    for step in range(steps):
        stepper.run(step, (batch,))
        stepper.update()
        places.append(model.trainable()["1.weight"].abs().max().item())
    return [max(places[begin : begin + every]) for begin in range(0, steps, every)]


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_a_quadratic_is_stable_up_to_the_limit(width, momentum):
    """PI4: to 1 %."""
    most = KNOWN[momentum][width - 1]
    *_, before, after = amplitudes(0.99 * most, width, momentum)
    assert after < before
    *_, before, after = amplitudes(1.01 * most, width, momentum)
    assert after > before
