"""Gradients in flight across checkpoints: a run that was taken up again is the same run."""

from pathlib import Path

import pytest
import torch

from tests.train import small
from tests.train.runs import same
from tests.train.test_session import GRAPH, session
from workbench.model.weights import initialize
from workbench.plan.experiment import SGD, AdamW, Experiment, Pipelined, Synchronous, Synthetic
from workbench.plan.plan import Plan
from workbench.train import checkpoint

HYBRID = Plan.hybrid(GRAPH, 4, 2).with_batch_norm("synchronized")
UNEQUAL = Plan.hybrid(GRAPH, 3, 3).with_layer("5", shares=(3, 0, 1)).with_batch_norm("synchronized")
FIELDS = dict(
    plan=HYBRID,
    data=Synthetic(samples=50),
    batch_size=20,
    optimizer=SGD(lr=0.02, momentum=0.9, weight_decay=0.01),
    steps=8,
    precision="fp64",
)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return initialize(GRAPH, 0, tmp_path_factory.mktemp("weights"), module=small.net())


@pytest.fixture
def run(on_ranks, weights, tmp_path):
    """Runs whole sessions; -> everything in the last checkpoint, the folder, and rank 0's end."""

    def run(resume: Path | None = None, stop_after: int | None = None, **fields):
        experiment = Experiment(**{**FIELDS, **fields})
        directory = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        args = (experiment, weights, directory, resume, stop_after)
        answers = on_ranks.seated(experiment.plan.world_size, session, *args)
        saved = checkpoint.load(checkpoint.latest(directory), GRAPH)
        return (
            {name: saved.reader.read(name) for name in saved.reader.names},
            directory,
            answers[0][1],
        )

    return run


def in_flight(found):
    return sorted({name.rsplit("/", 1)[0] for name in found if name.startswith("in_flight/")})


@pytest.mark.parametrize(
    ("fields", "stop_after"),
    [
        (dict(sync=Pipelined(width=2)), 4),
        (dict(sync=Pipelined(width=4, compensation="delay"), optimizer=AdamW(lr=0.01)), 1),
        (dict(sync=Pipelined(width=3, warmup=3), shard_optimizer=True), 3),
    ],
    ids=["late", "filling", "switching"],
)
def test_a_resumed_run_is_the_uninterrupted_one(run, fields, stop_after):
    whole, folder, _ = run(**fields)
    same(run(**fields, checkpoint_every=1)[0], whole)  # to save disturbs nothing
    _, stopped, outcome = run(**fields, stop_after=stop_after)
    assert outcome.reason == "stopped"
    same(run(**fields, resume=checkpoint.latest(stopped))[0], whole)
    longer, _, _ = run(**fields, resume=checkpoint.latest(folder), steps=10)
    same(longer, run(**fields, steps=10)[0])


def test_what_is_in_flight_is_in_the_checkpoint(run):
    sync = Pipelined(width=3, warmup=2, compensation="delay")
    _, folder, _ = run(sync=sync, stop_after=2)
    waiting = in_flight(checkpoint.load(checkpoint.latest(folder), GRAPH).reader.names)
    assert waiting == ["in_flight/1/gradient", "in_flight/1/weight"]
    whole, _, outcome = run(sync=sync)
    assert in_flight(whole) == [
        f"in_flight/{age}/{what}" for age in (1, 2) for what in ("gradient", "weight")
    ]
    assert outcome.notes == tuple(
        f"step {step} moved no weights: it filled the pipeline" for step in (2, 3)
    )


def test_another_plan_takes_over_what_is_in_flight(run):
    sync = Pipelined(width=3)
    whole, _, _ = run(sync=sync)
    _, stopped, _ = run(sync=sync, stop_after=4)
    for plan in (UNEQUAL, Plan.data_parallel(GRAPH, 1).with_batch_norm("synchronized")):
        resumed, _, _ = run(sync=sync, plan=plan, resume=checkpoint.latest(stopped))
        assert resumed.keys() == whole.keys()
        for name in whole:
            torch.testing.assert_close(resumed[name], whole[name], rtol=1e-9, atol=1e-11)


def test_a_narrower_pipeline_uses_the_oldest_at_once(run):
    _, stopped, _ = run(sync=Pipelined(width=3), stop_after=4)
    end = checkpoint.latest(stopped)
    applied = "the gradient of step {}, in flight until then, was used at once"
    _, _, outcome = run(sync=Pipelined(width=2), resume=end)
    assert outcome.notes == (applied.format(3),)
    drained, _, outcome = run(sync=Synchronous(), resume=end)
    assert outcome.notes == (applied.format(3), applied.format(4))
    assert in_flight(drained) == []
    _, _, outcome = run(sync=Pipelined(width=4), resume=end)  # steps 3 and 4 are there already
    assert outcome.notes == ("step 5 moved no weights: it filled the pipeline",)


def test_a_loss_that_is_no_number_moves_no_weights(run):
    optimizer = SGD(lr=1e200)
    _, folder, outcome = run(
        sync=Pipelined(width=2), optimizer=optimizer, checkpoint_every=1, steps=50
    )
    assert outcome.reason == "diverged"
    assert "layer '" in outcome.message
    saved = checkpoint.load(checkpoint.latest(folder), GRAPH)
    assert saved.step == outcome.step
    gradients = [n for n in saved.reader.names if n.startswith("in_flight/1/gradient/")]
    assert gradients
