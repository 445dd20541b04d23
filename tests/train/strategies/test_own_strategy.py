"""Strategies of one's own on ranks, against plain torch in one process."""

from pathlib import Path

import pytest
import torch
from ipyparallel.error import RemoteError
from torch.testing import assert_close

from tests.layers import nets
from tests.train.runs import pieces_of, started
from tests.train.strategies import own
from workbench.bench.predict.stepping import measure
from workbench.model.tracing.trace import trace
from workbench.model.weights.initial import initialize
from workbench.plan.collective.codec import Codec
from workbench.plan.experiment.experiment import SGD, Experiment, LocalSGD, LRScheduler, Synthetic
from workbench.plan.experiment.sync import OwnStrategy, Pipelined, Strategy, Synchronous
from workbench.plan.extension.user_object import OwnObjectError
from workbench.plan.plans.plan import Plan
from workbench.predict.memory.memory import memory_of
from workbench.predict.traffic.traffic import traffic_of
from workbench.program.step import program_of
from workbench.train.checkpoint import checkpoint
from workbench.train.optimizer.rules import try_out
from workbench.train.run.equality import check_equal
from workbench.train.run.loop import agree
from workbench.train.run.reshard import under

GRAPH = trace(own.net(), input_shape=own.SHAPE)
STEPS = 8
SMALL = 600


def hybrid(k: int, rounds: str = "BK", world: int = 4) -> Plan:
    plan = Plan.data_parallel(GRAPH, world).with_layer("4", scheme="shard_out", group_size=k)
    return plan.with_layer("6", scheme="duplicate", group_size=k).with_rounds(rounds)


ROWS = (3, 0, 2, 1)
PARALLEL = Plan.data_parallel(GRAPH, 4, ROWS)
UNEQUAL = hybrid(4).with_layer("4", scheme="shard_out", group_size=4, shares=(3, 0, 2, 1))


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return initialize(GRAPH, 0, tmp_path_factory.mktemp("weights"), module=own.net())


def experiment(plan, strategy, **fields):
    given = dict(
        data=Synthetic(samples=own.SAMPLES),
        batch_size=own.BATCH,
        optimizer=SGD(lr=own.LR, momentum=own.MOMENTUM),
        steps=STEPS,
        precision="fp64",
        sync=OwnStrategy(strategy, bucket_bytes=SMALL),
    )
    return Experiment(plan=plan, **{**given, **fields})


def trained(world, runs, weights):
    """For each run: this rank's weights at the end, and steps whose traffic was not predicted."""
    found = []
    for run, replans in runs:
        state = started(world, run, weights)
        predicted, wrong = traffic_of(program_of(run)), []
        for step in range(run.steps):
            if step in replans:
                state = under(state, replans[step], step)
                predicted = traffic_of(program_of(state.experiment))
            world.recorder.reset()
            result = state.stepper.run(step)
            agree(state.everyone, result.loss, False, result.blocked_s)
            state.stepper.update()
            state.strategy.rest()
            rows = [row.counts for row in world.recorder.rows()]
            whole = result.samples == run.batch_size and run.plan.rounds == "BK"
            expected = predicted.rows(world.rank, step)
            if whole and sorted(rows) != sorted(expected):
                wrong.append((step, set(rows) ^ set(expected)))
        state.strategy.settle()
        check_equal(state.model, state.everyone, run.steps, run.sync)
        found.append((pieces_of(state), wrong))
        state.stepper.feed.close()
    return found


def check(on_ranks, weights, cases):
    """(experiment, {step: plan to go on under}, whole weights) on four ranks."""
    every = on_ranks(4, trained, [(run, plans) for run, plans, _ in cases], weights)
    for rank, found in enumerate(every):
        for (run, plans, expected), (pieces, wrong) in zip(cases, found, strict=True):
            assert not wrong, (run.sync.title, rank)
            plan = plans[max(plans)] if plans else run.plan
            for name, piece in pieces.items():
                mine = nets.piece_of(plan, name, expected[name], rank)
                assert_close(piece, mine, rtol=1e-10, atol=1e-12, msg=lambda m, r=run: f"{r}: {m}")


SUMS = (own.Adaptive(), own.Adaptive(warmup=3), own.EveryThird(), own.Heavy())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", SUMS, ids=["late", "warm and late", "added up", "heavy"])
def test_sums_are_used_as_in_one_process(on_ranks, weights, strategy):
    """Also clipped, sharded, in micro-batches, with idle ranks and in rounds."""
    expected = own.with_sums(strategy, STEPS)
    plans = (PARALLEL, UNEQUAL, hybrid(2), hybrid(2, "B"))
    cases = [(experiment(plan, strategy), {}, expected) for plan in plans]
    parts = dict(shard_optimizer=(1, 0, 2, 1), accumulate=2)
    cases.append((experiment(hybrid(2), strategy, **parts), {}, expected))
    small = own.with_sums(strategy, STEPS, clip=0.2)
    assert not torch.allclose(small["0.weight"], expected["0.weight"])
    cases.append((experiment(hybrid(2), strategy, clip_norm=0.2), {}, small))
    at = {2: UNEQUAL, 5: PARALLEL, 7: hybrid(2)}
    cases.append((experiment(hybrid(2), strategy), at, expected))
    check(on_ranks, weights, cases)


MEANS = (own.SlowMo(), own.SlowMo(every=2, warmup=3), own.Prox())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", MEANS, ids=["slowmo", "post-local slowmo", "prox"])
def test_means_are_used_as_of_copies_in_one_process(on_ranks, weights, strategy):
    cases = []
    for plan, k, shares in ((PARALLEL, 1, ROWS), (hybrid(2), 2, None), (hybrid(2, "B"), 2, None)):
        expected = own.with_means(strategy, STEPS, 4, k, shares)
        cases.append((experiment(plan, strategy), {}, expected))
    whole = own.with_means(strategy, STEPS, 4, 4)
    cases.append((experiment(UNEQUAL, strategy), {}, whole))
    check(on_ranks, weights, cases)


class Mean(Strategy):
    exchanges, every = "weights", 3


class Plain(Strategy):
    """What the built-in one does."""


class Lag(Strategy):
    late, warmup = 2, 2


CODED = dict(codec=Codec(name="int8", error_feedback=True), algorithm="ring", bucket_bytes=SMALL)
ALIKE = (
    (OwnStrategy(Mean(), bucket_bytes=SMALL), LocalSGD(every=3, bucket_bytes=SMALL)),
    (OwnStrategy(Plain(), **CODED), Synchronous(**CODED)),
    (OwnStrategy(Lag(), **CODED), Pipelined(width=3, warmup=2, **CODED)),
)


@pytest.mark.slow
def test_what_states_the_same_as_a_built_in_one_leaves_the_same_bits(on_ranks, weights):
    runs = [experiment(hybrid(2), Plain(), sync=sync) for pair in ALIKE for sync in pair]
    for found in on_ranks(4, trained, [(run, {}) for run in runs], weights):
        for mine, built_in in zip(found[::2], found[1::2], strict=True):
            assert not mine[1]
            for name, tensor in built_in[0].items():
                assert torch.equal(mine[0][name], tensor), name


@pytest.fixture
def run(whole_run, weights):
    def run(plan, strategy, *, resume=None, stop_after=None, **fields):
        made = experiment(plan, strategy, **fields)
        _, _, (outcome, *_) = whole_run(made, weights, resume, stop_after)
        reader = checkpoint.load(Path(outcome.checkpoint), GRAPH).reader
        return {name: reader.read(name) for name in reader.names}, outcome

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [own.SlowMo(), own.SlowMo(every=2, warmup=4), own.Prox(), own.Adaptive(), own.EveryThird()],
    ids=["slowmo", "post-local", "prox", "late", "added up"],
)
def test_a_resumed_run_is_the_one_that_went_on(run, strategy):
    """Saved after steps 2, 4, 6: within and at the end of what is done every few steps."""
    went_on, _ = run(hybrid(2), strategy, checkpoint_every=2)
    _, outcome = run(hybrid(2), strategy, checkpoint_every=2, stop_after=3)
    assert outcome.step == 4
    resumed, outcome = run(hybrid(2), strategy, resume=Path(outcome.checkpoint), checkpoint_every=2)
    assert outcome.step == STEPS
    assert set(resumed) == set(went_on)
    kept = {f"optimizer/strategy.{kind}/4.weight" for kind in strategy.remembers}
    assert kept <= set(resumed)
    for name, tensor in went_on.items():
        assert torch.equal(resumed[name], tensor), name
    if strategy.exchanges == "gradients":  # whose sums mean the same whenever they are taken
        for name, tensor in own.with_sums(strategy, STEPS).items():
            assert_close(resumed[name], tensor, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_sums_of_a_part_of_the_steps_are_kept_under_another_plan(run):
    """After step 4 a gradient is added up, which ranks of another plan go on from."""
    expected = own.with_sums(own.EveryThird(), STEPS)
    _, outcome = run(hybrid(2), own.EveryThird(), stop_after=3)
    resumed, _ = run(UNEQUAL, own.EveryThird(), resume=Path(outcome.checkpoint))
    for name, tensor in expected.items():
        assert_close(resumed[name], tensor, rtol=1e-10, atol=1e-12)


def test_weights_that_move_every_few_steps_are_averaged_when_they_move(run):
    """At the rate of the step that moves them."""
    options = dict(ema=0.6, schedule=LRScheduler("StepLR", step_size=2, gamma=0.5))
    saved, _ = run(hybrid(2), own.EveryThird(), **options)
    averages = own.with_sums(own.EveryThird(), STEPS, ema=0.6, halved=2)
    assert averages
    for name, average in averages.items():
        assert_close(saved[f"optimizer/ema/{name}"], average, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_what_a_checkpoint_lacks_is_said(run):
    _, outcome = run(hybrid(2), own.Heavy(), sync=Synchronous(), stop_after=3)
    text = "has no velocity of the strategy: it was saved under Synchronous"
    with pytest.raises(RemoteError, match=f"CheckpointError.*{text}"):
        run(hybrid(2), own.Heavy(), resume=Path(outcome.checkpoint))


@pytest.mark.slow
def test_memory_is_predicted(on_ranks, weights):
    """What a strategy remembers is there, and what its methods make beside it has room."""
    for strategy in (own.SlowMo(), own.Adaptive(), own.EveryThird(), own.Heavy()):
        made = experiment(hybrid(2), strategy, batch_size=8)
        predicted = memory_of(program_of(made))
        plain = memory_of(program_of(made.replace(sync=Synchronous(bucket_bytes=SMALL))))
        seen = on_ranks.seated(4, measured, made, weights)
        for rank, peak in enumerate(seen):
            assert peak == pytest.approx(predicted[rank].peak_bytes, rel=0.02), strategy.name
        states = predicted[0].categories["optimizer"] - plain[0].categories["optimizer"]
        one = sum(8 * placed.piece_numel(0) for placed in made.plan.flow.weights.values())
        assert states == len(strategy.remembers) * one


def measured(config, made, weights):
    return measure(config, made, weights=weights).peak_bytes


class Mixing(Strategy):
    def gradient(self, step, grad, weight, then, state):
        return grad / grad.norm()


class Drawing(Strategy):
    def gradient(self, step, grad, weight, then, state):
        return grad + torch.randn_like(grad)


class Counting(Strategy):
    def __init__(self):
        self.calls = 0

    def gradient(self, step, grad, weight, then, state):
        self.calls += 1
        return grad


class Shaping(Strategy):
    def gradient(self, step, grad, weight, then, state):
        return grad.sum()


class Failing(Strategy):
    def gradient(self, step, grad, weight, then, state):
        return grad + state["speed"]


class Inventing(Strategy):
    remembers = {"a": 0.0}  # noqa: RUF012

    def gradient(self, step, grad, weight, then, state):
        state["b"] = grad
        return grad


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (Mixing(), "must work element by element"),
        (Drawing(), "must work the same way each time"),
        (Counting(), "changed self.calls, which no checkpoint has"),
        (Shaping(), r"must give a tensor of shape \(48,\) for 'a trial', got \(\)"),
        (Failing(), r"gradient\(\) failed on a trial of 48 drawn numbers: KeyError: 'speed'"),
        (Inventing(), "left the states a, b of 'a trial', and remembers names a"),
    ],
)
def test_what_would_not_be_the_same_under_any_plan_is_refused(strategy, text):
    with pytest.raises(OwnObjectError, match=text):
        try_out(strategy, OwnStrategy(strategy).timing)
