"""What autograd saves of an operation is found by running it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from workbench.model.tracing.trace import trace
from workbench.plan.graph.saved import Saved
from workbench.plan.plans.plan import Plan

TOKENS, WIDTH, HEADS = 6, 16, 2


class Net(nn.Module):
    """A linear layer, one operation on its output, and a linear layer."""

    def __init__(self, of):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.register_buffer("table", torch.ones(TOKENS, WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.of = of

    def forward(self, x):
        return self.last(self.of(self, self.first(x)))


def heads(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def attention(net, x):
    return F.scaled_dot_product_attention(heads(x), heads(x), heads(x)).transpose(1, 2).flatten(2)


# The name of an operation's target, what it is in, and what is saved of it.
CASES = {
    "a view": ("unflatten", lambda net, x: heads(x).transpose(1, 2).flatten(2), Saved(view=True)),
    "no copy": ("contiguous", lambda net, x: x.contiguous(), Saved(view=True)),
    "a copy": ("contiguous", lambda net, x: x.mT.contiguous().mT, Saved()),
    "the same type": ("to", lambda net, x: x.to(torch.float32), Saved(view=True)),
    "a part of several": (
        "getitem",
        lambda net, x: x.chunk(2, -1)[0].repeat(1, 1, 2),
        Saved(view=True),
    ),
    "joined": ("cat", lambda net, x: torch.cat((x[..., 8:], x[..., :8]), -1), Saved()),
    "its output": ("softmax", lambda net, x: x.softmax(-1), Saved(output=True)),
    "its input": ("silu", lambda net, x: F.silu(x), Saved(inputs=(0,))),
    "in place": ("relu", lambda net, x: F.relu(x, inplace=True), Saved(inputs=(0,), view=True)),
    "a buffer is there anyway": ("mul", lambda net, x: x * net.table, Saved()),
    "a factor": ("mul", lambda net, x: net.scale * x, Saved(inputs=(1,), backward=1.0)),
    "a mask": (
        "masked_fill",
        lambda net, x: x.masked_fill(x > 0, 0.0),
        Saved(inputs=(1,)),
    ),
    "for no gradient": ("silu", lambda net, x: x + F.silu(x.detach()), Saved()),
    "statistics": (
        "RMSNorm",
        lambda net, x: net.norm(x),
        Saved(inputs=(0,), words=1.0, bytes=4 / WIDTH),
    ),
    "attention": (
        "scaled_dot_product_attention",
        attention,
        Saved(inputs=(0, 1, 2), output=True, bytes=4 / (WIDTH // HEADS)),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_was_seen(case):
    target, of, expected = CASES[case]
    graph = trace(Net(of), input_shape=(TOKENS, WIDTH))
    (first, *_) = (one for one in graph.layers if one.target.rpartition(".")[2] == target)
    assert first.saved == expected


def test_what_has_a_rule_of_its_own_has_none():
    graph = trace(Net(lambda net, x: x + x.mT.mT), input_shape=(TOKENS, WIDTH))
    assert {
        layer.kind: layer.saved for layer in graph.layers if layer.kind in ("linear", "add")
    } == {
        "linear": None,
        "add": None,
    }


def test_a_plan_s_text_holds_it():
    graph = trace(Net(attention), input_shape=(TOKENS, WIDTH))
    again = Plan.from_toml(Plan.data_parallel(graph, 2).to_toml()).graph
    assert [layer.saved for layer in again.layers] == [layer.saved for layer in graph.layers]
