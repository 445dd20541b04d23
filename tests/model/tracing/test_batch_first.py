"""Values whose batch lies elsewhere are recorded as ones that have it in dimension 0."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.model.traced import calling
from workbench.model import TraceError, skeleton, trace
from workbench.model.build import with_tensors
from workbench.model.record.batch import Moved

TOKENS, WIDTH = 5, 8
SMALL = (3, 4)


class Block(nn.Module):
    """A block of CLIP's: [tokens, B, features] in and out."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, 2, dropout=dropout)
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        y = self.ln_1(x)
        x = x + self.drop(self.attn(y, y, y, need_weights=False)[0])
        return x + self.mlp(self.ln_2(x))


def parts():
    torch.manual_seed(0)
    return dict(
        blocks=nn.Sequential(Block(), Block()),
        encoder=nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0), 2, enable_nested_tensor=False
        ),
        cross=nn.MultiheadAttention(WIDTH, 2),
        queries=nn.Embedding(4, WIDTH),
        norm=nn.LayerNorm((3, WIDTH)),
        lstm=nn.LSTM(WIDTH, 6, 2, bidirectional=True),
        gru=nn.GRU(WIDTH, 6, batch_first=True),
        rnn=nn.RNN(6, 6, 2),
        head=nn.Linear(WIDTH, 3),
        inside=nn.Linear(4, 12),
        slope=nn.PReLU(),
    )


def clip(self, x):
    x = self.blocks(x.permute(1, 0, 2)).permute(1, 0, 2)
    return self.head(x[:, 0])


def encoded(self, x):
    return self.head(self.encoder(x.transpose(0, 1)).mean(0))


def queried(self, x):
    memory = x.transpose(0, 1)
    query = self.queries.weight.unsqueeze(1).repeat(1, x.shape[0], 1)
    y, weights = self.cross(torch.zeros_like(query) + query, memory, memory)
    return self.head(y.transpose(0, 1)).mean(1) + weights.sum(1)[:, :3]


def causal(self, x):
    mask = torch.full((TOKENS, TOKENS), float("-inf")).triu(1)
    y = x.transpose(0, 1)
    return self.head(self.cross(y, y, y, attn_mask=mask)[0][-1])


def over_tokens(self, x):
    """A norm over tokens and features is no norm of features."""
    y = x[:, :3].transpose(0, 1)
    return self.head(F.gelu(y).softmax(-1).transpose(0, 1) + self.norm(x[:, :3])).sum(1)


def mixed(self, x):
    """What works over tokens lies between what does not."""
    y = F.relu(self.head(x.transpose(0, 1))).cumsum(0)
    return torch.tanh(y).amax(0)


def last_state(self, x):
    _, (h, c) = self.lstm(x.transpose(0, 1))
    return torch.cat((h[-2], c[-1]), 1)


def output_and_state(self, x):
    y, h = self.gru(x)
    return y.mean(1) + h.squeeze(0)


def begun(self, x):
    """The states of one are those that another begins with."""
    y, h = self.gru(x)
    z, h = self.rnn(y.transpose(0, 1), torch.cat((h, torch.zeros_like(h))))
    return z[-1] + h.sum(0)


def states_as_one(self, x):
    y, states = self.lstm(x.transpose(0, 1))
    y, states = self.lstm(x.flip(1).transpose(0, 1), states)
    return torch.stack(states).mean((0, 1)) + y[0, :, :6]


def qkv(self, x):
    rows, tokens, _ = x.shape
    return self.inside(x).reshape(rows, tokens, 3, 2, 2).permute(2, 0, 3, 1, 4)


def unbound(self, x):
    q, k, v = qkv(self, x).unbind(0)
    return (F.softmax(q @ k.transpose(-2, -1), -1) @ v).transpose(1, 2).flatten(1)


def taken_apart_late(self, x):
    """The first part is used before the others are taken out."""
    parts = qkv(self, x)
    q = torch.sin(parts[0]).view(parts.shape[1], 2, 3, 2)
    return (F.softmax(q @ parts[1].transpose(-2, -1), -1) @ parts[2]).transpose(1, 2).flatten(1)


def on_all_tokens(self, x):
    x = self.inside(x).transpose(0, 1)
    tokens, rows, width = x.shape
    x = torch.tanh(x.reshape(tokens * rows, width)).view(tokens, rows, width)
    x = x.cumsum(0)
    return (x * torch.rand(tokens, rows, width) if self.training else x).mean(0)


def by_a_part_of_the_way(self, x):
    """What lies between is computed with the batch in dimension 0."""
    y = self.inside(x).transpose(0, 1)
    scale = y.sum((0, 2)).view(-1, 1, 1).sigmoid()
    return (y * scale.transpose(0, 1)).sum(0)


def two(self, x):
    x = torch.stack([x, 2 * x]).sum(0)
    return torch.stack([x, x.exp()]).amax(0).flatten(1)


def assigned(self, x):
    y = self.inside(x).transpose(0, 1)
    x = x + 1
    x += 1
    y *= 2
    y[0] = 0.5
    return torch.cat([y.sum(0), x.flatten(1)], 1)


STATES = [last_state, output_and_state, begun, states_as_one]
WAYS = [(way, (TOKENS, WIDTH)) for way in (clip, encoded, queried, causal, over_tokens, mixed)]
WAYS += [(way, (TOKENS, WIDTH)) for way in STATES]
WAYS += [
    (way, SMALL)
    for way in (assigned, unbound, taken_apart_late, on_all_tokens, by_a_part_of_the_way, two)
]


def module(forward):
    return calling(forward, **parts()).eval()


def filled(graph, model):
    """The traced model with the values of the other."""
    traced = skeleton(graph, evaluating=graph.evaluation is not None).eval()
    values = dict(model.named_parameters())
    names = {id(tensor): name for name, tensor in traced.named_parameters()}
    return with_tensors(traced, lambda tensor: values[names[id(tensor)]].detach())


def moved(graph):
    nodes = skeleton(graph).graph.nodes
    return [node.name for node in nodes if isinstance(node.target, Moved)]


@pytest.mark.parametrize(("forward", "shape"), WAYS)
def test_the_traced_model_computes_the_same(forward, shape):
    model = module(forward)
    before = copy.deepcopy(model)
    traced = filled(trace(model, input_shape=shape), model)
    for rows in (1, 4) if shape != SMALL else (0, 1, 5):
        x = torch.randn(rows, *shape)
        torch.testing.assert_close(traced(x), model(x))
    assert [type(part) for part in model.modules()] == [type(part) for part in before.modules()]
    assert not model.cross.batch_first
    assert model.state_dict().keys() >= traced.state_dict().keys()


def test_a_block_is_as_one_that_gets_the_batch_first():
    """So its attention is cut by heads, and its linear layers in pairs."""
    graph = trace(module(clip), input_shape=(TOKENS, WIDTH))
    names = ("ln_1", "attn", "drop", "ln_2", "mlp.0", "mlp.1", "mlp.2")
    kinds = [graph[f"blocks.1.{name}"].kind for name in names]
    of_mlp = ["linear", "elementwise", "linear"]
    assert kinds == ["layer_norm", "attention", "elementwise", "layer_norm", *of_mlp]
    assert moved(graph) == []


def test_dropout_between_them_is_placed():
    torch.manual_seed(0)
    model = calling(clip, blocks=nn.Sequential(Block(0.1)), head=nn.Linear(WIDTH, 3))
    graph = trace(model, input_shape=(TOKENS, WIDTH))
    assert graph["blocks.0.drop"].kind == "dropout"
    assert graph["blocks.0.drop"].draws == (0,)


@pytest.mark.parametrize("forward", STATES)
def test_gradients_reach_what_states_are_made_of(forward):
    model = module(forward)
    traced = filled(trace(model, input_shape=(TOKENS, WIDTH)), model)
    x = torch.randn(3, TOKENS, WIDTH)
    for one in (model, traced):
        for parameter in one.parameters():
            parameter.requires_grad_()
        one(x).square().sum().backward()
    found = {name: p.grad for name, p in traced.named_parameters() if p.grad is not None}
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name])


def test_query_key_and_value_are_taken_out_of_values_that_have_the_batch_first():
    graph = trace(module(unbound), input_shape=SMALL)
    shapes = {layer.name: layer.output_shape for layer in graph.layers}
    assert moved(graph) == ["permute", "unbind"]
    assert shapes["permute"] == (3, 2, 3, 2)
    assert [shapes[name] for name in shapes if name.startswith("getitem")] == [(2, 3, 2)] * 3
    assert graph["permute"].target == "Tensor.permute"
    assert [graph[name].rows for name in ("permute", "unbind", "getitem_1")] == [1, 1, 1]


def test_flops_and_draws_are_those_inside():
    model = calling(lambda self, x: (x.transpose(0, 1) @ self.w).transpose(0, 1).flatten(1))
    model.w = nn.Parameter(torch.rand(3, 4, 5))
    graph = trace(model, input_shape=SMALL)
    (name,) = moved(graph)
    assert graph[name].flops == 2 * 3 * 4 * 5
    graph = trace(module(on_all_tokens).train(), input_shape=SMALL)
    assert [graph[name].draws for name in moved(graph) if graph[name].draws] == [(1,)]
    assert graph.evaluation is not None
    assert not any(layer.draws for layer in graph.evaluation.layers)


def test_equal_in_both_modes_it_is_one_graph():
    assert trace(module(unbound).train(), input_shape=SMALL).evaluation is None


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda self, x: x.transpose(0, 1), "transpose has the batch elsewhere"),
        (lambda self, x: x.transpose(0, 1).reshape(-1, 4), "transpose has the batch elsewhere"),
        (lambda self, x: x.flatten(1) @ x.flatten(1).t(), "matmul has the batch elsewhere"),
        (lambda self, x: self.slope(x.transpose(0, 1)).transpose(0, 1), "PReLU has weights"),
        (lambda self, x: x.transpose(0, 1).mul_(2).sum(0), "mul_ works in place"),
        (
            lambda self, x: F.softmax(x.transpose(0, 1), 1).transpose(0, 1),
            "softmax mixes samples",
        ),
    ],
)
def test_what_is_refused(forward, reason):
    with pytest.raises(TraceError, match=reason):
        trace(module(forward), input_shape=SMALL)
