"""Layers that get tokens before the batch are recorded as ones that get the batch first."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.model.traced import calling
from workbench.model import skeleton, trace
from workbench.model.build import with_tensors
from workbench.model.tracing.rewrites.detours import Detour

TOKENS, WIDTH = 5, 8


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


WAYS = [clip, encoded, queried, causal, over_tokens, mixed]
STATES = [last_state, output_and_state, begun, states_as_one]


def module(forward):
    return calling(forward, **parts()).eval()


def filled(graph, model):
    """The traced model with the values of the other."""
    traced = skeleton(graph, evaluating=graph.evaluation is not None).eval()
    values = dict(model.named_parameters())
    names = {id(tensor): name for name, tensor in traced.named_parameters()}
    return with_tensors(traced, lambda tensor: values[names[id(tensor)]].detach())


@pytest.mark.parametrize("forward", WAYS + STATES)
@pytest.mark.parametrize("rows", [1, 4])
def test_the_traced_model_computes_the_same(forward, rows):
    model = module(forward)
    before = copy.deepcopy(model)
    traced = filled(trace(model, input_shape=(TOKENS, WIDTH)), model)
    x = torch.randn(rows, TOKENS, WIDTH)
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
    inside = [name for name, part in skeleton(graph).named_modules() if isinstance(part, Detour)]
    assert inside == ["blocks.1.transpose"]  # the last permute alone


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
