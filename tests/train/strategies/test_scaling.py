"""The loss scale of fp16: held against torch's own GradScaler, bit by bit."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.ranks import all_ranks
from tests.train.runs import pieces_of, session, started
from workbench.comm.groups.group import Group
from workbench.comm.messages.recorder import Recorder
from workbench.model.tracing.trace import trace
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.checks import LEAST_SCALE
from workbench.plan.experiment.experiment import (
    SGD,
    Adam,
    AdamW,
    Experiment,
    Loss,
    LossScale,
    Synchronous,
    Synthetic,
)
from workbench.plan.graph.graph import Input
from workbench.plan.io.errors import ExperimentError
from workbench.plan.plans.plan import Plan
from workbench.train.checkpoint import checkpoint
from workbench.train.data.datasets import open_data
from workbench.train.data.feed import rows_of_step
from workbench.train.step.gradients import LossScaling
from workbench.train.step.trial import try_fp16

CLASSES, ROWS, SAMPLES = 4, 16, 48


def net():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(216, 16),
        nn.ReLU(),
        nn.Linear(16, CLASSES),
    )


GRAPH = trace(net(), input_shape=(3, 6, 6))
ALONE = Plan.data_parallel(GRAPH, 1)
FIELDS = dict(
    data=Synthetic(samples=SAMPLES, classes=CLASSES),
    batch_size=ROWS,
    optimizer=SGD(lr=0.05, momentum=0.9),
    steps=9,
    precision="fp16",
)
OVERFLOWS = LossScale(init_scale=2.0**32, backoff_factor=2.0**-9, growth_interval=3)
SKIPPED = 2  # of its first steps


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return initialize(GRAPH, 0, tmp_path_factory.mktemp("weights"), module=net())


def trained(world, run, weights):
    """Scales and weights after each step."""
    state = started(world, run, weights)
    found = []
    for step in range(run.steps):
        state.stepper.run(step)
        state.stepper.update()
        pieces = pieces_of(state)
        found.append((state.updater.scaling.state().tolist(), pieces))
    return found


def plainly_trained(run):
    """The same in plain torch."""
    module, value = net(), run.optimizer
    options = {**value.model_dump(exclude={"kind", "groups"}), "fused": True}
    optimizer = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[value.kind](
        module.parameters(), **options
    )
    # Torch's fused kernels would skip steps themselves, and leave momentum that nobody wrote.
    optimizer._step_supports_amp_scaling = False
    scaler = torch.amp.GradScaler("cpu", **dict(run.scaling))
    data = open_data(run.data, (Input(GRAPH.input_shape),), GRAPH.num_classes, "train")
    found = []
    for step in range(run.steps):
        order = rows_of_step(len(data), run.batch_size, run.seed, step)
        images, labels = data.batch(order)
        optimizer.zero_grad()
        for some, own in zip(
            images.tensor_split(run.accumulate), labels.tensor_split(run.accumulate), strict=True
        ):
            with torch.autocast("cpu", torch.float16):
                logits = module(some)
            loss = F.cross_entropy(logits.float(), own, reduction="sum") / len(labels)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if run.clip_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), run.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        scale = [scaler.get_scale(), scaler._get_growth_tracker()]
        found.append((scale, deepcopy(module.state_dict())))
    return found


@pytest.mark.parametrize(
    "fields",
    [
        {},
        dict(loss_scale=OVERFLOWS),
        dict(loss_scale=OVERFLOWS, optimizer=Adam(lr=0.01), accumulate=2),
        dict(loss_scale=LossScale(init_scale=3e12, backoff_factor=0.03, growth_interval=1)),
    ],
    ids=["torch's defaults", "overflows", "adam, micro-batches", "no power of two"],
)
def test_one_rank_has_the_bits_of_torch(on_ranks, weights, fields):
    run = Experiment(plan=ALONE, **FIELDS | fields)
    (found,) = on_ranks(1, trained, run, weights)
    expected = plainly_trained(run)
    assert [scale for scale, _ in found] == [scale for scale, _ in expected]
    for (_, mine), (_, theirs) in zip(found, expected, strict=True):
        for name in mine:
            assert torch.equal(mine[name], theirs[name]), name


def test_skipped_steps_move_nothing_and_later_ones_do(on_ranks, weights):
    run = Experiment(plan=ALONE, **FIELDS, loss_scale=OVERFLOWS)
    (found,) = on_ranks(1, trained, run, weights)
    first, *others = [pieces["6.weight"] for _, pieces in found]
    same = [torch.equal(first, other) for other in others]
    assert same == [True] * (SKIPPED - 1) + [False] * (run.steps - SKIPPED)
    scales = [scale for (scale, _), _ in found]
    assert scales == [2.0**power for power in (23, 14, 14, 14, 15, 15, 15, 16, 16)]


def test_a_number_stays_what_it_is(on_ranks, weights):
    whole = Experiment(plan=ALONE, **FIELDS, loss_scale=2.0**40)
    (found,) = on_ranks(1, trained, whole, weights)
    assert {tuple(scale) for scale, _ in found} == {(2.0**40, 0.0)}
    assert len({tuple(pieces["6.bias"].tolist()) for _, pieces in found}) == 1
    (fine,) = on_ranks(1, trained, whole.replace(loss_scale=256.0), weights)
    assert len({tuple(pieces["6.bias"].tolist()) for _, pieces in fine}) == whole.steps


VALUES = [
    LossScale(growth_interval=1),
    LossScale(init_scale=3.7, growth_factor=1.001, backoff_factor=0.999, growth_interval=3),
    LossScale(init_scale=2.0**126, growth_interval=2),
    LossScale(init_scale=1.0, growth_factor=1e30, backoff_factor=1e-3, growth_interval=4),
]


def compared(world, value):
    """Both, of the same gradients, of which some are no numbers; what differs."""
    scaler = torch.amp.GradScaler("cpu", **dict(value))
    mine = LossScaling(value, all_ranks(world), torch.device("cpu"))
    parameter = nn.Parameter(torch.zeros(1001))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    generator, loss = torch.Generator().manual_seed(0), torch.tensor(1.7)
    for _ in range(200):
        assert torch.equal(scaler.scale(loss), mine.scaled(loss))
        gradient = torch.randn(1001, generator=generator) * 10
        overflows = bool(gradient[-1] > 7)
        gradient[-1] = float("nan") if overflows else 1.0
        parameter.grad = gradient.clone()
        scaler.unscale_(optimizer)
        assert mine.unscale([gradient[:500], gradient[500:]]) is not overflows
        assert torch.equal(gradient[:-1], parameter.grad[:-1])
        scaler.step(optimizer)
        scaler.update()
        assert mine.state().tolist() == [scaler.get_scale(), scaler._get_growth_tracker()]
    return mine.skipped, mine.scale


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_its_rules_are_torch_s(on_ranks, value):
    """Whatever overflows when, to the bit; also where growing would make it infinite."""
    ((skipped, scale),) = on_ranks(1, compared, value)
    assert 0 < skipped < 200
    assert 0 < scale < float("inf")


def agreeing(world):
    """One rank after the other has a gradient that is no number; then nobody; then nobody any."""
    scaling = LossScaling(LossScale(growth_interval=1), all_ranks(world), torch.device("cpu"))
    found = []
    for bad in range(world.size + 2):
        gradients = [torch.tensor([1.0, float("inf") if bad == world.rank else 2.0])]
        found.append((scaling.unscale(gradients if bad <= world.size else []), scaling.scale))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_one_rank_finds_all_skip(on_ranks, ranks):
    scales = [2.0 ** (16 - bad - 1) for bad in range(ranks)]
    expected = [(False, scale) for scale in scales]
    expected += [(True, 2 * scales[-1]), (True, 4 * scales[-1])]
    assert on_ranks(ranks, agreeing) == [expected] * ranks


PAIRS = Plan.hybrid(GRAPH, 4, 2).with_batch_norm("synchronized")
ENDS = {
    "whole": {},
    "sharded": dict(shard_optimizer=True),
    "fused": dict(shard_optimizer=(1, 0, 2, 1), sync=Synchronous(algorithm="direct")),
}


def run_on(on_ranks, weights, directory, resume=None, stop_after=None, **fields):
    run = Experiment(**{"plan": PAIRS, **FIELDS, **fields})
    directory.mkdir()
    answers = on_ranks.seated(
        run.plan.world_size, session, run, weights, directory, resume, stop_after
    )
    return answers[0][0], [outcome for _, outcome in answers]


@pytest.mark.slow
@pytest.mark.parametrize("fields", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("after", [1, 3], ids=["while it skips", "between growths"])
def test_a_run_goes_on_with_its_scale_and_its_count(on_ranks, weights, tmp_path, fields, after):
    """The bits of the run that was left alone; under another plan, its losses and its scales."""
    fields = dict(fields, optimizer=AdamW(lr=0.01), loss_scale=OVERFLOWS, ema=0.5)
    whole, ended = run_on(on_ranks, weights, tmp_path / "whole", **fields)
    _, stopped = run_on(on_ranks, weights, tmp_path / "part", stop_after=after, **fields)
    assert stopped[0].step < FIELDS["steps"]
    saved = Path(stopped[0].checkpoint)
    rows, again = run_on(on_ranks, weights, tmp_path / "rest", resume=saved, **fields)
    left, resumed = (
        checkpoint.load(Path(out[0].checkpoint), GRAPH).reader for out in (ended, again)
    )
    assert left.names == resumed.names
    assert checkpoint.LOSS_SCALE in left.names
    for name in left.names:
        assert torch.equal(left.read(name), resumed.read(name)), name
    assert [row["loss"] for row in rows] == [row["loss"] for row in whole[-len(rows) :]]
    other = Plan.data_parallel(GRAPH, 3).with_batch_norm("synchronized")
    rows, outcomes = run_on(
        on_ranks,
        weights,
        tmp_path / "other",
        resume=saved,
        **fields | dict(plan=other, shard_optimizer=bool(fields.get("shard_optimizer"))),
    )
    losses = [row["loss"] for row in whole[-len(rows) :]]
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=0.02)
    moved = checkpoint.load(Path(outcomes[0].checkpoint), GRAPH).reader
    assert torch.equal(moved.read(checkpoint.LOSS_SCALE), left.read(checkpoint.LOSS_SCALE))


@pytest.mark.slow
def test_runs_without_a_scale_go_on_with_the_first_one(on_ranks, weights, tmp_path):
    plain, steps = dict(precision="bf16"), FIELDS["steps"]
    _, stopped = run_on(on_ranks, weights, tmp_path / "part", stop_after=2, **plain)
    saved = Path(stopped[0].checkpoint)
    _, outcomes = run_on(on_ranks, weights, tmp_path / "rest", resume=saved, plan=ALONE)
    found = checkpoint.load(Path(outcomes[0].checkpoint), GRAPH).reader.read("loss_scale")
    assert found.tolist() == [65536.0, steps - stopped[0].step]
    saved = Path(outcomes[0].checkpoint)
    _, outcomes = run_on(
        on_ranks, weights, tmp_path / "back", resume=saved, steps=steps + 1, **plain
    )
    assert "loss_scale" not in checkpoint.load(Path(outcomes[0].checkpoint), GRAPH).reader.names


def weighted(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


def heavier(targets):
    return 1.0 + targets


@pytest.mark.slow
def test_a_loss_of_one_s_own_is_scaled_as_well(on_ranks, weights, tmp_path):
    """Rows weigh differently; the losses that are told are not scaled."""
    own = Loss(weighted, weights=heavier)
    fields = dict(loss=own, loss_scale=OVERFLOWS, plan=ALONE.with_batch_norm("synchronized"))
    alone, (one,) = run_on(on_ranks, weights, tmp_path / "alone", **fields)
    rows, many = run_on(on_ranks, weights, tmp_path / "cut", **fields | dict(plan=PAIRS))
    losses = [row["loss"] for row in alone]
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=0.02)
    assert losses[SKIPPED] < 3
    assert losses[-1] < 0.98 * losses[0]
    assert one.notes == many[0].notes != ()


@pytest.mark.slow
def test_what_was_skipped_is_noted(on_ranks, weights, tmp_path):
    _, outcomes = run_on(on_ranks, weights, tmp_path / "some", loss_scale=OVERFLOWS)
    said = "2 of 9 steps updated nothing, since gradients overflowed fp16 at their loss scale"
    assert [o.notes for o in outcomes] == [(f"{said}; it is 65536 now",)] * 4
    _, outcomes = run_on(on_ranks, weights, tmp_path / "all", loss_scale=2.0**40)
    assert outcomes[0].notes[0].endswith("loss scale; it stays 1.09951e+12")
    assert outcomes[0].reason == "finished"
    _, outcomes = run_on(on_ranks, weights, tmp_path / "none")
    assert outcomes[0].notes == ()


def test_a_scale_that_is_spent_ends_a_run(on_ranks, tmp_path):
    """The square root's gradient at zero is no number, however small the loss."""
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(6, CLASSES)

        def forward(self, x):
            return self.head(x) + (0.0 * self.head(x)).sqrt()

    graph = trace(Net(), input_shape=(6,))
    weights = initialize(graph, 0, tmp_path, module=Net())
    scale = LossScale(init_scale=1.0, backoff_factor=2.0**-4)
    rows, outcomes = run_on(
        on_ranks, weights, tmp_path / "run", plan=Plan.data_parallel(graph, 2), loss_scale=scale
    )
    assert {o.reason for o in outcomes} == {"diverged"}
    assert outcomes[0].step == len(rows) == 3
    assert "the loss scale fell to 1.52588e-05, below 0.0001" in outcomes[0].message
    assert "set precision='bf16'" in outcomes[0].message
    assert outcomes[0].notes[0].startswith("4 of 4 steps updated nothing")


def test_what_this_processor_does_not_compute_is_refused_by_layer():
    module = nn.ModuleDict({"lstm": nn.LSTM(4, 4, batch_first=True), "head": nn.Linear(4, 3)})
    cpu = torch.device("cpu")
    if torch.ops.mkldnn._is_mkldnn_fp16_supported():
        try_fp16(module, cpu)
        return
    with pytest.raises(ExperimentError, match=r"layer 'lstm' is an LSTM, .* set precision='bf16'"):
        try_fp16(module, cpu)
    del module["lstm"]
    try_fp16(module, cpu)


@pytest.mark.parametrize(
    ("value", "saved", "spent"),
    [
        (LossScale(), LEAST_SCALE * 1.01, False),
        (LossScale(), LEAST_SCALE * 0.99, True),
        (LEAST_SCALE / 2, 1.0, False),
    ],
)
def test_only_a_scale_that_follows_can_be_spent(value, saved, spent):
    scale = LossScaling(value, Group("everyone", (0,), 0, Recorder()), torch.device("cpu"))
    scale.load(torch.tensor([saved, 0.0], dtype=torch.float64))
    assert scale.is_spent is spent
    follows = isinstance(value, LossScale)  # a number is the experiment's, whatever was saved
    assert scale.state().tolist() == [pytest.approx(saved if follows else value), 0.0]
