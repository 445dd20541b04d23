"""Heads of a fused weight are saved as slices of the whole, and loaded under any other plan."""

import pytest
import torch

from tests.train.checkpoint import saving
from workbench.model.tracing.trace import trace
from workbench.model.weights.slices import PieceSet
from workbench.plan.experiment.experiment import Adam
from workbench.plan.placement.placement import Shard
from workbench.plan.plans.plan import Plan
from workbench.train.checkpoint.checkpoint import latest

GRAPH = trace(saving.attending(), input_shape=(4, 12))


def heads(world_size, *shares):
    plan = Plan.data_parallel(GRAPH, world_size)
    return plan.with_layer("attention", scheme="shard_heads", shares=shares or None)


@pytest.mark.parametrize(
    "target", [Plan.data_parallel(GRAPH, 2), heads(2, 0, 1), heads(3)], ids=["whole", "one", "each"]
)
def test_any_plan_loads_the_heads_that_another_saved(on_ranks, tmp_path, target):
    source = heads(2, 1, 2)
    on_ranks(2, saving.train_and_save, source, Adam(), 2, tmp_path, saving.attending)
    saved = PieceSet(latest(tmp_path))
    trained = saved.read("attention.in_proj_weight")
    assert trained.shape == (36, 12)
    assert not torch.equal(trained, saving.attending().state_dict()["attention.in_proj_weight"])
    ranks = on_ranks(
        target.world_size, saving.resume_and_train, target, Adam(), latest(tmp_path), 2
    )
    for rank, found in enumerate(ranks):
        for name, piece in found.items():
            expected, placed = saved.read(name), target.flow.weights[name.rpartition("/")[2]]
            if isinstance(placed.placement, Shard) and expected.ndim:
                index = rank % placed.group_size
                expected = saving.piece_under(placed.placement, expected, index)
            assert torch.equal(piece, expected), (rank, name)


def test_what_heads_save_is_what_one_process_saves(on_ranks, tmp_path):
    for plan, place in ((heads(2, 1, 2), "cut"), (Plan.data_parallel(GRAPH, 1), "whole")):
        directory = tmp_path / place
        on_ranks(
            plan.world_size, saving.train_and_save, plan, Adam(), 2, directory, saving.attending
        )
    cut, whole = (PieceSet(latest(tmp_path / place)) for place in ("cut", "whole"))
    assert set(cut.names) == set(whole.names)
    for name in whole.names:
        torch.testing.assert_close(cut.read(name), whole.read(name))
