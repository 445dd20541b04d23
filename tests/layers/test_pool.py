import pytest
import torch
from torch import nn
from torch.testing import assert_close

from workbench.layers.context import BatchContext
from workbench.layers.cut import cut
from workbench.layers.pool import Repeat
from workbench.model.slices import WeightsFile
from workbench.model.trace import trace
from workbench.model.weights import initialize
from workbench.plan.plan import Plan


@pytest.mark.parametrize("rows", [3, 0])
def test_it_computes_what_torch_s_pool_does(rows):
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
def test_a_cut_model_has_it_where_images_are_of_one_element(tmp_path, kernel, repeats):
    net = nn.Sequential(nn.Conv2d(1, 2, kernel), nn.AdaptiveAvgPool2d((3, 2)), nn.Flatten())
    graph = trace(net, input_shape=(1, 3, 3))
    reader = WeightsFile(initialize(graph, 0, tmp_path, module=net))
    context = BatchContext(0, (2,))
    model = cut(Plan.data_parallel(graph, 1), context, {}, reader, device=torch.device("cpu"))
    assert any(isinstance(module, Repeat) for module in model.modules()) == repeats
    x = torch.randn(2, 1, 3, 3)
    assert_close(model(x)[0], net(x))
