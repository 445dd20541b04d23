"""An operation whose backward pass mixes samples is refused, though its forward pass does not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.model.traced import calling
from workbench.model import TraceError, trace
from workbench.plan.graph.graph import Input


class ByNorm(torch.autograd.Function):
    """The identity, whose gradient has the norm 1 over the whole batch."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.norm()


class Reversed(torch.autograd.Function):
    """The identity, with the gradient of each sample reversed."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


@torch.fx.wrap
def by_norm(x):
    return ByNorm.apply(x)


@torch.fx.wrap
def reversed_gradient(x):
    return Reversed.apply(x)


def between(forward):
    return calling(forward, first=nn.Linear(8, 8), last=nn.Linear(8, 3))


def hooked(hook):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    model[1].register_full_backward_hook(lambda module, given, result: (hook(given[0]),))
    return model


class Tokens(nn.Module):
    """A model of token ids, which `embed` looks up."""

    def __init__(self, embed):
        super().__init__()
        self.table, self.head, self.embed = nn.Parameter(torch.rand(50, 8)), nn.Linear(48, 3), embed

    def forward(self, x):
        return self.head(self.embed(x, self.table).flatten(1))


def tokens(**options):
    return nn.Sequential(nn.Embedding(50, 8, **options), nn.Flatten(), nn.Linear(48, 3))


def test_refuses_a_function():
    with pytest.raises(TraceError, match="the backward pass of by_norm mixes samples"):
        trace(between(lambda self, x: self.last(by_norm(self.first(x)))), input_shape=(8,))


def test_takes_a_function_that_treats_samples_by_themselves():
    model = between(lambda self, x: self.last(reversed_gradient(self.first(x))))
    assert trace(model, input_shape=(8,))["first"].kind == "linear"


def test_refuses_a_hook():
    with pytest.raises(TraceError, match="the backward pass of ReLU mixes samples"):
        trace(hooked(lambda gradient: gradient / gradient.norm()), input_shape=(8,))


def test_a_hook_that_treats_samples_by_themselves_keeps_its_layer_whole():
    assert trace(hooked(lambda gradient: 2 * gradient), input_shape=(8,))["1"].kind == "op"


@pytest.mark.parametrize(
    "model",
    [
        tokens(scale_grad_by_freq=True),
        Tokens(lambda x, table: F.embedding(x, table, scale_grad_by_freq=True)),
    ],
)
def test_refuses_gradients_by_frequency_in_the_batch(model):
    with pytest.raises(TraceError, match=r"the gradient of its weights.*scale_grad_by_freq"):
        trace(model, input_shape=(6,), vocabulary=50)


def test_refuses_sparse_gradients():
    with pytest.raises(TraceError, match=r"sparse gradients.*sparse=False"):
        trace(tokens(sparse=True), input_shape=(6,), vocabulary=50)


@pytest.mark.parametrize("model", [tokens(padding_idx=0), Tokens(F.embedding)])
def test_takes_embeddings(model):
    assert trace(model, input_shape=(6,), vocabulary=50).vocabulary == 50


def test_takes_comparisons_with_a_constant():
    class UpTo(nn.Module):
        """Sums a sequence up to each sample's length."""

        def forward(self, x, lengths):
            there = torch.arange(5)[None] < lengths[:, None]
            return (x * there[..., None]).sum(1)

    lengths = Input((), vocabulary=6)
    graph = trace(UpTo(), inputs={"x": (5, 4), "lengths": lengths})
    assert graph["lt"].rows == 1
