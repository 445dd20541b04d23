"""What a gradient reaches is found by a backward pass, whatever the reason why it does not."""

import pytest
import torch
from torch import nn

from tests.model.traced import calling, traced
from workbench.model import TraceError, skeleton, trace
from workbench.model.vision import torchvision


def frozen(graph):
    return {w.name for layer in graph.layers for w in layer.weights if w.frozen}


def trained(graph):
    return {w.name for layer in graph.layers for w in layer.weights if w.trainable}


def expected(module, *shape):
    """The names of the parameters that torch's own backward pass gives a gradient."""
    module(torch.randn(4, *shape)).sum().backward()
    return {name for name, p in module.named_parameters() if p.grad is not None}


def linears(*names):
    return {name: nn.Linear(4, 4) for name in names}


def unused(self, x):
    return self.a(x)


def detached(self, x):
    return self.a(x) + self.b(x).detach()


def detached_above(self, x):
    return self.a(self.b(x).detach())


def both_ways(self, x):
    x = self.b(x)
    return self.a(x) + self.c(x.detach())


def compared(self, x):
    return torch.where(self.b(x) > 0, self.a(x), 0.0)


def data(self, x):
    return self.a(x) * self.b.weight.detach().sum()


def indices(self, x):
    return self.a(x) * self.b(x).argmax(1, keepdim=True)


def in_place(self, x):
    x = self.b(x)
    x.mul_(3)
    return self.a(x.view(-1, 2, 2).mul_(2).flatten(1))


def overwritten(self, x):
    return self.a(self.b(x).zero_() + x)


def twice(self, x):
    return self.a(self.a(x).detach())


def through_a_frozen_layer(self, x):
    self.c.requires_grad_(False)
    return self.c(self.a(x))


FORWARDS = [
    unused, detached, detached_above, both_ways, compared, data, indices, in_place, overwritten,
    twice, through_a_frozen_layer,
]  # fmt: skip


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.__name__)
def test_as_torch_gives_gradients(forward):
    module = calling(forward, **linears("a", "b", "c"))
    names = expected(module, 4)
    graph = traced(module, 4)
    assert trained(graph) == names
    assert trained(graph) | frozen(graph) == {name for name, _ in module.named_parameters()}


def test_layers_to_which_a_gradient_comes_back():
    graph = trace(calling(both_ways, **linears("a", "b", "c")), input_shape=(4,))
    assert graph.learning == {"a", "b", "c", "add"}
    assert [layer.name for layer in graph.layers if layer.detached] == ["detach"]
    graph = trace(calling(compared, **linears("a", "b")), input_shape=(4,))
    assert graph.learning == {"a", "where"}
    graph = trace(calling(twice, **linears("a")), input_shape=(4,))
    assert graph.learning == {"a@2"}
    assert graph["a"].detached


def test_tied_weights_of_which_one_use_is_detached():
    module = calling(detached, **linears("a", "b"))
    module.b.weight = module.a.weight
    graph = traced(module, 4)
    assert trained(graph) == {"a.weight", "a.bias"}
    assert frozen(graph) == {"b.bias"}
    assert graph["b"].detached


@pytest.mark.slow
def test_auxiliary_heads_are_trained():
    graph = trace("googlenet", input_shape=(3, 64, 64))
    assert not graph.frozen
    assert {"aux1.fc2", "aux2.fc2", "fc"} <= graph.learning


@pytest.mark.slow
def test_attention_and_leaves_of_torch():
    module = nn.Sequential(nn.Linear(6, 6), nn.MultiheadAttention(6, 2, batch_first=True))

    def forward(self, x):
        x = self.embed(x)
        y, _ = self.attention(x, x, x)
        return self.head(y.mean(1))

    module = calling(forward, embed=module[0], attention=module[1], head=nn.Linear(6, 3))
    module.attention.in_proj_weight.requires_grad_(False)
    graph = trace(module, input_shape=(5, 6))
    assert frozen(graph) == {"attention.in_proj_weight"}
    assert "attention" in graph.learning


def test_parameters_stay_parameters():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))
    module[1].requires_grad_(False)
    graph = traced(module, 3, 4, 4)
    held = skeleton(graph)
    assert {n: p.requires_grad for n, p in held.named_parameters()} == {
        n: p.requires_grad for n, p in module.named_parameters()
    }
    assert {n for n, _ in held.named_buffers()} == {n for n, _ in module.named_buffers()}
    assert "163 trained and 8 frozen parameters" in repr(graph)


def test_the_module_is_left_as_it_is():
    module = calling(detached, **linears("a", "b"))
    trace(module, input_shape=(4,))
    assert all(p.requires_grad and p.grad is None for p in module.parameters())


def test_a_backward_pass_that_depends_on_values():
    with pytest.raises(TraceError, match="backward pass cannot be followed"):
        trace(calling(lambda self, x: stubborn(self.a(x)), a=nn.Linear(4, 4)), input_shape=(4,))


class Stubborn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.stack([of_sample * of_sample.sum().item() for of_sample in grad])


def stubborn(x):
    return Stubborn.apply(x)


torch.fx.wrap("stubborn")


def modes(graph):
    return {layer.name: layer.evaluating for layer in graph.layers}


def normed():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 2))


def test_parts_in_eval_mode_stay_there():
    module = normed()
    module[1].eval()
    module[2].eval()
    graph = trace(module, input_shape=(4,))
    assert modes(graph) == {"0": False, "1": True, "2": True, "3": False}
    assert [layer.kind for layer in graph.layers] == [
        "linear",
        "batch_norm",
        "elementwise",
        "linear",
    ]
    held = skeleton(graph)
    assert [held.get_submodule(name).training for name in "0123"] == [True, False, False, True]


def test_a_module_in_eval_mode_is_put_into_training_mode():
    assert not any(modes(trace(normed().eval(), input_shape=(4,))).values())


class Keeps(nn.Sequential):
    """Keeps its batch norm in eval mode."""

    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        return self


@pytest.mark.parametrize("training", [True, False])
def test_train_says_which_parts_stay_in_eval_mode(training):
    module = Keeps(*normed())
    module.training = training
    assert modes(trace(module, input_shape=(4,))) == {"0": False, "1": True, "2": False, "3": False}
    assert module[1].training


def test_a_norm_without_running_statistics_has_but_one_mode():
    module = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2))
    module[0].eval()
    assert trace(module, input_shape=(4,))["0"].of_batch


def test_stochastic_depth_in_eval_mode_drops_nothing():
    module = nn.Sequential(nn.Linear(4, 4), torchvision().ops.StochasticDepth(0.5, "row"))
    module[1].eval()
    assert trace(module, input_shape=(4,))["1"].kind == "elementwise"
