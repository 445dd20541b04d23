"""Along which dimensions operations may be cut."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from workbench.model.tracing.trace import trace
from workbench.plan.graph.saved import Propagation

TOKENS, WIDTH, HEADS = 5, 24, 6


class Between(nn.Module):
    """A function between two linear layers, on [rows, tokens, features]."""

    def __init__(self, function, last=WIDTH):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, WIDTH), nn.Linear(last, 3), function
        self.each = nn.Parameter(torch.ones(WIDTH // HEADS))

    def forward(self, x):
        return self.last(self.function(self, self.first(x)))


def heads(x):
    return x.view(x.shape[0], TOKENS, HEADS, -1)


@torch.fx.wrap
def little(x):
    """Mixes heads, a little."""
    return x + 1e-7 * x.mean(2, keepdim=True)


@torch.fx.wrap
def roots(x):
    """Mixes heads; where one number is below 0, all are NaN."""
    return (x * x.flatten(1).amin(1).sqrt()[:, None, None, None]).cumsum(2)


def traced(module):
    return {layer.name: layer for layer in trace(module, input_shape=(TOKENS, 4)).layers}


def layers_of(function, last=WIDTH):
    return traced(Between(function, last))


def ways(function, last=WIDTH):
    layers = layers_of(function, last)
    return {name: layer.propagations for name, layer in layers.items() if layer.propagations}


def test_heads_go_through_views():
    found = ways(lambda _, x: heads(x).transpose(1, 2).relu().transpose(1, 2).reshape(x.shape))
    assert found == {
        "view": (Propagation(((2, 1), ()), (2, 1), HEADS, (3,)),),
        "transpose": (Propagation(((2, 1),), (1, 1), HEADS),),
        "transpose_1": (Propagation(((1, 1),), (2, 1), HEADS),),
        "reshape": (Propagation(((2, 1), ()), (2, 1), HEADS, (3,)),),
    }


def test_a_number_of_heads_is_counted_wherever_it_stands():
    found = ways(lambda _, x: x.view(x.shape[0], TOKENS, HEADS, 4).flatten(2))
    assert found["view"][0].scaled == (3,)
    found = ways(lambda _, x: x.view(-1, TOKENS, HEADS, 4).flatten(2))
    assert found["view"][0].scaled == (3,)
    found = ways(lambda _, x: x.unflatten(-1, (-1, 4)).flatten(2))
    assert found["unflatten"][0].scaled == ()


def test_units_are_the_coarsest_on_the_way():
    def both(_, x):
        return x.view(-1, TOKENS, 12, 2).flatten(2).view(-1, TOKENS, 8, 3).flatten(2)

    layers = layers_of(both)
    assert (layers["first"].output_units, layers["first"].output_blocks) == (4, 1)
    assert layers["last"].input_units == 4


@pytest.mark.parametrize("norm", [nn.RMSNorm(4), nn.LayerNorm(4)])
def test_norms_of_heads_that_are_modules(norm):
    class Normed(Between):
        def __init__(self):
            super().__init__(lambda own, x: own.norm(heads(x)).flatten(2))
            self.norm = norm

    (way,) = (w for w in traced(Normed())["norm"].propagations if not w.of_tokens)
    assert way == Propagation(((2, 1),), (2, 1), HEADS)


def test_blocks_are_cut_alike():
    def gated(_, x):
        low, high = x.chunk(2, -1)
        return low * high

    layers = layers_of(gated, WIDTH // 2)
    assert layers["chunk"].propagations == (Propagation(((2, 2),), (2, 1), 12),)
    assert (layers["first"].output_units, layers["first"].output_blocks) == (12, 2)
    assert layers["last"].input_units == 0  # any features


def test_one_input_may_be_whole():
    def masked(_, x):
        allowed = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        q = heads(x).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=allowed).transpose(1, 2).flatten(2)

    (way,) = ways(masked)["scaled_dot_product_attention"]
    assert way.inputs[:3] == ((1, 1),) * 3
    assert way.output == (1, 1)


def test_a_parameter_may_be_whole():
    found = ways(lambda module, x: (heads(x) * (1.0 + module.each)).flatten(2))
    assert found["mul"] == (Propagation(((2, 1), ()), (2, 1), HEADS),)
    found = ways(lambda module, x: (heads(x) * module.each).flatten(2) * module.each.mean())
    assert found["mul"] == (Propagation(((2, 1), ()), (2, 1), HEADS),)


def test_what_has_no_rows_is_sliced_by_heads():
    of_heads = Propagation(((1, 1), ()), (1, 1), HEADS, sliced=((1, 1),))

    def biased(function):
        def between(module, x):
            bias = function(module)
            return (heads(x).transpose(1, 2) + bias).transpose(1, 2).flatten(2)

        return between

    found = ways(biased(lambda _: torch.ones(1, HEADS, TOKENS, 1)))
    assert found["add"] == (of_heads,)
    found = ways(biased(lambda _: torch.ones(HEADS, 1, 1)))
    assert found["add"] == (replace(of_heads, sliced=((1, 0),)),)
    found = ways(biased(lambda module: module.first.weight[:HEADS, :1, None]), WIDTH)
    assert "add" not in found  # a linear layer's own weight, which that layer places


def test_what_has_rows_and_comes_whole_is_converted():
    def sunk(module, x):
        sinks = module.each.repeat(2)[:HEADS].view(1, HEADS, 1, 1).expand(len(x), -1, TOKENS, 1)
        return torch.cat([heads(x).transpose(1, 2), sinks], -1)[..., :-1].transpose(1, 2).flatten(2)

    assert ways(sunk)["cat"] == (Propagation(((1, 1), (1, 1)), (1, 1), HEADS),)


def test_a_layer_that_is_converted_has_no_units():
    """Of another dimension than its features."""

    class Mixed(Between):
        def __init__(self):
            super().__init__(None)
            self.other = nn.Linear(4, 4)

        def forward(self, x):
            q = heads(self.first(x)).transpose(1, 2)
            v = self.other(x[:, None].expand(-1, HEADS, -1, -1))
            return self.last(F.scaled_dot_product_attention(q, q, v).transpose(1, 2).flatten(2))

    layers = traced(Mixed())
    (way,) = layers["scaled_dot_product_attention"].propagations
    assert way.inputs == ((1, 1),) * 3
    assert (layers["first"].output_units, layers["other"].output_units) == (HEADS, 0)


def test_numbers_of_a_type_count_nothing():
    def filled(_, x):
        return heads(x).masked_fill(heads(x) > 1, torch.finfo(x.dtype).min).flatten(2)

    assert "masked_fill" in ways(filled)


def test_what_is_drawn_is_cut_too():
    def dropped(module, x):
        q = heads(x).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5 * module.training)
        return y.transpose(1, 2).flatten(2)

    (way,) = ways(dropped)["scaled_dot_product_attention"]
    assert (way.output, way.pieces, way.drawn) == ((1, 1), HEADS, 1)


REFUSED = {
    "heads are mixed": lambda _, x: (heads(x) + heads(x).mean(2, keepdim=True)).flatten(2),
    "a little, in one operation": lambda _, x: little(heads(x)).flatten(2),
    "added up one after the other": lambda _, x: heads(x).cumsum(2).flatten(2),
    "it makes NaN of some numbers": lambda _, x: roots(heads(x).sigmoid()).flatten(2),
    "it fails on some numbers": lambda _, x: F.binary_cross_entropy(
        heads(x).sigmoid(), heads(x).sigmoid(), reduction="none"
    ).flatten(2),
    "turned around": lambda _, x: heads(x).flip(2).flatten(2),
    "a softmax over them": lambda _, x: heads(x).softmax(2).flatten(2),
    "what is read whole is a layer's": lambda module, x: (
        heads(x) * module.last.weight[0, : WIDTH // HEADS]
    ).flatten(2),
}


@pytest.mark.parametrize("function", REFUSED.values(), ids=REFUSED)
def test_what_is_not_the_same_piece_by_piece_is_not_cut(function):
    layers = layers_of(function)
    assert layers["first"].output_units == layers["last"].input_units == 0


def test_a_cut_that_reaches_no_linear_layer_is_not_kept():
    class Ends(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, WIDTH)

        def forward(self, x):
            return heads(self.first(x)).sum(2)

    graph = trace(Ends(), input_shape=(TOKENS, 4))
    assert not any(layer.propagations for layer in graph.layers)


def test_layers_that_share_weights_have_any_features():
    class Shared(Between):
        def forward(self, x):
            y = heads(self.first(x)).flatten(2)
            return self.last(y) + self.last(heads(self.first(x + 1)).flatten(2))

    graph = trace(Shared(None), input_shape=(TOKENS, 4))
    assert {layer.output_units for layer in graph.layers} == {0}


def test_rows_are_counted_of_the_input():
    """What is cut has a group's rows, so that what counts it would have to gather it."""

    def function(_, x):
        y = heads(x)
        return y.reshape(y.shape[0], TOKENS, WIDTH)

    graph = trace(Between(function), input_shape=(TOKENS, 4))
    sizes = [layer for layer in graph.layers if layer.kind == "size"]
    assert [layer.inputs for layer in sizes] == [("input",)]
