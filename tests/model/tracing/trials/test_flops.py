"""Counting FLOPs: of recurrent layers, and saying so where they cannot be counted."""

import pytest
import torch
from torch import nn

from tests.model.traced import calling
from workbench.model import trace
from workbench.plan import Layer, Machine, Plan
from workbench.predict import predict


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("cls", "gates"), [(nn.RNN, 1), (nn.GRU, 3), (nn.LSTM, 4)])
def test_recurrent_layers(cls, gates, bidirectional):
    """Each of 5 steps multiplies by the weights of both layers and all directions once."""
    layer = cls(8, 4, 2, batch_first=True, bidirectional=bidirectional)
    graph = trace(calling(lambda self, x: self.layer(x)[0], layer=layer), input_shape=(5, 8))
    ways = 1 + bidirectional
    first, second = gates * 4 * (8 + 4) * ways, gates * 4 * (4 * ways + 4) * ways
    assert graph["layer"].flops == 2 * 5 * (first + second)
    assert graph.uncounted == ()


def test_what_cannot_be_counted_is_said():
    graph = trace(
        calling(lambda self, x: self.both(x, x), both=nn.Bilinear(8, 8, 4)), input_shape=(8,)
    )
    assert graph.uncounted == ("both",)
    assert "GFLOP per sample without those of both" in repr(graph)
    assert "FLOPs of both are not known" in graph._repr_html_()


@torch.fx.wrap
def by_another_library(x):
    return torch.ops.elsewhere.double(x)


def test_operations_of_other_libraries_are_not_known():
    torch.library.define("elsewhere::double", "(Tensor x) -> Tensor")
    torch.library.impl("elsewhere::double", "CompositeExplicitAutograd", lambda x: x * 2)
    graph = trace(calling(lambda self, x: by_another_library(x)), input_shape=(4,))
    assert graph.uncounted == ("by_another_library",)


@pytest.mark.parametrize(
    "module", [nn.LayerNorm((5, 8)), nn.RMSNorm((5, 8)), nn.GroupNorm(5, 5), nn.Embedding(4, 2)]
)
def test_what_does_no_such_operations_is_not_missed(module):
    def forward(self, x):
        return self.layer(x.abs().long().clamp(0, 3) if isinstance(module, nn.Embedding) else x)

    assert trace(calling(forward, layer=module), input_shape=(5, 8)).uncounted == ()


def test_what_is_not_known_is_unknown_and_not_0():
    graph = trace(
        calling(
            lambda self, x: self.both(x, x) + self.one(x),
            both=nn.Bilinear(8, 8, 8),
            one=nn.Linear(8, 8),
        ),
        input_shape=(8,),
    )
    assert graph["both"].flops is None
    assert graph["both"].flops_text == "unknown"
    assert graph["both"].counted_flops == 0
    assert graph["one"].flops == 2 * 8 * 8
    assert graph.flops == sum(layer.counted_flops for layer in graph.layers)
    assert "<td style='text-align:left'>unknown</td>" in graph._repr_html_()
    frame = graph.to_frame().set_index("layer")
    assert frame["flops"].isna().sum() == 1
    plan = Plan.data_parallel(graph, 2)
    assert Plan.from_toml(plan.to_toml()).graph == graph
    assert predict(plan, Machine.preset("h100-nvlink")).underestimated == ("both",)


def test_what_is_known_in_part_is_said_so():
    layer = Layer("x", "op", ("input",), (4,), (4,), flops=3_000_000, uncounted=True)
    assert layer.flops_text == "3.00 or more"
    assert Layer("x", "op", ("input",), (4,), (4,)).flops == 0
