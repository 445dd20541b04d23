"""Refusals that name the likely cause and a remedy, and the remedies at work."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from torch.nn.utils.rnn import pack_padded_sequence

from tests.model.traced import calling
from workbench.model import TraceError, trace
from workbench.plan.graph.graph import Input


@pytest.mark.parametrize(
    "read",
    [
        lambda table, x: F.embedding(x, table),
        lambda table, x: table[x],
        lambda table, x: table.index_select(0, x.flatten()).view(len(x), -1, 4),
        lambda table, x: table[:3].expand(len(x), 3, 4).gather(1, x[..., None].expand(-1, -1, 4)),
        lambda table, x: F.one_hot(x, 5) @ table,
        lambda table, x: table.flatten().take(x),
    ],
)
def test_real_numbers_that_are_used_as_indices(read):
    model = calling(lambda self, x: read(self.table.weight, x), table=nn.Embedding(5, 4))
    with pytest.raises(TraceError, match=r"give vocabulary= to wb\.trace or to the wb\.Input"):
        trace(model, input_shape=(3,))


@pytest.mark.parametrize(
    "hide",
    [
        lambda x, mask: x.masked_fill(mask, 0.0),
        lambda x, mask: torch.where(mask, x, 0.0),
        lambda x, mask: x * ~mask,
        lambda x, mask: x * (mask & mask),
        lambda x, mask: x.index_put((mask,), x.new_zeros(())),
    ],
)
def test_a_mask_that_is_declared_as_a_number(hide):
    model = calling(lambda self, x, mask: hide(x, mask))
    with pytest.raises(TraceError, match=r'mask (as|is) wb.Input\(shape, "bool"\)'):
        trace(model, inputs={"x": (4,), "mask": (4,)})
    assert trace(model, inputs={"x": (4,), "mask": Input((4,), "bool")}).num_classes == 4


@pytest.mark.parametrize(
    "look_up",
    [
        lambda self, x: self.table(x).flatten(1),
        lambda self, x: F.embedding(x, self.table.weight, max_norm=1.0).flatten(1),
    ],
)
def test_a_table_whose_rows_forward_scales(look_up):
    table = nn.Embedding(5, 4, max_norm=1.0)
    with pytest.raises(TraceError, match="max_norm is set: leave max_norm out"):
        trace(calling(look_up, table=table), input_shape=(3,), vocabulary=5)


def test_rows_that_are_scaled_when_they_are_looked_up():
    def forward(self, x):
        y = self.table(x)
        return (y / (y.norm(dim=-1, keepdim=True) / 1.0).clamp(min=1)).flatten(1)

    scales = calling(forward, table=nn.Embedding(5, 4))
    limited = nn.Embedding(5, 4, max_norm=1.0, _weight=scales.table.weight.detach().clone())
    tokens = torch.arange(5)[None]
    torch.testing.assert_close(scales(tokens), limited(tokens).flatten(1))
    assert trace(scales, input_shape=(3,), vocabulary=5).num_classes == 12


SEQUENCES = {"x": Input((6, 4)), "lengths": Input((), vocabulary=7)}


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = nn.LSTM(4, 3, batch_first=True, bidirectional=True)

    def forward(self, x, lengths):
        x = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.read(x)[1][0].transpose(0, 1).flatten(1)


class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = nn.LSTM(4, 3, batch_first=True)
        self.read_back = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x, lengths):
        order = (lengths[:, None] - 1 - torch.arange(x.shape[1])).clamp(min=0)
        back = torch.gather(x, 1, order[..., None].expand(-1, -1, x.shape[2]))
        rows, last = torch.arange(len(x)), lengths - 1
        return torch.cat([self.read(x)[0][rows, last], self.read_back(back)[0][rows, last]], 1)


def test_packed_sequences():
    with pytest.raises(TraceError, match="Give the layer the padded sequences"):
        trace(Packed(), inputs=SEQUENCES)


def test_padded_sequences_give_what_packed_ones_do():
    packed, padded = Packed(), Padded()
    for name, weight in packed.read.named_parameters():
        layer = padded.read_back if name.endswith("_reverse") else padded.read
        layer.get_parameter(name.removesuffix("_reverse")).data = weight.data
    x, lengths = torch.randn(4, 6, 4), torch.tensor([6, 1, 3, 5])
    torch.testing.assert_close(padded(x, lengths), packed(x, lengths))
    assert trace(padded, inputs=SEQUENCES).num_classes == 6


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_calls_with_other_weights():
    def forward(self, x):
        weights = {"weight": 2 * self.layer.weight, "bias": self.layer.bias}
        return torch.func.functional_call(self.layer, weights, (x,))

    layer = nn.Linear(4, 3)
    with pytest.raises(TraceError, match="register_parametrization"):
        trace(calling(forward, layer=layer), input_shape=(4,))
    register_parametrization(layer, "weight", Doubled())
    assert trace(nn.Sequential(layer), input_shape=(4,)).num_classes == 3
