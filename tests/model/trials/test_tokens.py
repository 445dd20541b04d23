"""Which operations compute each token of [rows, tokens, features] by itself."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from workbench.model.tracing.trace import trace
from workbench.plan.graph.saved import Propagation

TOKENS, WIDTH = 5, 8
EACH = Propagation(((1, 1),), (1, 1), TOKENS, of_tokens=True)


class Before(nn.Module):
    """A function, or a module, before a linear layer, on [rows, tokens, features]."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.last = nn.Linear(WIDTH, 3)
        self.each = nn.Parameter(torch.rand(WIDTH))
        self.places = nn.Parameter(torch.rand(TOKENS, WIDTH))

    def forward(self, x):
        of_module = isinstance(self.function, nn.Module)
        return self.last(self.function(x) if of_module else self.function(self, x))


def ways(function):
    graph = trace(Before(function), input_shape=(TOKENS, WIDTH))
    found = [way for layer in graph.layers for way in layer.propagations]
    return [way for way in found if way.of_tokens]


@torch.fx.wrap
def first_apart(x):
    """Gives the first token another factor."""
    return torch.cat([2 * x[:, :1], x[:, 1:]], 1)


@torch.fx.wrap
def by_count(x):
    return x / x.shape[1]


@pytest.mark.parametrize("module", [nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH), nn.PReLU()])
def test_a_norm_of_features_does(module):
    assert ways(module) == [EACH]


@pytest.mark.parametrize(
    "function",
    [
        lambda _, x: F.normalize(x, dim=-1),
        lambda _, x: x.softmax(-1),
        lambda _, x: x.flip(-1),
        lambda _, x: x[..., :WIDTH],
        lambda own, x: own.each * x,
        lambda _, x: x.view(-1, TOKENS, WIDTH),
    ],
)
def test_a_function_of_features_does(function):
    assert [(way.inputs[-1], way.output) for way in ways(function)] == [((1, 1), (1, 1))]


def test_what_has_no_rows_is_sliced_by_its_tokens():
    (way,) = ways(lambda own, x: x + own.places)
    assert (way.inputs, way.sliced) == (((1, 1), ()), ((1, 0),))
    (way,) = ways(lambda own, x: own.places[:, :1] * x)
    assert (way.inputs, way.sliced) == (((), (1, 1)), ((0, 0),))


def test_numbers_that_count_tokens_are_known():
    (way,) = ways(lambda _, x: x.view(-1, TOKENS, WIDTH))
    assert way.scaled == (2,)


@pytest.mark.parametrize(
    "function",
    [
        lambda _, x: x.softmax(1),
        lambda _, x: x.cumsum(1),
        lambda _, x: x.flip(1),
        lambda _, x: x.roll(1, 1),
        lambda _, x: F.layer_norm(x, (TOKENS, WIDTH)),
        lambda _, x: first_apart(x),
        lambda _, x: by_count(x),
        lambda _, x: F.dropout(x, 0.5, training=True).mul(2).flip(1),
        nn.LayerNorm((TOKENS, WIDTH)),
        nn.GroupNorm(1, TOKENS),
    ],
)
def test_what_mixes_or_counts_tokens_does_not(function):
    assert ways(function) == []


def test_a_module_with_buffers_is_left_alone():
    norms = nn.Sequential(nn.BatchNorm1d(TOKENS), nn.Linear(WIDTH, 3))
    graph = trace(norms, input_shape=(TOKENS, WIDTH))
    assert not any(layer.propagations for layer in graph.layers)
