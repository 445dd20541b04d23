import pytest
import torch
from torch import nn
from torch.testing import assert_close

from workbench.layers.pool import Repeat


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
