"""Decisions on the size of the batch, outputs by name, token ids, and lines under contexts."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.model.traced import calling
from workbench import Plan
from workbench.model import ModelError, TraceError, skeleton, trace
from workbench.plan.experiment.checks import Schedule, check_rows


@pytest.mark.parametrize(
    ("least", "decides"),
    [
        (1, lambda x: x.shape[0] >= 0),
        (1, lambda x: 2 * x.size(0) >= x.shape[0]),
        (2, lambda x: x.shape[0] != 1),
        (2, lambda x: len(x.shape) == 2 and x.shape[0] > 1),
    ],
)
def test_what_is_the_same_for_all_batches_is_decided(least, decides):
    model = calling(lambda self, x: self.inside(x * 2 if decides(x) else x))
    model.inside = nn.Linear(2, 3)
    graph = trace(model, input_shape=(2,))
    assert graph.least_batch == least
    assert graph.layers[-2].name.startswith("mul")
    plan = Plan.data_parallel(graph, 2)
    check_rows(plan, Schedule(4, 2, 1, (8, 8)))
    if least == 2:
        with pytest.raises(ValueError, match=r"a micro-batch of 1 of .* decides otherwise"):
            check_rows(plan, Schedule(3, 2, 1, (6, 3)))


@pytest.mark.parametrize(
    "decides", [lambda x: x.shape[0] > 7, lambda x: x.shape[0] % 2, lambda x: x.shape[0] < 500]
)
def test_what_differs_between_batches_is_refused(decides):
    with pytest.raises(TraceError, match="the size of the batch"):
        trace(calling(lambda self, x: x * 2 if decides(x) else x), input_shape=(2,))


def named(self, x):
    x = self.inside(x)
    return {"scores": x[:, :2], "hidden": x, "nothing": None}


def test_outputs_have_roles_by_name():
    model = calling(named, inside=nn.Linear(4, 3))
    graph = trace(model, input_shape=(4,), outputs={"scores": "prediction"})
    assert (graph.num_classes, len(graph.outputs), graph.roles) == (2, 1, ("prediction",))
    both = {"hidden": "auxiliary", "scores": "prediction"}
    graph = trace(model, input_shape=(4,), outputs=both)
    assert [graph[name].output_shape for name in graph.outputs] == [(2,), (3,)]
    for outputs, reason in (
        ({"logits": "prediction"}, "a dict with 'scores', 'hidden', 'nothing'; .* logits too"),
        ({"nothing": "prediction"}, "outputs names nothing too"),
    ):
        with pytest.raises(TraceError, match=reason):
            trace(model, input_shape=(4,), outputs=outputs)
    with pytest.raises(TraceError, match="give the roles in order"):
        trace(nn.Linear(4, 3), input_shape=(4,), outputs={"scores": "prediction"})


def test_what_no_graph_can_hold_is_left_out_of_a_dict():
    class Cache:
        def __init__(self, keys):
            self.keys = keys

    def forward(self, x):
        x = self.inside(x)
        return {"scores": x * 2, "cache": Cache(x), "caches": [Cache(x)], "number": 3}

    model = calling(forward, inside=nn.Linear(4, 3))
    graph = trace(model, input_shape=(4,), outputs={"scores": "prediction"})
    assert [layer.name for layer in graph.layers] == ["inside", "mul"]
    with pytest.raises(TraceError, match=r"a dict with 'scores', 'number'; .* cache too"):
        trace(model, input_shape=(4,), outputs={"scores": "prediction", "cache": "unused"})


@dataclass
class Scored:
    scores: torch.Tensor
    hidden: torch.Tensor
    nothing: None = None


def test_a_dataclass_is_a_dict_of_its_fields():
    def forward(self, x):
        x = self.inside(x)
        return Scored(x * 2, x)

    model = calling(forward, inside=nn.Linear(4, 3))
    graph = trace(model, input_shape=(4,), outputs={"scores": "prediction"})
    assert [layer.name for layer in graph.layers] == ["inside", "mul"]
    with pytest.raises(TraceError, match="a dict with 'scores', 'hidden', 'nothing'"):
        trace(model, input_shape=(4,))
    inner = calling(lambda self, x: (x, Scored(x, x)))
    with pytest.raises(TraceError, match=r"an object of .*\.Scored is returned"):
        trace(inner, input_shape=(4,))


def test_token_ids():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 2))
    graph = trace(model, input_shape=(3,), vocabulary=7)
    assert (graph.vocabulary, graph["0"].output_shape) == (7, (3, 4))
    assert graph.fingerprint != trace(model, input_shape=(3,), vocabulary=6).fingerprint
    with pytest.raises(TraceError, match=r"embedding|Embedding"):
        trace(model, input_shape=(3,), vocabulary=8)
    with pytest.raises(ModelError, match="the number of tokens, 1 or more, got 0"):
        trace(model, input_shape=(3,), vocabulary=0)
    with pytest.raises(ModelError, match="modules of your own"):
        trace("resnet18", vocabulary=5)


def contexts(self, x):
    with torch.no_grad():
        y = self.inside(x)
    with torch.autocast("cpu", enabled=False):
        z = F.linear(x, self.inside.weight)
    return self.inside(x) + y + z


def test_lines_under_contexts_stay_under_them():
    model = calling(contexts, inside=nn.Linear(4, 3))
    graph = trace(model, input_shape=(4,))
    names = [layer.name for layer in graph.layers]
    assert {"no_grad_linear", "no_autocast_linear"} <= set(names)
    values = {f"inside.{name}": t for name, t in model.inside.named_parameters()}
    x = torch.randn(5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.func.functional_call(skeleton(graph), values, (x,))
        assert torch.equal(found, model(x))
    wanted = torch.autograd.grad(model(x).sum(), model.inside.weight)[0]
    found = torch.func.functional_call(skeleton(graph), values, (x,))
    assert torch.equal(torch.autograd.grad(found.sum(), model.inside.weight)[0], wanted)


def test_the_limits_of_a_type_are_those_of_the_precision():
    def masked(self, x):
        lowest = torch.finfo(x.dtype).min
        return self.inside(x.masked_fill(x > 0, lowest).softmax(1))

    model = calling(masked, inside=nn.Linear(4, 3))
    graph = trace(model, input_shape=(4,))
    values = {name: tensor.double() for name, tensor in model.named_parameters()}
    x = torch.randn(5, 4, dtype=torch.float64)
    found = torch.func.functional_call(skeleton(graph), values, (x,))
    assert torch.equal(found, model.double()(x))


def test_a_module_that_is_made_in_forward_is_what_it_calls():
    model = calling(lambda self, x: nn.ReLU()(self.inside(x)), inside=nn.Linear(4, 3))
    assert trace(model, input_shape=(4,)).layers[-1].target == "torch.nn.functional.relu"
