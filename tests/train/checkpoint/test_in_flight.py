"""Gradients in flight across checkpoints: a run that was taken up again is the same run."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.train import small
from tests.train.checkpoint.saving import Alone, Memory
from tests.train.runs import same
from tests.train.small import GRAPH
from workbench.layers.cut import cut
from workbench.layers.cut_model import group_specs
from workbench.layers.local.context import BatchContext
from workbench.plan.experiment.experiment import (
    SGD,
    AdamW,
    Experiment,
    ParameterServer,
    Pipelined,
    Synchronous,
    Synthetic,
)
from workbench.plan.plans.plan import Plan
from workbench.program.step import program_of
from workbench.train.checkpoint import checkpoint
from workbench.train.run.requests import CarriedOut, LearningRate
from workbench.train.step.state import (
    InFlight,
    residual_entry,
    restore_residuals,
)
from workbench.train.strategy.pipelined import drain
from workbench.train.strategy.strategy import strategy_of, updater_of

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


@pytest.fixture
def run(whole_run, weights):
    """Runs whole sessions; -> everything in the last checkpoint, the folder, and rank 0's end."""

    def run(resume: Path | None = None, stop_after: int | None = None, requested=(), **fields):
        experiment = Experiment(**{**FIELDS, **fields})
        before = experiment.optimizer.lr
        done = [(LearningRate(rate), CarriedOut(at, before=before)) for at, rate in requested]
        directory, _, outcomes = whole_run(experiment, weights, resume, stop_after, done)
        reader = checkpoint.load(checkpoint.latest(directory), GRAPH).reader
        return {name: reader.read(name) for name in reader.names}, directory, outcomes[0]

    return run


class OneDevice(TorchDispatchMode):
    """Refuses operations on tensors of several devices, but for copies."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        devices = {arg.device for arg in args if isinstance(arg, torch.Tensor)}
        assert len(devices) < 2 or "copy" in str(func), f"{func} of tensors on {devices}"
        return func(*args, **(kwargs or {}))


def in_flight(found):
    return sorted({name.rsplit("/", 1)[0] for name in found if name.startswith("in_flight/")})


@pytest.mark.parametrize(
    ("fields", "stop_after"),
    [
        pytest.param(dict(sync=Pipelined(width=2)), 4, id="late"),
        pytest.param(
            dict(sync=Pipelined(width=4, compensation="delay"), optimizer=AdamW(lr=0.01)),
            1,
            id="filling",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            dict(sync=Pipelined(width=3, warmup=3), shard_optimizer=True),
            3,
            id="switching",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(run, fields, stop_after):
    whole, _, _ = run(**fields, checkpoint_every=3)
    _, stopped, outcome = run(**fields, stop_after=stop_after)
    assert outcome.reason == "stopped"
    same(run(**fields, resume=checkpoint.latest(stopped))[0], whole)


@pytest.mark.slow
def test_a_run_goes_on_with_more_steps(run):
    fields = dict(sync=Pipelined(width=3))
    whole, folder, _ = run(**fields)
    same(run(**fields, checkpoint_every=1)[0], whole)  # to save disturbs nothing
    longer, _, _ = run(**fields, resume=checkpoint.latest(folder), steps=10)
    same(longer, run(**fields, steps=10)[0])


@pytest.mark.slow
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


@pytest.mark.slow
def test_another_plan_takes_over_what_is_in_flight(run):
    sync = Pipelined(width=3)
    whole, _, _ = run(sync=sync)
    _, stopped, _ = run(sync=sync, stop_after=4)
    for plan in (UNEQUAL, Plan.data_parallel(GRAPH, 1).with_batch_norm("synchronized")):
        resumed, _, _ = run(sync=sync, plan=plan, resume=checkpoint.latest(stopped))
        assert resumed.keys() == whole.keys()
        for name in whole:
            torch.testing.assert_close(resumed[name], whole[name], rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_a_narrower_pipeline_uses_the_oldest_at_once(run):
    _, stopped, _ = run(sync=Pipelined(width=3), stop_after=4)
    end = checkpoint.latest(stopped)
    applied = "the gradient of step {}, in flight until then, was used at once"
    _, _, outcome = run(sync=Pipelined(width=2), resume=end)
    assert outcome.notes == (applied.format(3),)
    drained, _, outcome = run(sync=Synchronous(algorithm="direct"), resume=end)
    assert outcome.notes == (applied.format(3), applied.format(4))
    assert in_flight(drained) == []
    served, _, _ = run(sync=ParameterServer(server=1), resume=end)
    same(served, drained)
    _, _, outcome = run(sync=Pipelined(width=4), resume=end)  # steps 3 and 4 are there already
    assert outcome.notes == ("step 5 moved no weights: it filled the pipeline",)


def test_sums_without_a_place_are_used_one_after_the_other():
    """Each moves the weights once, the oldest first; then no gradient is left."""
    weight, idle = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer, notes = torch.optim.SGD([weight, idle], lr=0.5, momentum=0.5), []
    model = SimpleNamespace(trainable=lambda: {"weight": weight, "idle": idle})
    left = [
        InFlight(3 + i, {"weight": torch.tensor([g, 0.0])}, {}) for i, g in enumerate((1.0, 4.0))
    ]
    drain(left, model, optimizer.step, notes)
    # Speeds 1, then 0.5 * 1 + 4; the weights move by half of them.
    assert weight.tolist() == [1 - 0.5 * (1 + 4.5), 1]
    assert idle.tolist() == [1, 1]
    assert (weight.grad, idle.grad) == (None, None)
    assert [note.split(",")[0] for note in notes] == [
        "the gradient of step 3",
        "the gradient of step 4",
    ]


@pytest.mark.slow
def test_what_has_no_place_is_used_at_the_rate_of_the_run_and_not_of_the_experiment(run):
    """Somebody set it before step 5, with two gradients in flight; the run goes on without them."""
    fields = dict(optimizer=SGD(lr=0.02, momentum=0.9))
    _, stopped, _ = run(sync=Pipelined(width=3), stop_after=4, **fields)
    end = checkpoint.latest(stopped)
    for after in (Synchronous(algorithm="direct"), ParameterServer(server=1)):
        set_since, _, _ = run(sync=after, resume=end, requested=[(5, 0.005)], **fields)
        slower = dict(optimizer=SGD(lr=0.005, momentum=0.9))
        same(set_since, run(sync=after, resume=end, **slower)[0])
    later, _, _ = run(sync=after, resume=end, requested=[(7, 0.005)], **fields)
    assert not torch.equal(later["5.weight"], set_since["5.weight"])


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


@pytest.mark.parametrize(
    "sync", [Pipelined(width=3, compensation="delay"), Synchronous(), ParameterServer()]
)
def test_what_comes_from_a_file_or_a_re_cut_goes_where_its_parameter_is(sync):
    """Such tensors lie on the host, in the type of their run.

    "meta" stands in for a GPU: what is mixed up is refused there as well. It cannot show values;
    tests/gpu does.
    """
    plan, meta = Plan.data_parallel(GRAPH, 1), torch.device("meta")
    run = Experiment(**{**FIELDS, "plan": plan, "sync": sync})
    groups = Alone().groups([("control", (0,)), *group_specs(plan)])
    reader, context = Memory(small.net().state_dict()), BatchContext(0, (0,), seed=0)
    model = cut(plan, context, groups, reader, device=meta, dtype=torch.float64)
    parameters = model.trainable()
    assert {parameter.device for parameter in parameters.values()} == {meta}
    came = {name: torch.ones(parameter.shape) for name, parameter in parameters.items()}
    left = [InFlight(step, came, came) for step in (3, 4)]
    program = program_of(run).of(0)
    strategy = strategy_of(program, model, updater_of(program, model), 5, left)
    for flight in strategy.in_flight:
        for piece in (*flight.gradients.values(), *flight.weights.values()):
            assert (piece.device, piece.dtype) == (meta, torch.float64)
    assert [flight.step for flight in strategy.in_flight] == (
        [3, 4] if isinstance(sync, Pipelined) else []
    )


def test_what_a_codec_left_out_goes_where_it_is_kept():
    """As above; under a communicator of GPUs, what is left out is kept there.

    "meta" takes a sum with a tensor of the host, which a GPU refuses: so does `OneDevice`.
    """
    plan, meta = Plan.data_parallel(GRAPH, 1), torch.device("meta")
    groups = Alone().groups([("control", (0,)), *group_specs(plan)])
    whole = small.net().state_dict()
    model = cut(plan, BatchContext(0, (0,), seed=0), groups, Memory(whole), device=meta)
    kept = {"5.weight": torch.zeros(whole["5.weight"].shape, device=meta)}
    came = Memory({residual_entry(0, 0, name): whole[name] for name in kept})
    with OneDevice():
        restore_residuals(came, model, [kept])
    assert kept["5.weight"].device == meta
