"""What is in flight, and what encodings left out, as logical tensors of one rank's pieces."""

from types import SimpleNamespace

import pytest
import torch

from workbench.plan.placement.flow import WeightPlacement
from workbench.plan.placement.placement import Replicate, Shard
from workbench.train.step.state import (
    InFlight,
    ages,
    named,
    residual_entry,
    restore_residuals,
)


def test_names_tell_age_and_parameter():
    assert residual_entry(1, 2, "fc.weight") == "residual/1/2/fc.weight"
    names = ["in_flight/12/gradient/a", "in_flight/2/gradient/b", "x/in_flight/3/gradient/a", "a"]
    assert (ages(names), ages([])) == ([12, 2], [])
    gradients, weights = {"a": torch.ones(1)}, {"a": torch.zeros(1)}
    found = InFlight(5, gradients, weights).by_age(6)
    assert found == {"in_flight/1/gradient/": gradients, "in_flight/1/weight/": weights}


def model(rank):
    """A weight "w" that is cut over groups of two, and a bias "b" that every rank has."""
    placements = {
        "w": WeightPlacement(Shard(0, (2, 1)), 2, (3, 2), "float32", trainable=True),
        "b": WeightPlacement(Replicate(), 1, (2,), "float32", trainable=True),
    }
    return SimpleNamespace(
        placements=placements,
        plan=SimpleNamespace(world_size=4),
        context=SimpleNamespace(rank=rank),
    )


@pytest.mark.parametrize(("rank", "of_w", "of_b"), [(0, 0, 0), (1, 0, 1), (2, 1, 2), (3, 1, 3)])
def test_residuals_are_named_by_use_and_replica(rank, of_w, of_b):
    residuals = [{"w": torch.ones(1)}, {"w": torch.zeros(1), "b": torch.ones(2)}]
    found = named(model(rank), residuals)
    assert list(found) == [f"residual/0/{of_w}/w", f"residual/1/{of_w}/w", f"residual/1/{of_b}/b"]
    assert found[f"residual/1/{of_b}/b"] is residuals[1]["b"]


class Stored:
    """Whole tensors of some names."""

    def __init__(self, **tensors):
        self.tensors = tensors

    @property
    def names(self):
        return tuple(self.tensors)

    def read(self, name, shard=None, rank=0):
        whole = self.tensors[name]
        return whole if shard is None else whole.narrow(shard.dim, *shard.span(rank))


W = torch.arange(1.0, 7.0).view(3, 2)
STORED = Stored(
    **{
        "w": W,
        "residual/0/0/w": W,
        "residual/0/1/w": 10 * W,
        "residual/0/2/w": 100 * W,
        "residual/1/1/w": 1000 * W,
        "residual/0/3/b": torch.tensor([1.0, 2.0]),
        "residual/0/7/b": torch.tensor([3.0, 4.0]),
    }
)


@pytest.mark.parametrize(
    ("rank", "w", "b"),
    [
        (0, [[101.0, 202.0], [303.0, 404.0]], [0.5, 0.5]),
        (1, [[505.0, 606.0]], [0.5, 0.5]),
        (3, [[50.0, 60.0]], [4.5, 6.5]),
    ],
)
def test_residuals_are_added_up_over_replicas_that_are_one_now(rank, w, b):
    """Two sums of gradients took turns, and one does now."""
    of_first = model(rank)
    mine = {"w": torch.zeros(len(w), 2), "b": torch.full((2,), 0.5)}
    stored = {n: t for n, t in STORED.tensors.items() if not n.startswith("residual/1")}
    restore_residuals(Stored(**stored), of_first, [mine])
    assert mine["w"].tolist() == w
    assert mine["b"].tolist() == b


def test_each_of_several_sums_has_its_own():
    sums = [{"w": torch.zeros(2, 2)}, {"w": torch.zeros(2, 2)}]
    restore_residuals(STORED, model(2), sums)
    assert sums[0]["w"].tolist() == [[10.0, 20.0], [30.0, 40.0]]
    assert sums[1]["w"].tolist() == [[1000.0, 2000.0], [3000.0, 4000.0]]


def test_who_keeps_no_residuals_reads_none():
    restore_residuals(STORED, model(0), [])
    others = [{"b": torch.zeros(2)}]
    restore_residuals(STORED, model(0), others)
    assert others[0]["b"].tolist() == [0.0, 0.0]
