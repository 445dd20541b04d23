"""Which kind an operation gets: a promise that cutting relies on."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.model.traced import calling, traced

IMAGE, FEATURES = (6, 8, 8), (12,)


def kind_of(call, shape=IMAGE):
    """The kind of the only layer between the input and the flattened output."""

    def forward(self, x):
        y = self.layer(x) if isinstance(call, nn.Module) else call(x)
        return y if y.ndim == 2 else y.flatten(1)

    attributes = {"layer": call} if isinstance(call, nn.Module) else {}
    graph = traced(calling(forward, **attributes), *shape)
    inner = [layer for layer in graph.layers if layer.kind not in ("size", "parameter")]
    assert len(inner) == 1 or inner[1].kind == "flatten"
    return inner[0].kind


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (nn.Conv2d(6, 4, 3), "conv2d"),
        (nn.Conv2d(6, 6, 3, groups=6), "conv2d"),
        (nn.Linear(8, 3), "linear"),
        (nn.BatchNorm2d(6), "batch_norm"),
        (nn.LayerNorm(8), "layer_norm"),
        (nn.GroupNorm(2, 6), "op"),
        (nn.InstanceNorm2d(6), "op"),
        (nn.Dropout(0.2), "dropout"),
        (nn.Dropout(0.0), "elementwise"),
        (nn.Dropout2d(0.2), "op"),
        (nn.ReLU(inplace=True), "elementwise"),
        (nn.GELU(), "elementwise"),
        (nn.Hardswish(), "elementwise"),
        (nn.Identity(), "elementwise"),
        (nn.PReLU(6), "op"),
        (nn.Softmax(1), "op"),
        (nn.MaxPool2d(2), "pool"),
        (nn.AvgPool2d(2), "pool"),
        (nn.AdaptiveAvgPool2d((2, 3)), "pool"),
        (nn.AdaptiveMaxPool2d(1), "pool"),
        (nn.Flatten(), "flatten"),
        (nn.Flatten(2), "op"),
        (nn.ConvTranspose2d(6, 4, 2), "op"),
        (nn.Upsample(scale_factor=2), "op"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else value,
)
def test_modules(module, kind):
    assert kind_of(module) == kind


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (F.relu, "elementwise"),
        (torch.tanh, "elementwise"),
        (lambda x: x.sigmoid(), "elementwise"),
        (lambda x: F.leaky_relu(x, 0.1), "elementwise"),
        (lambda x: x * 2, "elementwise"),
        (lambda x: 1 - x, "elementwise"),
        (lambda x: x / x.shape[1], "elementwise"),
        (lambda x: x.mul(0.5), "elementwise"),
        (lambda x: x**2, "elementwise"),
        (lambda x: torch.clamp(x, 0, 1), "elementwise"),
        (lambda x: F.dropout(x, 0.3), "dropout"),
        (lambda x: F.max_pool2d(x, 2), "pool"),
        (lambda x: F.avg_pool2d(x, 2), "pool"),
        (lambda x: F.adaptive_avg_pool2d(x, 1), "pool"),
        (lambda x: x.mean((2, 3)), "pool"),
        (lambda x: x.mean([-1, -2], keepdim=True), "pool"),
        (lambda x: x.mean(1), "op"),
        (lambda x: x.mean((1, 2)), "op"),
        (lambda x: x + x, "add"),
        (lambda x: torch.add(x, x), "add"),
        (lambda x: torch.add(x, x, alpha=2), "op"),
        (lambda x: operator.iadd(x, x), "add"),
        (lambda x: x * x, "mul"),
        (lambda x: x - x, "op"),
        (lambda x: torch.cat([x, x], 1), "op"),
        (lambda x: x.transpose(1, 2), "op"),
        (lambda x: x.softmax(1), "op"),
        (lambda x: x.reshape(x.shape[0], -1), "flatten"),
        (lambda x: x.view(-1, 384), "flatten"),
        (lambda x: torch.flatten(x, start_dim=1), "flatten"),
        (lambda x: x.flatten(2), "op"),
        (lambda x: x.flatten(start_dim=1, end_dim=2), "op"),
    ],
)
def test_functions(call, kind):
    assert kind_of(call) == kind


def test_flattening_features_changes_nothing():
    assert kind_of(lambda x: x.flatten(1), FEATURES) == "elementwise"


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (lambda x: x.mean((2, 3), keepdim=True), "mul"),  # a weight for each channel
        (lambda x: x.mean((1,), keepdim=True), "op"),  # for each place: channels are broadcast
        (lambda x: x.mean((1, 2, 3), keepdim=True), "op"),
    ],
)
def test_broadcasting_is_over_places_only(other, kind):
    graph = traced(calling(lambda self, x: (x * other(x)).flatten(1)), *IMAGE)
    assert graph["mul"].kind == kind


def test_a_parameter_is_no_activation():
    module = calling(lambda self, x: x + self.bias, bias=nn.Parameter(torch.ones(12)))
    assert traced(module, *FEATURES)["add"].kind == "op"


def test_a_subclass_may_compute_something_else():
    class Twice(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    graph = traced(calling(lambda self, x: self.layer(x), layer=Twice(12, 3)), *FEATURES)
    assert [layer.kind for layer in graph.layers] == ["linear", "elementwise"]


def test_hooks_may_compute_something_else():
    layer = nn.Linear(12, 3)
    layer.register_forward_hook(lambda module, args, output: output * 2)
    module = calling(lambda self, x: self.layer(x), layer=layer)
    assert traced(module, *FEATURES)["layer"].kind == "op"
