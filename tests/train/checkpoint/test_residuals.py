"""What codecs have left out, across checkpoints: a run that was taken up again is the same run."""

import pytest
import torch

from tests.train import small
from tests.train.runs import same
from tests.train.small import GRAPH
from workbench.plan.collective.codec import Codec
from workbench.plan.experiment.experiment import SGD, Experiment, Pipelined, Synchronous, Synthetic
from workbench.plan.plans.plan import Plan
from workbench.train.checkpoint import checkpoint
from workbench.train.checkpoint.saver import residual_holdings
from workbench.train.run.rank import RankState, group_specs_of
from workbench.train.step.state import named

HYBRID = Plan.hybrid(GRAPH, 4, 2).with_batch_norm("synchronized")
FEEDBACK = Codec(name="top_k", fraction=0.2, error_feedback=True)
FIELDS = dict(
    plan=HYBRID,
    data=Synthetic(samples=50),
    batch_size=20,
    optimizer=SGD(lr=0.02, momentum=0.9),
    steps=7,
    precision="fp64",
)


@pytest.fixture
def run(whole_run, weights):
    """Runs whole sessions; -> everything in the last checkpoint, and its folder."""

    def run(resume=None, stop_after=None, **fields):
        experiment = Experiment(**{**FIELDS, **fields})
        directory, *_ = whole_run(experiment, weights, resume, stop_after)
        saved = checkpoint.load(checkpoint.latest(directory), GRAPH)
        return {name: saved.reader.read(name) for name in saved.reader.names}, saved.path

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "stop_after"),
    [
        (dict(sync=Synchronous(codec=FEEDBACK, bucket_bytes=500)), 3),
        (dict(sync=Pipelined(width=3, codec=FEEDBACK)), 1),  # while the pipeline fills
        (dict(sync=Pipelined(width=2, warmup=3, codec=FEEDBACK)), 3),  # at the switch
        (dict(sync=Synchronous(codec=FEEDBACK, per_round=True), plan=HYBRID.with_rounds("B/K")), 4),
    ],
    ids=["synchronous", "filling", "switching", "per_round"],
)
def test_a_resumed_run_is_the_uninterrupted_one(run, fields, stop_after):
    whole, _ = run(**fields)
    assert any(name.startswith("residual/0/") for name in whole)
    _, stopped = run(**fields, stop_after=stop_after)
    same(run(**fields, resume=stopped)[0], whole)


def held_back(found):
    """The sum of all residuals, by parameter."""
    total = {}
    for name, piece in found.items():
        if name.startswith("residual/"):
            parameter = name.split("/", 3)[3]
            total[parameter] = total.get(parameter, 0) + piece
    return total


def taken_up(world, plan, path):
    """This rank's residuals after a checkpoint was read, by the names of logical tensors."""
    experiment = Experiment(**{**FIELDS, "plan": plan}, sync=Synchronous(codec=FEEDBACK))
    groups = world.groups(group_specs_of(plan))
    state = RankState.start(experiment, world, groups, path, path)
    residuals = state.strategy.residuals
    written = residual_holdings(state.model, len(residuals))
    mine = {held.name for held in written if held.holders[0] == world.rank}
    return {n: piece for n, piece in named(state.model, residuals).items() if n in mine}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_other_ranks_hold_back_as_much(on_ranks, run, size):
    data = Plan.data_parallel(GRAPH, 4).with_batch_norm("synchronized")
    saved, path = run(plan=data, sync=Synchronous(codec=FEEDBACK), steps=2)
    plan = Plan.data_parallel(GRAPH, size).with_batch_norm("synchronized")
    found = {}
    for pieces in on_ranks(size, taken_up, plan, path):
        found |= pieces
    before, after = held_back(saved), held_back(found)
    assert before.keys() == after.keys() == dict(small.net().named_parameters()).keys()
    for name in before:
        torch.testing.assert_close(after[name], before[name])
        assert torch.count_nonzero(before[name])


def test_without_error_feedback_nothing_is_kept(run):
    found, _ = run(sync=Synchronous(codec="int8"), steps=1)
    assert held_back(found) == {}
