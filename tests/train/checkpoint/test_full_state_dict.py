"""What a run gives back is what the user's own module takes."""

from pathlib import Path

import torch
from torch import nn

from workbench.model.tracing.trace import trace
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.experiment import SGD, Experiment, Synthetic
from workbench.plan.plans.plan import Plan
from workbench.store.messages import StopRequest
from workbench.train.checkpoint.checkpoint import state_dict
from workbench.train.run.loop import train


class Net(nn.Module):
    """Buffers that are saved and that are not, and a weight with two names."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(6)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((6,), 2.0), persistent=False)
        self.register_buffer("shift", torch.ones(6))

    def forward(self, x):
        return self.second(torch.relu(self.first(self.norm(x) * self.scale))) + self.shift


def run(config, experiment, weights, directory):
    return train(
        config,
        experiment,
        weights=weights,
        directory=directory,
        resume=None,
        control=StopRequest(),
        emit=ignore,
    ).checkpoint


def ignore(row):
    pass


def test_the_module_takes_it(on_ranks, tmp_path):
    module = Net()
    graph = trace(module, input_shape=(6,))
    weights = initialize(graph, 0, tmp_path, module=module)
    plan = Plan.data_parallel(graph, 2)
    data = Synthetic(samples=16, classes=6)
    experiment = Experiment(plan=plan, data=data, batch_size=8, optimizer=SGD(lr=0.1), steps=2)
    saved = on_ranks.seated(2, run, experiment, weights, tmp_path)[0]
    found = state_dict(Path(saved), graph)
    assert set(found) == set(module.state_dict())
    assert found["first.weight"] is found["second.weight"]
    taken = Net()
    taken.load_state_dict(found)
    assert taken.norm.num_batches_tracked == 2
    assert not torch.equal(taken.first.weight, module.first.weight)
