"""The variable batch against the same by hand, in one process."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from tests.train.runs import session
from tests.train.strategies.test_local_sgd import GRAPH, MOMENTUM, SHAPE, net, plan, saved
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.experiment import (
    SGD,
    AdamW,
    Experiment,
    LocalSGD,
    Synchronous,
    Synthetic,
)
from workbench.plan.graph.graph import Input
from workbench.plan.io.errors import ExperimentError
from workbench.plan.placement.placement import apportion
from workbench.plan.placement.rounds import round_rows
from workbench.train.data.datasets import open_data
from workbench.train.data.feed import rows_of_step
from workbench.train.verify.whole_model import VerifyError, write_reference

SAMPLES, BATCH, STEPS = 26, 10, 4
PER_ROUND = Synchronous(per_round=True)
TORCHS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return initialize(GRAPH, 0, tmp_path_factory.mktemp("weights"), module=net())


def by_hand(cut, value):
    """The tail after every round with the mean of its rows, the head with all rows at once."""
    whole = net().double()
    head, tail = whole[:4], whole[4:]
    options = value.options
    parts = [TORCHS[value.kind](part.parameters(), **options) for part in (head, tail)]
    data = open_data(Synthetic(samples=SAMPLES), (Input(SHAPE),), 10, "train")
    for step in range(STEPS):
        order = rows_of_step(SAMPLES, BATCH, 0, step)
        images, labels = data.batch(order)
        features = head(images.double())
        gradient = torch.zeros_like(features)
        rows = apportion(len(order), (1,) * cut.world_size)
        begun = [sum(rows[:rank]) for rank in range(cut.world_size)]
        for brought in round_rows(cut.rounds, rows, cut.tail.group_size):
            spans = [torch.arange(b, b + n) for b, n in zip(begun, brought, strict=True)]
            begun = [b + n for b, n in zip(begun, brought, strict=True)]
            index = torch.cat(spans)
            if len(index) == 0:
                continue
            given = features.detach()[index].requires_grad_()
            parts[1].zero_grad()
            F.cross_entropy(tail(given), labels[index]).backward()
            gradient[index] = given.grad * len(index) / len(order)
            parts[1].step()
        parts[0].zero_grad()
        features.backward(gradient)
        parts[0].step()
    return whole.state_dict()


@pytest.mark.parametrize("optimizer", [MOMENTUM, AdamW(lr=0.01)], ids=["sgd", "adamw"])
@pytest.mark.parametrize(("world", "k"), [(2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("rounds", ["B", "B/K"])
def test_equals_the_same_by_hand(on_ranks, weights, tmp_path, rounds, world, k, optimizer):
    cut = plan(world, k, rounds)
    run = Experiment(
        plan=cut,
        data=Synthetic(samples=SAMPLES),
        batch_size=BATCH,
        optimizer=optimizer,
        steps=STEPS,
        precision="fp64",
        sync=PER_ROUND,
    )
    answers = on_ranks.seated(world, session, run, weights, tmp_path, None, None)
    found = saved(Path(answers[0][1].checkpoint))
    for name, tensor in by_hand(cut, optimizer).items():
        assert_close(found[name], tensor, rtol=1e-10, atol=1e-12)


def experiment(cut, **fields):
    return Experiment(plan=cut, data="synthetic", optimizer=SGD(lr=0.1), steps=1, **fields)


@pytest.mark.parametrize(
    ("cut", "fields", "says"),
    [
        (plan(4, 2), {}, "per_round needs .* rounds 'B' or 'B/K', this one has rounds 'BK'"),
        (plan(4, 1, "B"), {}, "per_round needs a plan that gathers rows"),
        (plan(4, 2, "B"), dict(accumulate=3), "accumulated over 3 micro-batches; accumulate=1"),
    ],
)
def test_needs_rounds(cut, fields, says):
    with pytest.raises(ExperimentError, match=says):
        experiment(cut, sync=PER_ROUND, **fields)


def test_survives_its_text():
    run = experiment(plan(4, 2, "B"), sync=PER_ROUND)
    assert Experiment.from_toml(run.to_toml()) == run
    assert "step after every round" in repr(run)


@pytest.mark.parametrize(
    ("sync", "why"), [(PER_ROUND, "after every round"), (LocalSGD(every=4), "every 4 steps")]
)
def test_verify_refuses_what_is_inexact_by_design(weights, tmp_path, sync, why):
    run = experiment(plan(2, 2, "B"), sync=sync)
    with pytest.raises(VerifyError, match=rf"inexact by design .*{why}.*under Synchronous\(\)"):
        write_reference(run, weights, tmp_path / "start", tmp_path / "reference")
