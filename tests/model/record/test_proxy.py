"""What the model's own code is told of values while it is traced: their types and shapes."""

import numpy as np
import pytest
import torch
from torch import nn

from tests.model.traced import calling, traced
from workbench.model import TraceError


def in_one_of_several(x):
    return all(isinstance(one, (list, torch.Tensor)) for one in (x, x + 1))


@pytest.mark.parametrize(
    "asks",
    [
        lambda self, x: isinstance(x, torch.Tensor),
        lambda self, x: torch.is_tensor(x),
        lambda self, x: x.__class__ is torch.Tensor,
        lambda self, x: in_one_of_several(x),
        lambda self, x: not isinstance(x, tuple | list | nn.Parameter),
        lambda self, x: isinstance(self.inside.weight, nn.Parameter),
        lambda self, x: isinstance(self.inside.weight, torch.Tensor),
        lambda self, x: not isinstance(self.inside.weight * 1, nn.Parameter),
        lambda self, x: isinstance(x.shape, torch.Size) and isinstance(x.size(), tuple),
        lambda self, x: isinstance(x.shape[1:], torch.Size) and isinstance(x.shape[0], int),
        lambda self, x: isinstance(x.shape[:1] + x.shape[1:], torch.Size),
    ],
)
def test_types_are_those_of_the_values(asks):
    def forward(self, x):
        x = self.inside(x)
        return x * 2 if asks(self, x) else x

    graph = traced(calling(forward, inside=nn.Linear(4, 3)), 4)
    assert graph.layers[-1].name.startswith("mul")


def test_shapes_count_their_elements():
    def forward(self, x):
        x = self.inside(x)
        assert x.shape[1:].numel() == 15
        return x.view(-1, x.shape.numel() // len(x.shape[:1]) // x.shape[0])

    traced(calling(forward, inside=nn.Linear(4, 3)), 5, 4)


def test_torch_is_not_told_so():
    """It would take a proxy for the tensor that its value is, and read other memory."""

    def forward(self, x):
        x = self.inside(x)
        table = torch.ones(4)
        assert isinstance(x, torch.Tensor)
        return x + table[(x[:, 0] > 0).long()][:, None]

    traced(calling(forward, inside=nn.Linear(4, 3)), 4)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x / np.sqrt(8),
        lambda x: np.float32(2) * x,
        lambda x: np.int64(1) - x,
        lambda x: x.view(-1, np.prod(x.shape[1:])),
        lambda x: x[:, np.int64(1) : np.int64(2)] if np.bool_(True) else x,
    ],
)
def test_numbers_of_numpy_are_numbers(call):
    traced(calling(lambda self, x: call(self.inside(x)), inside=nn.Linear(4, 3)), 4)


def test_the_number_of_rows_follows_the_batch():
    def forward(self, x):
        assert len(x.shape) == 2
        table = torch.ones(3, 4)
        assert len(table) == 3
        y = self.inside(x.reshape(len(x), -1))
        return y / len(y[:, 0].shape) + torch.zeros(len(x), 1) * len(x)

    graph = traced(calling(forward, inside=nn.Linear(4, 3)), 4)
    assert "size" in {layer.kind for layer in graph.layers}
    assert len is LENGTH


LENGTH = len


@pytest.mark.parametrize(
    "loop",
    [
        lambda self, x: torch.stack([self.inside(row) for row in x]),
        lambda self, x: torch.stack([self.inside(x[row]) for row in range(len(x))]),
    ],
)
def test_a_loop_over_the_batch_is_refused(loop):
    with pytest.raises(TraceError, match=r"a loop over the batch(,|:) use operations"):
        traced(calling(loop, inside=nn.Linear(4, 3)), 4)
