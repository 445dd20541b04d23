"""Which modules with a matrix of their own are linear layers, and which are not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from tests.model.traced import calling, run_traced, values_of
from workbench.model.tracing.trace import skeleton, trace

IN, OUT = 6, 4


class Own(nn.Module):
    """A matrix, and perhaps a bias, with a forward of the test's."""

    def __init__(
        self, forward, transposed=False, biased=True, square=False, names=("weight", "bias")
    ):
        super().__init__()
        sizes = (IN, IN) if square else (IN, OUT) if transposed else (OUT, IN)
        self.register_parameter(names[0], nn.Parameter(torch.randn(sizes)))
        if biased:
            self.register_parameter(names[1], nn.Parameter(torch.randn(IN if square else OUT)))
        self.act = nn.Tanh()
        self.by = forward

    def forward(self, x):
        return self.by(self, x)


def flat(self, x):
    rows = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
    return rows.view((*x.size()[:-1], self.weight.shape[1]))


LINEAR = {
    "torch's function": (lambda self, x: F.linear(x, self.weight, self.bias), False),
    "by name": (lambda self, x: F.linear(x, bias=self.bias, weight=self.weight), False),
    "a product and a sum": (lambda self, x: x @ self.weight.T + self.bias, False),
    "the sum first": (lambda self, x: self.bias + x.matmul(self.weight.t()), False),
    "no bias": (lambda self, x: torch.matmul(x, self.weight.transpose(0, 1)), False),
    "as GPT-2 has it": (flat, True),
    "a product": (lambda self, x: x @ self.weight + self.bias, True),
    "turned": (lambda self, x: F.linear(x, self.weight.mT, self.bias), True),
}


def model(inner):
    return calling(lambda self, x: self.inner(x).mean(1), inner=inner).double()


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("way", LINEAR)
def test_a_module_that_multiplies_by_its_matrix_is_a_linear_layer(way, square):
    forward, transposed = LINEAR[way]
    module = model(Own(forward, transposed, biased=way != "no bias", square=square))
    graph = trace(module, input_shape=(3, IN))
    layer = graph["inner"]
    assert (layer.kind, layer.transposed, layer.rows) == ("linear", transposed, 1)
    assert layer.output_shape == (3, IN if square else OUT)
    assert layer.flops == 2 * 3 * IN * layer.output_shape[-1]
    assert [w.name for w in layer.weights] == [
        f"inner.{n}" for n, _ in module.inner.named_parameters()
    ]
    assert not [one for one in graph.layers if one.kind == "parameter"]
    x = torch.randn(2, 3, IN, dtype=torch.float64)
    assert_close(run_traced(skeleton(graph), values_of(module), x), module(x))


NAMED = {
    "torch's function": (lambda self, x: F.linear(x, self.in_proj, self.offset), False),
    "a product": (lambda self, x: x @ self.in_proj + self.offset, True),
    "no bias": (lambda self, x: x @ self.in_proj.T, False),
}


@pytest.mark.parametrize("way", NAMED)
def test_its_parameters_may_have_any_names(way):
    forward, transposed = NAMED[way]
    inner = Own(forward, transposed, biased=way != "no bias", names=("in_proj", "offset"))
    inner.out = nn.Linear(OUT, IN)
    module = calling(lambda self, x: self.inner.out(self.inner(x)).mean(1), inner=inner).double()
    graph = trace(module, input_shape=(3, IN))
    layer, out = graph["inner"], graph["inner.out"]
    assert (layer.kind, layer.transposed, out.kind) == ("linear", transposed, "linear")
    own = ["in_proj"] if way == "no bias" else ["in_proj", "offset"]
    assert [layer.within(weight) for weight in layer.weights] == own
    assert [out.within(weight) for weight in out.weights] == ["weight", "bias"]
    x = torch.randn(2, 3, IN, dtype=torch.float64)
    assert_close(run_traced(skeleton(graph), values_of(module), x), module(x))


def test_parts_of_such_a_module_are_layers_of_their_own():
    module = model(Own(lambda self, x: self.act(F.linear(x, self.weight, self.bias))))
    graph = trace(module, input_shape=(3, IN))
    assert [graph[name].kind for name in ("inner", "inner.act")] == ["linear", "elementwise"]
    x = torch.randn(2, 3, IN, dtype=torch.float64)
    assert_close(run_traced(skeleton(graph), values_of(module), x), module(x))


def test_one_that_reads_another_has_what_it_gives():
    inner = nn.Sequential(Own(flat, True, square=True), Own(flat, True, square=True))
    graph = trace(model(inner), input_shape=(3, IN))
    assert graph["inner.1"].inputs == ("inner.0",)


def test_one_that_is_called_twice_owns_its_weights_once():
    inner = Own(flat, True, square=True)
    module = calling(lambda self, x: self.inner(self.inner(x)).mean(1), inner=inner)
    graph = trace(module, input_shape=(3, IN))
    assert (graph["inner@2"].kind, graph["inner@2"].shared) == ("linear", "inner")


OTHERS = {
    "scales its matrix": lambda self, x: F.linear(x, self.weight * 0.5, self.bias),
    "leaves its bias out": lambda self, x: F.linear(x, self.weight),
    "adds its bias twice": lambda self, x: F.linear(x, self.weight, self.bias) + self.bias,
    "uses its matrix elsewhere": lambda self, x: (
        F.linear(x, self.weight, self.bias) + self.weight.sum()
    ),
    "has the bias of a part of it": lambda self, x: F.linear(x, self.weight[:2], self.bias[:2]),
}


@pytest.mark.parametrize("way", OTHERS)
def test_a_module_that_does_something_else_stays_as_it_is(way):
    module = model(Own(OTHERS[way]))
    graph = trace(module, input_shape=(3, IN))
    assert "linear" not in {layer.kind for layer in graph.layers}
    x = torch.randn(2, 3, IN, dtype=torch.float64)
    assert_close(run_traced(skeleton(graph), values_of(module), x), module(x))


def test_a_module_with_a_buffer_or_another_matrix_stays_as_it_is():
    with_buffer, with_more = Own(LINEAR["torch's function"][0]), Own(LINEAR["torch's function"][0])
    with_buffer.register_buffer("seen", torch.zeros(1))
    with_more.more = nn.Parameter(torch.zeros(2))
    for inner in (with_buffer, with_more):
        graph = trace(model(inner), input_shape=(3, IN))
        assert "linear" not in {layer.kind for layer in graph.layers}
