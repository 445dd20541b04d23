"""What people give from torch, or forget: told in one line, with what is valid."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.plan.graphs import vgg
from workbench.plan.errors import ExperimentError
from workbench.plan.experiment.experiment import Experiment, Metric, Synchronous, TorchData
from workbench.plan.plan import Plan

FIELDS = dict(plan=Plan.data_parallel(vgg(), 2), data="digits", optimizer="sgd", steps=10)
ROWS = TensorDataset(torch.rand(4, 2))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(optimizer=torch.optim.SGD), r"optimizer: SGD is no optimizer.*such as wb.SGD\(...\)"),
        (dict(optimizer=torch.optim.SGD([nn.Parameter(torch.ones(1))])), "optimizer: SGD is no"),
        (dict(sync=Synchronous), "sync: Synchronous is no sync .* such as wb.Synchronous"),
        (dict(sync=5), "sync: int is no sync"),
        (dict(data=DataLoader(ROWS)), "DataLoader gives batches: give its dataset"),
        (
            dict(keep_best="miou"),
            "^Experiment: keep_best: evaluations have no 'miou'; there are 'l",
        ),
        (dict(keep_best="accuracy", metrics={"m": Metric("math:exp")}), "there are 'loss', 'm'$"),
        (dict(keep_best="loss", data=TorchData(train=ROWS)), "as data has no test split"),
    ],
)
def test_what_is_not_of_the_workbench(fields, said):
    with pytest.raises(ExperimentError, match=said):
        Experiment(**FIELDS | fields)


@pytest.mark.parametrize("by", ["loss", "accuracy", "-accuracy"])
def test_what_evaluations_have_can_be_best(by):
    run = Experiment(**FIELDS, keep_best=by)
    assert Experiment.from_toml(run.to_toml()) == run
