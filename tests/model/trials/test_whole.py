"""What was traced is held against the module itself."""

import pytest
import torch
from torch import Tensor, nn

from workbench.model.errors import TraceError
from workbench.model.tracing.trace import trace
from workbench.plan.graph.graph import Input

OTHERWISE = "computes in {} something else than was traced of it: {}"


class Net(nn.Module):
    """Two linear layers, and between them a function of the net and what the first gives."""

    def __init__(self, between):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8)
        self.between = between

    def forward(self, x):
        return self.last(self.between(self, self.norm(self.first(x))))


def is_tensor(x):
    """No stand-in can answer it."""
    return type(x) is Tensor


def traced(between):
    return trace(Net(between), input_shape=(6,))


def doubled_backward(net, x):
    if is_tensor(x) and x.requires_grad:
        x.register_hook(lambda gradient: 2 * gradient)
    return x


def in_evaluation(net, x):
    return x if net.training or is_tensor(x) else 2 * x


@pytest.mark.parametrize(
    ("between", "mode", "what"),
    [
        (lambda net, x: x if is_tensor(x) else 2 * x, "training", "an output is off by"),
        (doubled_backward, "training", "the gradient of 'first.weight' is off by"),
        (in_evaluation, "evaluation", "an output is off by"),
    ],
)
def test_what_differs_is_refused(between, mode, what):
    with pytest.raises(TraceError, match=OTHERWISE.format(mode, what)):
        traced(between)


def test_a_graph_that_fails_is_refused():
    def between(net, x):
        singular = 0 * x[:, :, None] * x[:, None, :]
        return x if is_tensor(x) else torch.linalg.inv(singular)[:, 0]

    with pytest.raises(TraceError, match="runs in training, and what was traced of it fails"):
        traced(between)


def test_the_module_and_the_generator_stay_as_they_were():
    module, before = Net(lambda net, x: x.relu()), torch.get_rng_state()
    kept = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    trace(module, input_shape=(6,))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_numbers_drawn_at_random_are_no_difference():
    for between in (
        lambda net, x: torch.nn.functional.dropout(x, 0.5),
        lambda net, x: x + torch.randn_like(x),
    ):
        assert traced(between).layers


def test_no_number_is_no_difference():
    assert traced(lambda net, x: x / (x - x)).layers
    assert traced(lambda net, x: torch.where(x > 0, x.log(), x) * torch.inf).layers


class Several(nn.Module):
    """Two inputs, two outputs with a role in the other order, and one without."""

    def __init__(self, right):
        super().__init__()
        self.table, self.head, self.second = nn.Embedding(9, 4), nn.Linear(4, 3), nn.Linear(4, 3)
        self.right = right

    def forward(self, ids, mask):
        x = self.table(ids).masked_fill(~mask[..., None], 0.0).sum(1)
        more = self.second(x)
        if not (self.right or is_tensor(more)):
            more = 2 * more
        return {"features": x, "more": more, "scores": self.head(x)}


@pytest.mark.parametrize("right", [True, False])
def test_of_several_outputs_those_with_a_role_are_compared(right):
    inputs = {"ids": Input((5,), vocabulary=9), "mask": Input((5,), "bool")}
    roles = {"scores": "prediction", "more": "auxiliary"}
    if right:
        assert trace(Several(right), inputs=inputs, outputs=roles).outputs == ("head", "second")
        return
    with pytest.raises(TraceError, match=OTHERWISE.format("training", "an output is off by")):
        trace(Several(right), inputs=inputs, outputs=roles)


def test_a_module_without_values_is_traced():
    with torch.device("meta"):
        module = Net(lambda net, x: x)
    assert trace(module, input_shape=(6,)).layers
