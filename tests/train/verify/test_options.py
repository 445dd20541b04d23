"""Verification knows optimizers, groups, schedules, clipping and averages: all in one run."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from tests.train.runs import verified
from tests.train.verify.test_verify import net, plan
from workbench.client.verifying import experiment_for, merge
from workbench.model.tracing.trace import trace
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.experiment import (
    SGD,
    AdamW,
    Experiment,
    LRScheduler,
    NAdam,
    ParameterGroup,
    Synthetic,
    WarmupCosine,
)
from workbench.plan.plans.plan import Plan
from workbench.train.verify.verify import compare
from workbench.train.verify.whole_model import write_reference

RUNS = {
    "nadam": dict(
        optimizer=NAdam(0.01, groups=[ParameterGroup(dims=1, lr=0.05)]),
        schedule=WarmupCosine(warmup=1),
        clip_norm=0.1,
        ema=0.5,
    ),
    "cycle": dict(
        optimizer=AdamW(0.01, groups=[ParameterGroup("4.*", weight_decay=0.5)]),
        schedule=LRScheduler("OneCycleLR", max_lr=0.1, total_steps=3),
        clip_value=0.01,
        shard_optimizer=True,
    ),
}


def held(config, experiment, start, reference, other):
    return compare(config, other or experiment, weights=start, reference=reference, repeat=False)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_what_one_process_computes_with_torchs_own(on_ranks, tmp_path, name):
    """And it sees where one of them is missing."""
    run = Experiment(
        plan=plan(),
        data=Synthetic(samples=48, classes=5),
        batch_size=16,
        steps=3,
        precision="fp64",
        **RUNS[name],
    )
    start, reference = tmp_path / "start.safetensors", tmp_path / "reference.safetensors"
    weights = initialize(run.plan.graph, 0, tmp_path, module=net())
    write_reference(run, weights, start, reference)
    found = merge(run, on_ranks.seated(2, held, run, start, reference, None))
    assert found.exact, found
    remembered = {d.name.partition("/")[0] for d in found.differences if d.what == "optimizer"}
    assert ("ema" in remembered) == (run.ema is not None)
    for without in (dict(schedule=None), dict(clip_norm=None, clip_value=None)):
        other = run.replace(**without)
        assert not merge(run, on_ranks.seated(2, held, run, start, reference, other)).exact


def test_the_first_steps_of_an_experiment_are_those_of_all():
    """The schedule falls over the experiment's steps, not over the few that are verified."""
    run = Experiment(
        plan=plan(),
        data=Synthetic(samples=48, classes=5),
        batch_size=16,
        epochs=20,
        precision="bf16",
        optimizer="adamw",
        schedule=WarmupCosine(warmup=10),
        seed=3,
    )
    given = dict(batch_size=None, steps=2, optimizer=None, data=None, seed=None)
    found = experiment_for(run, precision="fp64", **given)
    assert (found.steps, found.epochs, found.schedule.total) == (2, None, 60)
    assert found.replace(steps=60, epochs=20, precision="bf16", schedule=run.schedule) == run
    cycle = run.replace(schedule=LRScheduler("OneCycleLR", max_lr=0.1))
    found = experiment_for(cycle, precision="fp64", **given)
    assert found.schedule.arguments["total_steps"] == 60


def test_a_loss_scale_is_of_no_use_where_verify_computes():
    run = Experiment(
        plan=plan(), data="digits", steps=9, optimizer="adamw", precision="fp16", loss_scale=8.0
    )
    given = dict(batch_size=None, steps=2, optimizer=None, data=None, seed=None)
    found = experiment_for(run, precision="fp32", **given)
    assert (found.precision, found.scaling) == ("fp32", None)


@pytest.mark.parametrize("batch_norm", ["local", "synchronized"])
def test_micro_batches_are_seen_one_by_one(on_ranks, tmp_path, batch_norm):
    """A batch norm has the statistics of each, and dropout goes on where the last one ended."""

    def normed():
        normalized = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.BatchNorm1d(8))
        return normalized.extend([nn.Dropout(0.5), nn.Linear(8, 5)])

    graph = trace(normed(), input_shape=(3, 2, 2))
    parts = Plan.data_parallel(graph, 2).with_batch_norm(batch_norm)
    data = Synthetic(samples=32, classes=5)
    fields = dict(plan=parts, data=data, batch_size=16, steps=2, precision="fp64")
    run = Experiment(**fields, optimizer="sgd", accumulate=2)
    found = verified(on_ranks, tmp_path, run, normed())
    assert found.exact, found
    assert {d.what for d in found.differences} >= {"output", "gradient", "buffer"}


@pytest.mark.parametrize("loss", [F.smooth_l1_loss, F.binary_cross_entropy_with_logits])
def test_targets_may_be_of_single_precision(on_ranks, tmp_path, loss):
    """As data sets give them; torch refuses or rounds where outputs are of double precision."""
    module = nn.Linear(4, 3)
    graph = trace(module, input_shape=(4,))
    generator = torch.Generator().manual_seed(1)
    inputs, targets = (torch.rand(32, n, generator=generator) for n in (4, 3))
    run = Experiment(
        plan=Plan.data_parallel(graph, 2),
        data=(TensorDataset(inputs, targets),) * 2,
        loss=loss,
        batch_size=8,
        steps=3,
        precision="fp64",
        optimizer=SGD(0.05),
    )
    assert verified(on_ranks, tmp_path, run, module).exact
