"""Operations between which the batch lies elsewhere are one operation."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.model.traced import calling
from workbench.model import TraceError, skeleton, trace
from workbench.model.build import with_tensors
from workbench.model.tracing.rewrites.detours import Detour

TOKENS = (3, 4)


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


def tokens_first(self, x):
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


WAYS = [assigned, unbound, taken_apart_late, tokens_first, by_a_part_of_the_way, two]


def module(forward):
    torch.manual_seed(0)
    return calling(forward, inside=nn.Linear(4, 12), slope=nn.PReLU()).eval()


def detours(graph):
    traced = skeleton(graph)
    return [name for name, part in traced.named_modules() if isinstance(part, Detour)]


@pytest.mark.parametrize("forward", WAYS)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_the_traced_model_computes_the_same(forward, rows):
    model = module(forward)
    graph = trace(model, input_shape=TOKENS)
    values = dict(model.named_parameters())
    traced = skeleton(graph, evaluating=graph.evaluation is not None).eval()
    names = {id(tensor): name for name, tensor in traced.named_parameters()}
    traced = with_tensors(traced, lambda tensor: values[names[id(tensor)]].detach())
    x = torch.randn(rows, *TOKENS)
    assert torch.equal(traced(x), model(x))
    assert {name: tuple(t.shape) for name, t in traced.state_dict().items()} == {
        name: tuple(t.shape) for name, t in model.state_dict().items()
    }


def test_query_key_and_value_are_taken_out_in_one():
    graph = trace(module(unbound), input_shape=TOKENS)
    (name,) = detours(graph)
    detour = graph[name]
    assert (name, detour.kind, detour.rows, detour.output_shape) == ("permute", "op", 1, (2, 3, 2))
    parts = [layer.name for layer in graph.layers if layer.inputs == (name,)]
    assert [graph[part].output_shape for part in parts] == [(2, 3, 2)] * 3
    assert sum(layer.kind == "linear" for layer in graph.layers) == 1


def test_flops_and_draws_are_those_inside():
    model = calling(lambda self, x: (x.transpose(0, 1) @ self.w).transpose(0, 1).flatten(1))
    model.w = nn.Parameter(torch.rand(3, 4, 5))
    graph = trace(model, input_shape=TOKENS)
    (name,) = detours(graph)
    assert graph[name].flops == 2 * 3 * 4 * 5
    graph = trace(module(tokens_first).train(), input_shape=TOKENS)
    assert [graph[name].draws for name in detours(graph) if graph[name].draws] == [(1,)]
    assert graph.evaluation is not None
    assert not any(layer.draws for layer in graph.evaluation.layers)


def test_equal_in_both_modes_it_is_one_graph():
    assert trace(module(unbound).train(), input_shape=TOKENS).evaluation is None


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda self, x: x.transpose(0, 1), "transpose has the batch elsewhere"),
        (lambda self, x: x.transpose(0, 1).reshape(-1, 4), "transpose has the batch elsewhere"),
        (lambda self, x: x.flatten(1) @ x.flatten(1).t(), "t has the batch elsewhere"),
        (lambda self, x: self.slope(x.transpose(0, 1)).transpose(0, 1), "PReLU has weights"),
        (lambda self, x: x.transpose(0, 1).mul_(2).sum(0), "mul_ works in place"),
        (
            lambda self, x: F.softmax(x.transpose(0, 1), 1).transpose(0, 1),
            "softmax mixes samples",
        ),
    ],
)
def test_what_cannot_be_one_operation(forward, reason):
    with pytest.raises(TraceError, match=reason):
        trace(module(forward), input_shape=TOKENS)
