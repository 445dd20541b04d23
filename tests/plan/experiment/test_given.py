"""What people give from torch, or forget: told in one line, with what is valid."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.plan.graphs import vgg
from workbench.plan.experiment.experiment import (
    SGD,
    Experiment,
    Metric,
    ParameterGroup,
    Synchronous,
    TorchData,
)
from workbench.plan.io.errors import ExperimentError
from workbench.plan.plans.plan import Plan

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
        (dict(loss=nn.CrossEntropyLoss), r"is a class: give an object.*CrossEntropyLoss\(...\)"),
        (dict(loss=5), "function: int is no function"),
        (dict(metrics={"hits": 3}), "sums: int is no function"),
        (dict(keep_best="loss", data=TorchData(train=ROWS)), "as data has no test split"),
        (dict(evaluate_every=2, data=ROWS), r"evaluate_every: .* data=\(train, test\), or leave"),
        (dict(metrics={"m": len}, data=ROWS), "metrics: nothing is evaluated"),
        (
            dict(metrics={"m": len}, evaluate_every=2, data=ROWS),
            "or leave metrics and evaluate_every out",
        ),
    ],
)
def test_what_is_not_of_the_workbench(fields, said):
    with pytest.raises(ExperimentError, match=said):
        Experiment(**FIELDS | fields)


def test_a_value_prints_what_was_given():
    value = SGD(0.1, groups=[ParameterGroup(dims=1, lr=0.2)])
    assert eval(repr(value)) == value
    assert repr(SGD(0.1)) == "SGD(lr=0.1)"


def test_an_experiment_shows_what_was_given():
    data = TorchData(train=ROWS, samples=4)
    shown = Experiment(**FIELDS | dict(data=data, loss=nn.L1Loss(), ema=0.9))._repr_html_()
    assert data.samples == (4, 0)
    for said in ("TensorDataset, 10 steps of 128, sgd lr=0.001", "L1Loss)", "<td", ">0.9<"):
        assert said in shown
    assert "clip_norm" not in shown


@pytest.mark.parametrize("by", ["loss", "accuracy", "-accuracy"])
def test_what_evaluations_have_can_be_best(by):
    run = Experiment(**FIELDS, keep_best=by)
    assert Experiment.from_toml(run.to_toml()) == run
