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
    mask = nn.Transformer.generate_square_subsequent_mask(4, dtype=x.dtype)
    return self.attend(x, x, x, attn_mask=mask, need_weights=False)[0].mean(1)


def causal(self, x):
    mask = nn.Transformer.generate_square_subsequent_mask(4, dtype=x.dtype)
    y = self.attend(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
    return y.flatten(1)


def causal_by_its_mask(self, x):
    mask = nn.Transformer.generate_square_subsequent_mask(4, dtype=x.dtype)
    return self.attend(x, x, x, attn_mask=mask, is_causal=True)[0].mean(1)


def both(self, x):
    return causal(self, x) + self.attend(x, x, x, need_weights=False)[0].flatten(1)


@pytest.mark.parametrize(
    ("forward", "options", "kind"),
    [
        (causal, {}, "attention"),
        (weights_unread, {}, "attention"),
        (of_two, {}, "op"),
        (weights_unread, {"add_bias_kv": True}, "op"),
        (weights_unread, {"add_zero_attn": True}, "op"),
    ],
)
def test_what_is_more_than_self_attention_stays_whole(forward, options, kind):
    graph = trace(calling(forward, attend=attention(**options)), input_shape=(4, 12))
    assert graph["attend"].kind == kind


def padded(self, x):
    return self.attend(x, x, x, key_padding_mask=last(x), need_weights=False)[0].mean(1)


def padded_by_numbers(self, x):
    padding = torch.zeros(x.shape[:2], dtype=x.dtype).masked_fill(last(x), -2.0)
    return self.attend(x, x, x, key_padding_mask=padding)[0].mean(1)


def masked_twice(self, x):
    pairs = torch.ones(4, 4, dtype=torch.bool).triu(1)
    return self.attend(x, x, x, key_padding_mask=last(x), attn_mask=pairs)[0].mean(1)


def masked_by_head(self, x):
    pairs = x[:, None].sum(-1, keepdim=True).expand(-1, 3, -1, 4).flatten(0, 1)
    return self.attend(x, x, x, attn_mask=pairs)[0].mean(1)


def of_each_head(self, x):
    y, weights = self.attend(x, x, x, average_attn_weights=False)
    return y.mean(1) + weights.sum((1, 2, 3))[:, None]


def called_twice(self, x):
    x = self.attend(x, x, x, key_padding_mask=last(x))[0]
    return self.attend(x, x, x, need_weights=False)[0].mean(1)


def last(x):
    return (x[..., 0] > 0) & (torch.arange(4) > 0)


CUT = (
    causal_by_its_mask,  # which torch reads then
    masked, padded, padded_by_numbers, masked_twice,
)  # fmt: skip
WHOLE = (both, called_twice, weights_read, of_each_head, masked_by_head)


@pytest.mark.parametrize("options", [{}, {"bias": False}])
@pytest.mark.parametrize("forward", [*CUT, *WHOLE])
def test_masked_attention_is_written_out(forward, options):
    module = calling(forward, attend=attention(**options)).double()
    graph = trace(module, input_shape=(4, 12))
    inner, out = graph["attend"], graph["attend.out_proj"]
    assert (inner.kind, out.kind) == ("linear", "linear")
    names = [weight.name for layer in (inner, out) for weight in layer.weights]
    assert sorted(names) == sorted(f"attend.{name}" for name, _ in module.attend.named_parameters())
    assert ((inner.output_units, inner.output_blocks) == (3, 3)) == (forward in CUT)
    x = torch.randn(5, 4, 12, dtype=torch.float64)
    assert_close(run_traced(skeleton(graph), values_of(module), x), module(x))


@pytest.mark.parametrize("given", ["pads", "pairs"])
def test_tokens_may_come_first(given):
    def forward(self, x):
        pairs = torch.eye(4, dtype=x.dtype)
        masks = {"pads": dict(key_padding_mask=last(x)), "pairs": dict(attn_mask=pairs)}
        x = x.transpose(0, 1)
        y = self.attend(x, x, x, **masks[given])[0]
        return (x + y).transpose(0, 1).mean(1)

    attend = nn.MultiheadAttention(12, 3, dropout=0.5)
    module = calling(forward, attend=attend).double().eval()
    graph = trace(module, input_shape=(4, 12))
    assert (graph["attend"].output_units, graph["attend"].output_blocks) == (3, 3)
    x = torch.randn(5, 4, 12, dtype=torch.float64)
    traced = skeleton(graph, evaluating=True)
    assert_close(run_traced(traced, values_of(module), x), module(x))


def test_a_mask_may_have_the_type_of_what_has_its_tokens_first():
    def forward(self, x):
        x = x.transpose(0, 1)
        mask = self.mask.to(dtype=x.dtype, device=x.device)
        return self.attend(x, x, x, attn_mask=mask)[0].transpose(0, 1).mean(1)

    module = calling(forward, attend=nn.MultiheadAttention(12, 3)).double()
    module.register_buffer("mask", torch.eye(4).double())
    graph = trace(module, input_shape=(4, 12))
    assert (graph["attend"].output_units, graph["attend"].output_blocks) == (3, 3)
    x = torch.randn(5, 4, 12, dtype=torch.float64)
    assert_close(run_traced(skeleton(graph), values_of(module), x), module(x))


def test_what_drops_weights_does_so_in_training_alone():
    graph = trace(calling(padded, attend=attention(dropout=0.5)), input_shape=(4, 12))
    draws = [
        [layer.name for layer in one.layers if layer.draws] for one in (graph, graph.evaluation)
    ]
    assert draws == [["scaled_dot_product_attention"], []]


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
    [(plain, "attention"), (causally, "attention"), (with_mask, "linear"), (with_truths, "linear")],
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
    assert (graph.evaluation is None) == (kind == "attention")
    x = torch.randn(3, 4, 12, dtype=torch.float64)
    traced = skeleton(graph, evaluating=kind == "linear").eval()
    assert_close(run_traced(traced, values_of(module), x), module.eval()(x))
