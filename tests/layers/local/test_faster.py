import pytest
import torch
from torch import nn
from torch.testing import assert_close

from workbench.layers.cut import cut
from workbench.layers.local.context import BatchContext
from workbench.layers.local.faster import Linear, Repeat, Transposed
from workbench.model.record.extended import TransposedLinear
from workbench.model.tracing.trace import trace
from workbench.model.weights.initial import initialize
from workbench.model.weights.slices import WeightsFile
from workbench.plan.plans.plan import Plan


def pair(in_features=6, out_features=4, bias=True, dtype=torch.float64):
    theirs = nn.Linear(in_features, out_features, bias=bias, dtype=dtype)
    copy = nn.Linear(in_features, out_features, bias=bias, dtype=dtype)
    copy.load_state_dict(theirs.state_dict())
    return theirs, Linear(copy)


def gradients(layer, x, calls=1):
    x = x.clone().requires_grad_()
    y = x
    for _ in range(calls):
        y = layer(y).relu()
    (y * torch.arange(y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    return [x.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6), (0, 6), (6,)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_computes_what_torch_does(shape, bias, dtype):
    theirs, ours = pair(bias=bias, dtype=dtype)
    x = torch.randn(shape, dtype=dtype)
    assert torch.equal(ours(x), theirs(x))
    for found, expected in zip(gradients(ours, x), gradients(theirs, x), strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6)])
def test_its_output_may_be_changed_in_place(shape):
    theirs, ours = pair()
    x = torch.randn(shape, dtype=torch.float64)
    for layer in (ours, theirs):
        changed = layer(x).add_(0.5)
        changed.square().sum().backward()
    assert_close(ours.weight.grad, theirs.weight.grad)
    assert_close(ours.bias.grad, theirs.bias.grad)


def test_a_gradient_lies_where_the_last_one_was():
    _, ours = pair()
    first = gradients(ours, torch.randn(5, 6, dtype=torch.float64))[1]
    place = first.data_ptr()
    ours.spare.give(first)
    ours.weight.grad = None
    del first
    x = torch.randn(3, 6, dtype=torch.float64)
    theirs = nn.Linear(6, 4, dtype=torch.float64)
    theirs.load_state_dict(ours.state_dict())
    found = gradients(ours, x)[1]
    assert found.data_ptr() == place
    assert_close(found, gradients(theirs, x)[1])


def test_a_layer_that_is_called_twice_uses_the_memory_once():
    theirs, ours = pair(6, 6)
    ours.spare.give(torch.full((6, 6), torch.nan, dtype=torch.float64))
    x = torch.randn(5, 6, dtype=torch.float64)
    for found, expected in zip(gradients(ours, x, 2), gradients(theirs, x, 2), strict=True):
        assert_close(found, expected)


def test_further_backward_passes_add_up():
    theirs, ours = pair()
    ours.spare.give(torch.full((4, 6), torch.nan, dtype=torch.float64))
    for rows in (3, 0, 5):
        x = torch.randn(rows, 6, dtype=torch.float64)
        gradients(theirs, x)
        gradients(ours, x)
    assert_close(ours.weight.grad, theirs.weight.grad)
    assert_close(ours.bias.grad, theirs.bias.grad)


@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6), (0, 6), (6,)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_transposed_matrix_is_multiplied_as_it_lies(shape, bias):
    plain, ours = transposed_pair(bias)
    x = torch.randn(shape, dtype=torch.float64)
    assert torch.equal(ours(x), plain(x))
    for found, expected in zip(gradients(ours, x), gradients(plain, x), strict=True):
        assert_close(found, expected)


def test_the_gradient_of_a_transposed_matrix_lies_where_the_last_one_was():
    plain, ours = transposed_pair(True)
    place = torch.full((6, 4), torch.nan, dtype=torch.float64)
    ours.spare.give(place)
    x = torch.randn(5, 6, dtype=torch.float64)
    assert_close(gradients(ours, x)[1], gradients(plain, x)[1])
    assert ours.weight.grad.data_ptr() == place.data_ptr()


def transposed_pair(bias):
    weight = torch.randn(6, 4, dtype=torch.float64)
    added = torch.randn(4, dtype=torch.float64) if bias else None
    made = [
        TransposedLinear(
            nn.Parameter(weight.clone()), None if added is None else nn.Parameter(added.clone())
        )
        for _ in range(2)
    ]
    return made[0], Transposed(made[1])


def test_under_autocast_it_is_torch_s_own():
    theirs, ours = pair(dtype=torch.float32)
    x = torch.randn(5, 6)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = gradients(ours, x), gradients(theirs, x)
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine, other)


def test_under_autocast_memory_that_nobody_writes_to_is_let_go():
    _, ours = pair(dtype=torch.float32)
    ours.spare.give(torch.empty(4, 6))
    with torch.autocast("cpu", torch.bfloat16):
        ours(torch.randn(5, 6))
    assert ours.spare.take() is None


@pytest.mark.parametrize("rows", [3, 0])
def test_a_pool_of_one_element_computes_what_torch_s_does(rows):
    x = torch.randn(rows, 4, 1, 1, dtype=torch.float64)
    weight = torch.randn(rows, 4, 3, 2, dtype=torch.float64)
    grads = []
    for pool in (nn.AdaptiveAvgPool2d((3, 2)), Repeat(3, 2)):
        leaf = x.clone().requires_grad_()
        y = pool(leaf)
        assert torch.equal(y, x.expand(rows, 4, 3, 2))
        (y * weight).sum().backward()
        grads.append(leaf.grad)
    assert_close(*grads)


@pytest.mark.parametrize(("kernel", "repeats"), [(3, True), (2, False), ((2, 3), False)])
def test_a_cut_model_repeats_where_images_are_of_one_element(tmp_path, kernel, repeats):
    net = nn.Sequential(nn.Conv2d(1, 2, kernel), nn.AdaptiveAvgPool2d((3, 2)), nn.Flatten())
    graph = trace(net, input_shape=(1, 3, 3))
    reader = WeightsFile(initialize(graph, 0, tmp_path, module=net))
    context = BatchContext(0, (2,))
    model = cut(Plan.data_parallel(graph, 1), context, {}, reader, device=torch.device("cpu"))
    assert any(isinstance(module, Repeat) for module in model.modules()) == repeats
    x = torch.randn(2, 1, 3, 3)
    assert_close(model(x)[0], net(x))
