"""A replayed graph computes what its code does, and drops what nobody reads any more."""

import weakref

import torch
import torch.fx
from torch import nn

from workbench.train.trace.tracer import Replay


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4))
        self.inner = nn.Module()
        self.inner.register_buffer("shift", torch.randn(4))

    def forward(self, x, y):
        h = self.fc(x).clamp(min=0.1, max=0.9)
        h.mul(3)  # nobody reads it
        h = torch.sub(h * self.scale, y, alpha=2)
        return h + self.inner.shift, h.sum(dim=1)


def traced():
    torch.manual_seed(0)
    return torch.fx.symbolic_trace(Net())


def test_it_computes_what_the_code_does():
    part, x, y = traced(), torch.randn(3, 4), torch.randn(3, 4)
    ran = []

    def run(given, node, call):
        assert given is part
        ran.append(node.name)
        return call()

    for found, expected in zip(Replay(part, run)(x, y), part(x, y), strict=True):
        assert torch.equal(found, expected)
    nothing = ("placeholder", "output", "get_attr")
    assert ran == [node.name for node in part.graph.nodes if node.op not in nothing]
    assert "mul" in ran


def test_a_value_goes_after_its_last_reader():
    part, held, most = traced(), [], []

    def run(given, node, call):
        found = call()
        held.append(weakref.ref(found))
        most.append(sum(ref() is not None for ref in held))
        return found

    with torch.no_grad():  # which would keep what backward needs
        Replay(part, run)(torch.randn(3, 4), torch.randn(3, 4))
    # fc; fc, clamp; clamp, mul; clamp, its multiple; that, sub; sub, add; sub, add, sum
    assert most == [1, 2, 2, 2, 2, 2, 3]
