"""Pieces of a rank that is alone, when a run goes on under another plan."""

import torch

from tests.plan.graphs import mlp
from workbench.comm.groups.group import Group
from workbench.comm.messages.recorder import Recorder
from workbench.plan.plans.plan import Plan
from workbench.plan.plans.reshard import Reshard
from workbench.train.run.reshard import Entry, Pieces, move_pieces

PLAN = Plan.data_parallel(mlp(3, 2), 1)


def test_a_piece_is_handed_over_once():
    held = {"fc0.bias": torch.ones(2), "fc0.weight": torch.zeros(2, 3)}
    pieces = Pieces(PLAN.flow.weights, held)
    assert pieces.names == ("fc0.bias", "fc0.weight")
    assert pieces.shape("fc0.weight") == (2, 3)
    bias = held["fc0.bias"]
    assert pieces.read("fc0.bias") is bias
    assert list(held) == ["fc0.weight"]


def test_what_lies_alike_stays_where_it_is():
    own = {"fc0.bias": torch.ones(2), "momentum": torch.zeros(2, 3)}
    entries = [
        Entry("fc0.bias", "fc0.bias", torch.float32),
        Entry("momentum", "fc0.weight", torch.float32),
        Entry("none", "fc0.weight", torch.float64),
    ]
    everyone = Group("everyone", (0,), 0, Recorder())
    found = move_pieces(Reshard(PLAN, PLAN), entries, own, everyone)
    assert found["fc0.bias"] is own["fc0.bias"]
    assert found["momentum"] is own["momentum"]
    assert (found["none"].shape, found["none"].dtype) == ((2, 3), torch.float64)


def test_an_entry_is_of_all_replicas_unless_it_says_otherwise():
    assert Entry("a", "b", torch.float32).replica is None
