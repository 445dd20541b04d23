"""The checks of schemes: the built-in ones pass, and each check finds what it is for."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.plan.placement.own import ByGroups, ConvOut, Inside, OtherSlice, Twice, Unsummed
from workbench.layers.scheme_checks import checks_of
from workbench.plan.placement.placement import Partial, Replicate, Shard
from workbench.plan.placement.schemes import Duplicated, ShardIn, ShardOut


class Columns(ShardIn):
    """As the built-in one, as a person's own."""


class Rows(ShardOut):
    """As the built-in one, as a person's own."""


class All(Duplicated):
    """As the built-in one, as a person's own."""

    def takes(self, layer):
        return layer.kind == "linear"


@pytest.mark.parametrize("scheme", [Columns(), Rows(), All(), ConvOut(), Inside(), ByGroups()])
def test_right_ones_pass(scheme):
    found = checks_of(scheme)
    assert len(found) == 7
    assert all(check.ok for check in found), [check for check in found if not check.ok]


class Reversed(Rows):
    """Wrong: the last rank's part is the first rank's."""

    def holds(self, layer, weight, division, read):
        return (
            Shard(0, division.sizes[::-1])
            if division.given
            else super().holds(layer, weight, division, read)
        )


class Overlapping(Rows):
    def takes(self, layer):
        raise IndexError("nothing there")


class BiasOfAll(Columns):
    """Wrong: the bias is in another rank's summand than the first, and so in none."""

    def local(self, module, layer, division, member):
        if getattr(module, "bias", None) is not None:
            module.register_parameter("unused_bias", module.bias)
            module.bias = None
        return module


class Capricious(Rows):
    """Wrong: what it states depends on how often it was asked."""

    asked = 0

    def layouts(self, layer, division, coming):
        Capricious.asked += 1
        read, given = super().layouts(layer, division, coming)
        if Capricious.asked % 5 == 0:
            return read, Shard(given.dim, given.sizes[::-1])
        return read, given


class Lazy(Rows):
    def flops(self, layer, division, member, read, given):
        return 0.1


class Differs(All):
    """Wrong: ranks that hold the same weights get different gradients."""

    def local(self, module, layer, division, member):
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                for name, parameter in module.named_parameters():
                    self.register_parameter(name, parameter)

            def forward(self, x):
                y = nn.functional.linear(x, self.weight, getattr(self, "bias", None))
                return torch.where(torch.tensor(member > 0), y + (y - y.detach()), y)

        return Scaled()


class Elsewhere(ShardIn):
    """Wrong: it is given the columns of others."""

    def takes(self, layer):
        return layer.kind == "linear"

    def layouts(self, layer, division, coming):
        return Replicate(), Partial()

    def holds(self, layer, weight, division, read):
        return super().holds(layer, weight, division, Shard(1, division.sizes))

    def local(self, module, layer, division, member):
        start, length = Shard(1, division.sizes).span(member)
        module.forward = lambda x: nn.functional.linear(
            x[..., : x.shape[-1]].roll(1, -1)[..., start : start + length],
            module.weight,
            module.bias,
        )
        return module


class ColumnsOfRows(Columns):
    """Wrong for matrices that lie the other way."""

    def holds(self, layer, weight, division, read):
        return super().holds(replace(layer, transposed=False), weight, division, read)


class RowsOfColumns(Rows):
    """Wrong for matrices that lie the other way."""

    def holds(self, layer, weight, division, read):
        return super().holds(replace(layer, transposed=False), weight, division, read)


@pytest.mark.parametrize(
    ("scheme", "failing"),
    [
        (ColumnsOfRows(), "outputs are those"),
        (RowsOfColumns(), "outputs are those"),
        (Overlapping(), "takes a layer"),
        (Unsummed(), "gradients of the input"),
        (OtherSlice(), "outputs are those"),
        (Twice(), "outputs are those"),
        (Reversed(), "outputs are those"),
        (BiasOfAll(), "outputs are those"),
        (Elsewhere(), "gradients of weights"),
        (Differs(), "gradients of weights"),
        (Capricious(), "states the same"),
        (Lazy(), "shares of the operations"),
    ],
)
def test_wrong_ones_are_found(scheme, failing):
    found = checks_of(scheme)
    (check,) = [check for check in found if failing in check.what]
    assert not check.ok, found


def test_layers_are_tried_in_groups_of_every_size_with_shares_of_every_kind():
    model = nn.Sequential(nn.Conv1d(3, 6, 3), nn.Flatten(), nn.Linear(36, 4))
    found = checks_of(ConvOut(), model, (3, 8))
    assert found[0].said == "12 divisions of torch.nn.Conv1d"  # 2, 3, 4; equal, and three others


def test_a_model_of_ones_own():
    model = nn.Sequential(nn.Conv1d(3, 6, 3), nn.Flatten(), nn.Linear(36, 4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = checks_of(ConvOut(), model, (3, 8))
    assert all(check.ok for check in found)
    assert "torch.nn.Conv1d" in found[0].said
    assert all(torch.equal(before[n], t) and t.grad is None for n, t in model.state_dict().items())
    assert not checks_of(ByGroups(), model, (3, 8))[0].ok
