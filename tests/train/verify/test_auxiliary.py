"""Verification of models with several outputs: heads that are trained beside, and unused ones."""

import torch
from torch import nn

from tests.train.verify.test_attention import exact
from workbench.model.tracing.trace import trace
from workbench.plan.plans.plan import Plan
from workbench.train.verify.whole_model import trained_on


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 5)
        self.beside, self.further = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.beside(h), self.head(h), h, self.further(torch.tanh(h))


def test_auxiliary_heads_are_trained_as_one_process_trains_them(on_ranks, tmp_path):
    torch.manual_seed(0)
    module = Heads()
    outputs = ("auxiliary", "prediction", "unused", "auxiliary")
    graph = trace(module, input_shape=(4,), outputs=outputs)
    plan = Plan.data_parallel(graph, 2).with_layer("beside", scheme="shard_out", group_size=2)
    found = exact(on_ranks, tmp_path, plan, module)
    compared = {d.name for d in found.differences if d.what == "output"}
    assert compared == {"head", "beside", "further"}


def test_heads_that_a_model_was_built_without_are_none():
    a, b = torch.zeros(1), torch.ones(1)
    assert trained_on(a) == (a,)
    assert trained_on((a, None, b)) == (a, b)
