"""A loss gets what the module returns, in the module's own order and by its own keys."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from tests.train.runs import verified
from workbench.model.errors import ModelError
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import SGD, Experiment, Metric
from workbench.plan.io.errors import PlanError
from workbench.plan.plans.plan import Plan

torch.manual_seed(0)
DATA = TensorDataset(torch.randn(24, 6).double(), torch.arange(24) % 3)
STEPS, ROWS = 3, 24


class Heads(nn.Module):
    """Two heads, and what a subclass returns of them."""

    def __init__(self):
        super().__init__()
        self.body, self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(8, 3)

    def forward(self, x):
        h = self.body(x).tanh()
        return self.returned(h, self.first(h), self.second(h))


class Reversed(Heads):
    returned = staticmethod(lambda h, first, second: (first, second))


class Among(Heads):
    returned = staticmethod(lambda h, first, second: (h, first, h.abs(), second))


class Keyed(Heads):
    returned = staticmethod(lambda h, first, second: {"b": first, "a": second, "h": h})


class Alone(Heads):
    returned = staticmethod(lambda h, first, second: {"scores": second, "h": h})


def of_two(outputs, labels):
    first, second = outputs
    assert first.shape[1] == 2
    return F.cross_entropy(second, labels, reduction="none") + 0.1 * first.square().mean(1)


def of_keys(outputs, labels):
    assert set(outputs) == {"a", "b"}
    return of_two((outputs["b"], outputs["a"]), labels)


def of_one_key(outputs, labels):
    return F.cross_entropy(outputs["scores"], labels, reduction="none")


CASES = {
    "the prediction comes last": (Reversed, ("auxiliary", "prediction"), of_two),
    "among unused ones": (Among, ("unused", "auxiliary", "unused", "prediction"), of_two),
    "by keys": (Keyed, {"a": "prediction", "b": "auxiliary"}, of_keys),
    "by one key": (Alone, {"scores": "prediction"}, of_one_key),
}


@pytest.mark.parametrize("name", CASES)
def test_a_loss_and_a_metric_get_what_the_module_returns(on_ranks, tmp_path, name):
    kind, roles, loss = CASES[name]
    net = kind()
    graph = trace(net, input_shape=(6,), outputs=roles)
    plan = Plan.data_parallel(graph, 2, (2, 1))
    plan = plan.with_layer("second", scheme="shard_out", group_size=2, shares=(2, 1))
    run = Experiment(
        plan=plan,
        data=(DATA, DATA),
        loss=loss,
        metrics={"again": Metric(loss)},
        batch_size=ROWS,
        steps=STEPS,
        optimizer=SGD(lr=0.1),
        precision="fp64",
    )
    found = verified(on_ranks, tmp_path, run, net)
    assert found.exact, found
    assert {d.name for d in found.differences if d.what == "evaluation"} == {"loss", "again"}
    assert Plan.from_toml(plan.to_toml()).graph.keys == graph.keys


def test_the_prediction_is_the_first_for_the_library_itself():
    kind, roles, _ = CASES["the prediction comes last"]
    graph = trace(kind(), input_shape=(6,), outputs=roles)
    assert (graph.outputs, graph.num_classes, graph.keys) == (("second", "first"), 3, (1, 0))
    assert graph.arranged(graph.outputs) == ("first", "second")


def test_one_tensor_stays_one():
    graph = trace(nn.Linear(6, 3), input_shape=(6,))
    assert graph.keys == ()
    assert graph.arranged(["scores"]) == "scores"


@pytest.mark.parametrize("keys", ["[0]", "[0, 0]", "[0, 2]", '["a"]', '["a", 1]', '["a", "a"]'])
def test_a_text_with_other_keys_is_refused(keys):
    kind, roles, _ = CASES["the prediction comes last"]
    text = Plan.data_parallel(trace(kind(), input_shape=(6,), outputs=roles), 1).to_toml()
    assert "keys = [1, 0]" in text
    with pytest.raises((PlanError, ModelError), match=r"keys|changed by hand"):
        Plan.from_toml(text.replace("keys = [1, 0]", f"keys = {keys}"))


def test_a_text_with_a_key_twice_is_refused():
    graph = replace(trace(nn.Linear(6, 3), input_shape=(6,)), keys=(0, 0))
    with pytest.raises(PlanError, match=r"keys: 1 places or names, got \(0, 0\)"):
        Plan.from_toml(Plan.data_parallel(graph, 1).to_toml())
