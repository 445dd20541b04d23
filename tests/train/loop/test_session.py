"""Whole runs on ranks: any split trains alike, stops, goes on, and says when it diverges."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn
from torch.testing import assert_close

from tests.train.runs import session, started
from tests.train.small import GRAPH
from workbench.client.run.weights import weights_of
from workbench.comm.groups.world import World
from workbench.model.tracing.trace import trace
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.experiment import (
    SGD,
    AdamW,
    Experiment,
    ImageFolder,
    LRScheduler,
    Metric,
    ParameterGroup,
    Pipelined,
    Synthetic,
    WarmupCosine,
)
from workbench.plan.io.errors import ExperimentError
from workbench.plan.plans.plan import Plan
from workbench.store.errors import ClusterError
from workbench.store.messages import StopRequest
from workbench.store.run_folder import read_evaluations
from workbench.train.checkpoint import checkpoint
from workbench.train.checkpoint.checkpoint import latest
from workbench.train.run.loop import first_bad_layer, train
from workbench.train.run.requests import CarriedOut, LearningRate, RunRequests, SaveNow

ALONE = Plan.data_parallel(GRAPH, 1).with_batch_norm("synchronized")
HYBRID = Plan.hybrid(GRAPH, 4, 2).with_batch_norm("synchronized")
UNEQUAL = Plan.hybrid(GRAPH, 3, 3).with_layer("5", shares=(3, 0, 1)).with_batch_norm("synchronized")
ROWS = Plan.data_parallel(GRAPH, 3, (3, 0, 1)).with_batch_norm("synchronized")
FILTERS = Plan.filters(GRAPH, 3, (8, 0, 3), grain=1)
DECAYED = ParameterGroup("*.weight", weight_decay=0.5, lr=0.03)
WARM = WarmupCosine(warmup=2, total=6, final=0.1)
CYCLE = LRScheduler("OneCycleLR", max_lr=0.05, total_steps=6)
FIELDS = dict(
    data=Synthetic(samples=50), batch_size=20, optimizer=AdamW(lr=0.01), steps=6, precision="fp64"
)


@pytest.fixture
def run(whole_run, weights):
    def run(plan, *, weights=weights, resume=None, stop_after=None, replanned=(), **fields):
        experiment = Experiment(plan=plan, **{**FIELDS, **fields})
        before = [(other, CarriedOut(2, 0.1, (0,))) for other in replanned]
        return whole_run(experiment, weights, resume, stop_after, before)[1:]

    return run


def losses(rows):
    return [row["loss"] for row in rows[0]]


@pytest.mark.slow
def test_every_split_trains_like_one_process(run):
    alone, ended = run(ALONE)
    in_rounds = HYBRID.with_rounds("B"), UNEQUAL.with_rows((2, 1, 0)).with_rounds("B/K")
    for plan in (HYBRID, UNEQUAL, ROWS, FILTERS, *in_rounds):
        rows, outcomes = run(plan)
        assert all(losses([r]) == losses(rows) for r in rows)
        assert losses(rows) == pytest.approx(losses(alone), rel=1e-9)
        assert outcomes[0].evaluation == pytest.approx(ended[0].evaluation, rel=1e-9)
        assert {o.reason for o in outcomes} == {"finished"}


@pytest.mark.slow
def test_micro_batches_do_not_change_a_step(run, tmp_path_factory):
    torch.manual_seed(4)
    module = nn.Sequential(nn.Flatten(), nn.Linear(192, 9), nn.Dropout(), nn.Linear(9, 10))
    graph = trace(module, input_shape=(3, 8, 8))
    weights = initialize(graph, 0, tmp_path_factory.mktemp("weights"), module=module)
    plan = Plan.hybrid(graph, 2)
    whole, _ = run(plan, weights=weights)
    for rounds in ("BK", "B", "B/K"):
        parts, _ = run(plan.with_rounds(rounds), weights=weights, accumulate=3)
        assert losses(parts) == pytest.approx(losses(whole), rel=1e-9)


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_under_any_plan(run):
    whole, _ = run(ALONE)
    _, stopped = run(HYBRID, stop_after=3)
    assert {(o.reason, o.step) for o in stopped} == {("stopped", 4)}
    for plan in (UNEQUAL, ALONE, HYBRID):
        rows, outcomes = run(plan, resume=Path(stopped[0].checkpoint))
        assert [row["step"] for row in rows[0]] == [4, 5]
        assert losses(rows) == pytest.approx(losses(whole)[4:], rel=1e-9)
        assert outcomes[0].step == 6


@pytest.mark.slow
def test_local_statistics_go_on_as_if_nobody_had_asked_for_them(run):
    """Resumed at any step; to the bit as a run that has saved after the same steps."""
    plan = Plan.data_parallel(GRAPH, 3, (2, 0, 1))

    def saved(outcomes):
        reader = checkpoint.load(Path(outcomes[0].checkpoint), GRAPH).reader
        return {name: reader.read(name) for name in reader.names}

    whole = saved(run(plan)[1])
    often = saved(run(plan, checkpoint_every=3, evaluate_every=4)[1])
    assert_close(often, whole, rtol=1e-9, atol=1e-12)
    for after, expected, tolerance in ((1, whole, 1e-9), (2, often, 0.0)):
        fields = dict(checkpoint_every=3, evaluate_every=4) if expected is often else {}
        _, stopped = run(plan, stop_after=after, **fields)
        assert stopped[0].step == after + 1
        resumed = saved(run(plan, resume=Path(stopped[0].checkpoint), **fields)[1])
        assert_close(resumed, expected, rtol=tolerance, atol=tolerance / 1e3)
    assert whole["1.num_batches_tracked"] == 6


@pytest.mark.slow
def test_a_run_that_was_re_cut_goes_on_under_its_last_plan_whoever_starts_it(run):
    unequal = HYBRID.with_rows((3, 2, 2, 1))
    alone = Plan.data_parallel(GRAPH, 2)
    for replanned, expected in (((ROWS, unequal), unequal), ((unequal, alone), HYBRID)):
        _, outcomes = run(HYBRID, replanned=replanned, steps=1)
        saved = Experiment.load(Path(outcomes[0].checkpoint) / "experiment.toml")
        assert saved.plan == expected


def test_a_request_of_any_rank_stops_all_after_the_same_step(run, tmp_path):
    rows, outcomes = run(HYBRID, stop_after=2)
    assert {len(r) for r in rows} == {3}  # asked after step 2's row, so during the third step
    assert checkpoint.load(Path(outcomes[0].checkpoint), GRAPH).step == 3


@pytest.mark.slow
def test_checkpoints_and_evaluations_come_when_due(run):
    rows, outcomes = run(HYBRID, checkpoint_every=2, evaluate_every=3)
    evaluated = [row["step"] for row in rows[0] if not math.isnan(row["accuracy"])]
    assert evaluated == [2, 5]
    folder = Path(outcomes[0].checkpoint).parent
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-000004", "step-000006"]
    found = read_evaluations(folder)
    assert list(found) == [3, 6]
    assert found[6] == outcomes[0].evaluation
    assert found[3]["accuracy"] == rows[0][2]["accuracy"]


def error(outputs, targets):
    """What falls while it trains."""
    return (outputs.softmax(1)[torch.arange(len(targets)), targets] - 1).abs()


@pytest.mark.slow
def test_the_best_checkpoint_stays_beside_the_newest(run):
    fields = dict(metrics={"error": Metric(error)}, evaluate_every=1)
    _, outcomes = run(HYBRID, **fields, keep_best="error", checkpoint_every=2)
    folder = Path(outcomes[0].checkpoint).parent
    found = {done: figures["error"] for done, figures in read_evaluations(folder).items()}
    best = max(found, key=found.get)
    assert best < 4
    assert {int(p.name.removeprefix("step-")) for p in folder.glob("step-*")} == {best, 4, 6}
    _, short = run(HYBRID, steps=best)
    expected = checkpoint.state_dict(Path(short[0].checkpoint), GRAPH)
    experiment = Experiment(plan=HYBRID, **FIELDS, **fields, keep_best="error")
    taken = weights_of(folder, experiment, None, ema=False, best=True)
    assert_close(taken, expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(ClusterError, match="by '-error' there is none"):
        weights_of(
            folder / "nowhere", experiment.replace(keep_best="-error"), None, ema=False, best=True
        )


def test_a_loss_that_is_no_number_ends_the_run_and_names_the_layer(run):
    _, outcomes = run(
        HYBRID, optimizer=SGD(lr=1e200), steps=50, checkpoint_every=1, precision="fp64"
    )
    outcome = outcomes[0]
    assert outcome.reason == "diverged"
    assert f"step {outcome.step}" in outcome.message
    assert "layer '" in outcome.message
    assert checkpoint.load(Path(outcome.checkpoint), GRAPH).step == outcome.step
    assert len({o.message for o in outcomes}) == 1


@pytest.mark.slow
def test_half_precision_follows_single(run):
    single, _ = run(HYBRID, precision="fp32")
    for plan in (HYBRID, HYBRID.with_rounds("B/K")):
        half, _ = run(plan, precision="bf16")
        assert losses(half) != losses(single)
        assert losses(half) == pytest.approx(losses(single), rel=0.02)


def test_memory_and_time_are_told(run):
    rows, _ = run(HYBRID)
    for rank, mine in enumerate(rows):
        for row in mine:
            assert row["rank"] == rank
            assert 0 < row["tensor_bytes"] <= row["peak_bytes"] < row["rss_bytes"]
            assert row["wait_s"] >= 0
            assert row["samples_per_s"] > 0
    held = [sum(p.piece_numel(r) for p in HYBRID.flow.weights.values()) for r in range(4)]
    # fp64 weights, gradients and two moments, and no more than buffers beside.
    for mine, numel in zip(rows, held, strict=True):
        assert mine[-1]["tensor_bytes"] == pytest.approx(4 * 8 * numel, rel=0.35)


def requesting(config, experiment, weights, directory, resume, requests):
    """`train`; rank 0 makes requests during steps: {step: request}. Losses, and where it ended."""
    found = []

    def emit(row):
        found.append(row["loss"])
        if config.rank == 0 and (request := requests.get(row["step"])) is not None:
            RunRequests(directory).submit(request)

    train(
        config,
        experiment,
        weights=weights,
        directory=directory,
        resume=resume,
        control=StopRequest(),
        emit=emit,
    )
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer": AdamW(lr=0.01)},
        {"optimizer": SGD(lr=0.05, momentum=0.9), "shard_optimizer": True},
        {"optimizer": SGD(lr=0.02, momentum=0.5), "sync": Pipelined(width=2)},
        {"optimizer": AdamW(lr=0.01, groups=[DECAYED]), "schedule": WARM},
        {"optimizer": AdamW(lr=0.01, groups=[DECAYED]), "schedule": CYCLE},
    ],
    ids=["adamw", "sharded", "in-flight", "scheduled", "cycle"],
)
def test_another_learning_rate_is_that_of_another_run(on_ranks, weights, tmp_path, fields):
    """Steps after the request are those of a run that goes on at that rate from a checkpoint."""
    experiment = Experiment(plan=UNEQUAL, **{**FIELDS, **fields, "checkpoint_every": 2})
    changed, apart = tmp_path / "changed", tmp_path / "apart"
    for folder in (changed, apart):
        folder.mkdir()
    requests = {1: LearningRate(0.003), 2: SaveNow()}  # after step 1: heard in step 2

    def losses_of(experiment, directory, resume, requests=requests):
        given = (experiment, weights, directory, resume, requests)
        return on_ranks.seated(3, requesting, *given)[0]

    found = losses_of(experiment, changed, None)
    (carried_out,) = RunRequests(changed).rates()
    assert carried_out[2].step == 3
    before = losses_of(experiment.replace(steps=3), apart, None, {})
    rated = experiment.at_rate(0.003)
    after = losses_of(rated, apart, latest(apart), {})
    assert found == pytest.approx(before + after, rel=1e-12)
    # As after a fault: step 2 is run again, at its own rate, and the others at theirs.
    saved = {path.name: path for path in changed.glob("step-*")}
    assert {"step-000004", "step-000006"} == set(saved)
    again = tmp_path / "again"
    again.mkdir()
    given = losses_of(experiment.replace(steps=2), again, None, {})
    shutil.copytree(changed / "requests", again / "requests")
    rest = losses_of(experiment, again, latest(again), {})
    assert given + rest == pytest.approx(found, rel=1e-12)
    kept = Experiment.load(saved["step-000004"] / "experiment.toml")
    assert kept == rated


def test_a_checkpoint_is_written_when_it_is_requested(on_ranks, weights, tmp_path):
    experiment = Experiment(plan=HYBRID, **FIELDS)
    on_ranks.seated(4, requesting, experiment, weights, tmp_path, None, {0: SaveNow()})
    assert [done.step for _, done in RunRequests(tmp_path).saved()] == [2]
    assert checkpoint.load(tmp_path / "step-000002", GRAPH).step == 2


def normed() -> nn.Module:
    """A batch norm that sees one value of each channel of a sample."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def first_refusal(config, experiment, weights, directory):
    """What every rank is told before the first step."""
    with pytest.raises(ExperimentError) as caught:
        session(config, experiment, weights, directory, None, None)
    return str(caught.value)


def test_too_few_rows_are_foreseen_where_the_number_of_samples_is_found_at_the_start(
    on_ranks, tmp_path
):
    for split in ("train", "test"):
        for label in range(3):
            place = tmp_path / split / str(label)
            place.mkdir(parents=True)
            for number in range(3):
                Image.new("RGB", (8, 8), (80 * label, 0, 0)).save(place / f"{number}.png")
    module = normed()
    graph = trace(module, input_shape=(3, 8, 8))
    experiment = Experiment(
        plan=Plan.data_parallel(graph, 2),
        data=ImageFolder(root=str(tmp_path)),
        batch_size=6,
        optimizer=SGD(lr=0.1),
        steps=4,
    )
    weights = initialize(graph, 0, tmp_path, module=module)
    said = on_ranks.seated(2, first_refusal, experiment, weights, tmp_path)
    assert set(said) == {said[0]}
    assert "of an epoch's last batch of 3 samples (9 by 6), rank 1 has 1 row" in said[0]


def test_ranks_without_rows_idle_beside_those_with_two(run, tmp_path):
    module = normed()
    graph = trace(module, input_shape=(3, 8, 8))
    assert graph["2"].least_rows == 2
    weights = initialize(graph, 0, tmp_path, module=module)
    fields = dict(weights=weights, data=Synthetic(samples=6, classes=3), batch_size=4, steps=3)
    idle, _ = run(Plan.data_parallel(graph, 2, (1, 0)), **fields)
    alone, _ = run(Plan.data_parallel(graph, 1), **fields)
    assert [row["loss"] for row in idle[0]] == pytest.approx([row["loss"] for row in alone[0]])


def blamed(config, experiment, weights, value):
    """Which layer first gives no number, of images of this value."""
    with World.open(config) as world:
        state = started(world, experiment, weights)
        images = torch.full((20 // world.size, 3, 8, 8), value, dtype=torch.float64)
        state.model.context.set((20 // world.size,) * world.size, step=0)
        return first_bad_layer(state.model, (images,), state.everyone)


def test_it_is_the_loss_where_every_layer_gives_numbers(on_ranks, weights):
    experiment = Experiment(plan=Plan.hybrid(GRAPH, 2), **FIELDS)
    assert on_ranks.seated(2, blamed, experiment, weights, 1.0) == ["the loss"] * 2
    assert on_ranks.seated(2, blamed, experiment, weights, math.nan) == ["the data"] * 2
    (too_large,) = set(on_ranks.seated(2, blamed, experiment, weights, 1e308))
    assert too_large in [f"layer {layer.name!r}" for layer in GRAPH.layers]
