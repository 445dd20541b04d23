"""Models that do something else in evaluation than in training, and what they return."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from workbench.model import ModelError, TraceError, skeleton, trace
from workbench.plan.plans.plan import Plan


class Branch(nn.Module):
    """Noise, functional dropout and a second head, all of them in training alone."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.aside = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        x = F.dropout(self.first(x), 0.3, self.training)
        if self.training:
            x = x * 2
            return self.last(x), self.aside(x)
        return self.last(x)


class Two(nn.Module):
    def __init__(self, give=lambda scores, features: (scores, features)):
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(6, 8), nn.Linear(8, 3), nn.BatchNorm1d(8)
        self.give = give

    def forward(self, x):
        x = self.first(x)
        return self.give(self.last(x), x)


def names(graph):
    return [layer.name for layer in graph.layers]


def test_both_modes_are_traced():
    graph = trace(Branch(), input_shape=(6,), outputs=("prediction", "auxiliary"))
    assert names(graph) == ["first", "dropout", "mul", "last", "aside"]
    assert graph.outputs == ("last", "aside")
    assert [layer.name for layer in graph.evaluation.layers if layer.rows] == [
        "first",
        "dropout",
        "last",
    ]
    assert graph.evaluation.outputs == ("last",)
    assert graph["dropout"].kind == "dropout"
    assert graph.evaluation["dropout"].kind == "elementwise"


@pytest.mark.slow
def test_one_graph_where_only_modules_change():
    block = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    assert trace(block, input_shape=(6,)).evaluation is None
    assert trace("resnet18").evaluation is None
    assert trace("googlenet").evaluation.outputs == ("fc",)


@pytest.mark.parametrize("evaluating", [False, True])
def test_each_mode_computes_what_the_module_does(evaluating):
    module = Branch().eval() if evaluating else Branch()
    module.first.requires_grad_(True)
    graph = trace(module, input_shape=(6,), outputs=("prediction", "auxiliary"))
    traced = skeleton(graph, evaluating=evaluating).to_empty(device="cpu")
    traced.load_state_dict(module.state_dict())
    x = torch.randn(4, 6)
    torch.manual_seed(0)
    found = traced(x)
    torch.manual_seed(0)
    expected = module(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.slow
def test_the_graph_of_evaluation_is_part_of_a_plan_s_text():
    graph = trace("googlenet", input_shape=(3, 64, 64))
    plan = Plan.hybrid(graph, 2)
    read = Plan.from_toml(plan.to_toml())
    assert read == plan
    assert read.graph.evaluation == graph.evaluation
    assert skeleton(graph, evaluating=True).graph.find_nodes(op="output")


@pytest.mark.slow
def test_weights_lie_in_evaluation_as_in_training():
    plan = Plan.hybrid(trace("googlenet", input_shape=(3, 64, 64)), 2)
    there = plan.evaluation.flow.weights
    used = {name: placed for name, placed in there.items() if not name.startswith("aux")}
    assert used == {name: plan.flow.weights[name] for name in used}


def test_several_outputs_are_refused_unless_they_are_declared():
    with pytest.raises(TraceError, match=r"returns 2 tensors, of shapes \(3,\), \(8,\)") as caught:
        trace(Two(), input_shape=(6,))
    assert 'outputs=("prediction", "unused")' in str(caught.value)
    with pytest.raises(TraceError, match=r"2 tensors.* and 3 declared"):
        trace(Two(), input_shape=(6,), outputs=("prediction", "unused", "unused"))


@pytest.mark.parametrize(
    "roles", ["features", ("prediction", "prediction"), ("unused",), ("prediction", "loss")]
)
def test_declarations_that_say_nothing(roles):
    with pytest.raises(ModelError, match="exactly one is the prediction"):
        trace(Two(), input_shape=(6,), outputs=roles)


def test_what_is_unused_is_not_trained_on():
    graph = trace(Two(), input_shape=(6,), outputs=("prediction", "unused"))
    assert graph.outputs == ("last",)
    assert graph.roles == ("prediction", "unused")


def test_the_prediction_need_not_come_first():
    module = Two(lambda scores, features: (features, scores))
    graph = trace(module, input_shape=(6,), outputs=("unused", "prediction"))
    assert graph.outputs == ("last",)
    assert graph.num_classes == 3


def test_what_nothing_reads_is_no_layer():
    class Aside(Two):
        def forward(self, x):
            torch.relu(self.first(x))
            return self.last(self.first(x))

    assert "relu" not in names(trace(Aside(), input_shape=(6,)))


def test_statistics_of_what_nothing_reads_would_be_lost():
    class Counts(Two):
        def forward(self, x):
            self.norm(self.first(x))
            return self.last(self.first(x))

    with pytest.raises(TraceError, match="'norm' keeps running statistics of what nothing"):
        trace(Counts(), input_shape=(6,))


def test_a_batch_norm_that_is_kept_in_eval_mode_takes_any_rows():
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    assert trace(module, input_shape=(6,))["1"].least_rows == 2
    module[1].eval()
    norm = trace(module, input_shape=(6,))["1"]
    assert norm.evaluating
    assert norm.least_rows == 0
