"""Which attention can be cut by heads, and which stays an operation like any other."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.model.traced import calling, run_traced, values_of
from workbench.model.tracing.trace import skeleton, trace

SWIN = {
    "swin_t": {"relative_position_bias_table", "relative_position_index"},
    "swin_v2_t": {
        "logit_scale", "relative_coords_table", "relative_position_index",
        "cpb_mlp.0.weight", "cpb_mlp.0.bias", "cpb_mlp.2.weight",
    },
}  # fmt: skip


def attention(**options):
    return nn.MultiheadAttention(12, 3, batch_first=True, **options)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"dropout": 0.5}])
def test_self_attention_is_one_layer_with_heads(options):
    def forward(self, x):
        y, _ = self.attend(x, x, x, need_weights=False)
        return y.mean(1)

    graph = trace(calling(forward, attend=attention(**options)), input_shape=(4, 12))
    layer = graph["attend"]
    assert (layer.kind, layer.heads, layer.inputs) == ("attention", 3, ("input",))
    assert graph.consumers["attend"] == ("mean",)
    assert layer.output_shape == (4, 12)
    assert layer.flops == 8 * 4 * 12 * 12 + 4 * 4 * 4 * 12


def test_it_computes_the_same():
    def forward(self, x):
        y = self.attend(query=x, key=x, value=x, need_weights=False)[0]
        return self.attend(y, y, y, None, False)[0].mean(1)

    module = calling(forward, attend=attention())
    graph = trace(module, input_shape=(4, 12))
    assert [layer.kind for layer in graph.layers] == ["attention", "attention", "op"]
    assert graph.shares_weights == {"attend", "attend@2"}
    x = torch.randn(3, 4, 12)  # torch takes another kernel where no gradient is needed
    assert_close(run_traced(skeleton(graph), values_of(module), x), module(x))


def weights_unread(self, x):
    return self.attend(x, x, x)[0].mean(1)


def weights_read(self, x):
    y, weights = self.attend(x, x, x)
    return y.mean(1) + weights.sum((1, 2))[:, None]


def of_two(self, x):
    return self.attend(x, 2 * x, x, need_weights=False)[0].mean(1)


def masked(self, x):
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    return self.attend(x, x, x, attn_mask=mask, need_weights=False)[0].mean(1)


def causal(self, x):
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    y = self.attend(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
    return y.flatten(1)


def causal_by_its_mask(self, x):
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    return self.attend(x, x, x, attn_mask=mask, is_causal=True)[0].mean(1)


def both(self, x):
    return causal(self, x) + self.attend(x, x, x, need_weights=False)[0].flatten(1)


@pytest.mark.parametrize(
    ("forward", "options", "kind"),
    [
        (causal, {}, "attention"),
        (causal_by_its_mask, {}, "op"),  # then torch reads the mask
        (both, {}, "op"),
        (weights_unread, {}, "attention"),
        (weights_read, {}, "op"),
        (of_two, {}, "op"),
        (masked, {}, "op"),
        (weights_unread, {"add_bias_kv": True}, "op"),
        (weights_unread, {"add_zero_attn": True}, "op"),
    ],
)
def test_what_is_more_than_self_attention_stays_whole(forward, options, kind):
    graph = trace(calling(forward, attend=attention(**options)), input_shape=(4, 12))
    assert graph["attend"].kind == kind


@pytest.mark.slow
@pytest.mark.parametrize("name", SWIN)
def test_attention_in_windows_is_one_layer_with_all_its_weights(name):
    graph = trace(name, input_shape=(3, 32, 32))
    found = [layer for layer in graph.layers if layer.kind == "attention"]
    assert [layer.heads for layer in found] == [3] * 2 + [6] * 2 + [12] * 6 + [24] * 2
    first = found[0]
    weights = {weight.name.removeprefix("features.1.0.attn.") for weight in first.weights}
    projections = {"qkv.weight", "qkv.bias", "proj.weight", "proj.bias"}
    assert weights == SWIN[name] | projections
    assert first.output_shape == first.input_shape == (8, 8, 96)


def test_causal_attention_computes_the_same():
    module = calling(causal, attend=attention()).double()
    traced = skeleton(trace(module, input_shape=(4, 12)))
    x = torch.randn(3, 4, 12, dtype=torch.float64)
    assert_close(run_traced(traced, values_of(module), x), module(x))


def plain(self, x):
    return self.encode(x).mean(1)


def with_mask(self, x):
    return self.encode(x, mask=self.mask).mean(1)


def with_truths(self, x):
    return self.encode(x, mask=self.mask < 0).mean(1)


def causally(self, x):
    return self.encode(x, mask=self.mask, is_causal=True).mean(1)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(
    ("forward", "kind"),
    [(plain, "attention"), (causally, "attention"), (with_mask, "op"), (with_truths, "op")],
)
def test_the_parts_of_torch_s_encoder_are_layers(forward, kind, norm_first):
    layer = nn.TransformerEncoderLayer(
        12, 3, 20, dropout=0.1, batch_first=True, norm_first=norm_first, activation="gelu"
    )
    encode = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(12), enable_nested_tensor=False)
    module = calling(forward, encode=encode).double()
    module.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(4).double())
    graph = trace(module, input_shape=(4, 12))
    kinds = {name: graph[f"encode.layers.1.{name}"].kind for name in ("self_attn", "linear1")}
    assert kinds == {"self_attn": kind, "linear1": "linear"}
    assert graph.evaluation is None
    x = torch.randn(3, 4, 12, dtype=torch.float64)
    traced = skeleton(graph).eval()
    assert_close(run_traced(traced, values_of(module), x), module.eval()(x))
