"""The measured curvature, against the Hessian that autograd gives of the unsplit model."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from workbench.model.tracing.trace import trace
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.experiment import SGD, Experiment, Synthetic
from workbench.plan.graph.graph import Input
from workbench.plan.plans.plan import Plan
from workbench.train.data.datasets import open_data
from workbench.train.data.feed import rows_of_step
from workbench.train.measure.curvature import measure_curvature


def net(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 4))


GRAPH = trace(net(), input_shape=(1, 4, 4))
DATA = Synthetic(samples=24, classes=4)
FIELDS = dict(data=DATA, batch_size=12, optimizer=SGD(lr=0.1), steps=4, precision="fp64")


@pytest.fixture
def weights(tmp_path):
    return lambda seed: initialize(GRAPH, 0, tmp_path, module=net(seed))


def eigenvalues(seed, batches):
    """Of the whole model's Hessian, by double backward."""
    model = net(seed).double()
    data = open_data(DATA, (Input((1, 4, 4)),), 4, "train")
    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]
    rows = [rows_of_step(len(data), 12, 0, step) for step in range(batches)]
    drawn = [data.batch(each) for each in rows]

    def loss(flat):
        pieces = flat.split([shape.numel() for shape in shapes])
        named = {n: x.view(s) for n, x, s in zip(names, pieces, shapes, strict=True)}
        losses = [
            F.cross_entropy(functional_call(model, named, images.double()), labels)
            for images, labels in drawn
        ]
        return sum(losses) / len(losses)

    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, flat))


@pytest.mark.parametrize("plan", [Plan.data_parallel(GRAPH, 3), Plan.hybrid(GRAPH, 4, 2)])
def test_it_is_the_hessian_s_largest_eigenvalue(on_ranks, weights, plan):
    run = Experiment(plan=plan, **FIELDS)
    found = on_ranks.seated(plan.world_size, measured, run, weights(3))
    assert len(set(found)) == 1
    assert found[0].value == pytest.approx(eigenvalues(3, 2)[-1].item(), rel=0.01)
    assert (found[0].step, found[0].batches) == (0, 2)


def test_a_negative_one_of_larger_magnitude_is_not_it(on_ranks, weights):
    least, *_, largest = eigenvalues(2, 2).tolist()
    assert -least > largest > 0
    run = Experiment(plan=Plan.data_parallel(GRAPH, 1), **FIELDS)
    found = on_ranks.seated(1, measured, run, weights(2))
    assert found[0].value == pytest.approx(largest, rel=0.01)


def measured(config, experiment, weights):
    return measure_curvature(config, experiment, weights=weights, tolerance=1e-3, iterations=60)
