"""Strategies of one's own as values: stated, refused, written as text and read back."""

from importlib.metadata import EntryPoint

import pytest
import torch

from tests.plan.graphs import mlp
from workbench.client.run.own_objects import kept
from workbench.plan.experiment.experiment import SGD, Experiment, Synthetic
from workbench.plan.experiment.sync import (
    Compensated,
    LocalSGD,
    OwnStrategy,
    Pipelined,
    Strategy,
    Synchronous,
    Timing,
)
from workbench.plan.experiment.task import TorchData
from workbench.plan.extension import extension
from workbench.plan.extension.sealed import KEY_FILE
from workbench.plan.extension.user_object import opened
from workbench.plan.io.errors import ExperimentError
from workbench.plan.plans.plan import Plan
from workbench.program.step import program_of
from workbench.store import messages
from workbench.store.cluster_spec import KEY

ME = f"{__name__}:Outer"


class Outer(Strategy):
    exchanges, every = "weights", 4
    remembers = {"slow": "weight"}  # noqa: RUF012

    def averaged(self, step, mean, state):
        return mean


class Wanting(Strategy):
    def __init__(self):
        raise RuntimeError("no licence")


class Exact(Strategy):
    inexact = ""


def experiment(sync, **fields):
    given = dict(data=Synthetic(samples=40, classes=4), optimizer=SGD(0.1, momentum=0.9), steps=4)
    plan = Plan.data_parallel(mlp(4, 4), 2)
    return Experiment(plan=plan, sync=sync, batch_size=8, **{**given, **fields})


@pytest.mark.parametrize(
    "given", [Outer(), Outer, ME, OwnStrategy(Outer), {"kind": "own", "given": ME}]
)
def test_it_is_given_as_an_object_a_class_or_a_place(given):
    value = experiment(given).sync
    assert isinstance(value, OwnStrategy)
    assert value.title == "Outer"
    assert value.timing == Timing(
        exchanges="weights", every=4, remembers={"slow": "weight"}, corrects=True
    )
    assert value.inexact == "by a strategy of one's own, Outer"
    assert isinstance(value.strategy, Outer)
    assert hash(value) == hash(experiment(given).sync)


def test_an_installed_one_is_given_by_its_name(monkeypatch):
    points = {"strategies": {"outer": ME}, "data": {"pairs": f"{__name__}:pair", "digits": "no:no"}}

    def entry_points(group):
        found = points.get(group.rpartition(".")[2], {})
        return [EntryPoint(name, value, group) for name, value in found.items()]

    monkeypatch.setattr(extension, "entry_points", entry_points)
    run = experiment("outer", data="pairs")
    assert run.sync == OwnStrategy(ME)
    assert run.data == TorchData(train=f"{__name__}:pair", test=f"{__name__}:pair")
    assert experiment("local_sgd", data="digits").data.kind == "digits"
    with pytest.raises(ExperimentError, match=r"no sync 'inner'; .*'synchronous'.*installed"):
        experiment("inner")
    with pytest.raises(ExperimentError, match=r"no data 'cars'; there are .*installed one"):
        experiment("outer", data="cars")


@pytest.mark.parametrize("given", [Wanting, f"{__name__}:Wanting", "wanting"])
def test_one_that_cannot_be_made_is_named(monkeypatch, given):
    point = EntryPoint("wanting", f"{__name__}:Wanting", "workbench.strategies")
    monkeypatch.setattr(extension, "entry_points", lambda group: [point])
    with pytest.raises(ExperimentError, match=r"Wanting is a class .*RuntimeError: no licence; gi"):
        experiment(given)


def pair():
    return [((0.0,), 0)], [((1.0,), 1)]


def test_what_it_states_is_known_where_the_object_is_not(tmp_path, monkeypatch):
    """Predictions and programs need the text alone; ranks open the object, which must agree."""

    class Cell(Outer):
        pass

    there = kept(experiment(Cell()), tmp_path)
    back = messages.unpack(messages.pack(there))
    assert back.to_toml() == there.to_toml()
    assert Experiment.from_toml(there.to_toml()).sync.given.held is None
    text = Experiment.from_toml(there.to_toml())
    assert str(program_of(text)) == str(program_of(there))
    assert "Cell, " in str(program_of(text))
    monkeypatch.setenv(KEY_FILE, str(tmp_path / KEY))
    assert opened(text).sync.strategy.every == 4
    changed = Experiment.from_toml(there.to_toml().replace("every = 4", "every = 3"))
    with pytest.raises(ExperimentError, match=r"Cell states other things here.*changed since"):
        opened(changed)
    from_place = Experiment.from_toml(experiment(ME).to_toml())
    assert from_place == experiment(ME)


def test_the_built_in_ones_are_such_strategies():
    assert Synchronous().timing == Timing()
    assert LocalSGD(every=3, momentum="reset").timing == Timing(
        exchanges="weights", every=3, momentum="reset"
    )
    late = Pipelined(width=3, warmup=2, compensation="delay").timing
    assert late == Timing(late=2, warmup=2, keeps_weights=True, adjusts=True)
    assert Pipelined(width=1, warmup=2).timing == Timing()


def test_the_step_is_written_from_what_it_states():
    words = [one.word for one in program_of(experiment(Outer())).instructions]
    assert words[-5:] == ["rescale", "agree", "update", "average", "correct"]
    shown = str(program_of(experiment(Added())))
    assert shown.count("every 3 steps") == 4  # reduce, wait, adjust, update
    assert "adjust" in shown
    assert "correct" in str(program_of(experiment(Outer())))


class Added(Strategy):
    every = 3

    def gradient(self, step, grad, weight, then, state):
        return grad


def changed(**attributes):
    return type("Changed", (Strategy,), attributes)()


def same(self, step, mean, state):
    return mean


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        (dict(every=0), "strategy 'Changed': .*every.*greater than or equal to 1"),
        (dict(exchanges="votes"), "exchanges.*'gradients' or 'weights'"),
        (dict(exchanges="weights", late=1), "late and keeps_weights are about sums of gradients"),
        (dict(late=1, every=2), "late=1 and every=2 exclude each other"),
        (dict(keeps_weights=True), "keeps_weights is about gradients that are late"),
        (dict(momentum="average"), "momentum='average' is about ranks whose optimizers differ"),
        (dict(averaged=same), r"averaged\(\) is called where weights are averaged"),
        (dict(remembers={"a": 0.0}), "remembers names states, and no method of the strategy uses"),
        (dict(remembers={"a/b": 0.0}), "a state is called like a variable, got 'a/b'"),
        (dict(remembers={"a": "weights"}), "remembers.a"),
    ],
)
def test_what_excludes_each_other_is_refused(attributes, text):
    with pytest.raises(ExperimentError, match=text):
        experiment(changed(**attributes))


def test_a_late_gradient_is_corrected_by_how_far_weights_have_moved():
    """g + 0.5 g^2 (w - then): 2 + 0.5 * 4 * (3 - 1), and -1 + 0.5 * 1 * (0 - 4)."""
    grad, weight, then = map(torch.tensor, ([2.0, -1.0], [3.0, 0.0], [1.0, 4.0]))
    found = Compensated(1, 0, 0.5).gradient(7, grad, weight, then, {})
    assert found.tolist() == grad.tolist() == [6.0, -3.0]
    assert (weight.tolist(), then.tolist()) == ([3.0, 0.0], [1.0, 4.0])


def test_a_strategy_that_is_not_said_changes_nothing():
    grad, mean = object(), object()
    assert Strategy().gradient(0, grad, 1.0, 2.0, {}) is grad
    assert Strategy().averaged(0, mean, {}) is mean


@pytest.mark.parametrize(
    ("fields", "of_weights", "adds_up"),
    [
        ({}, False, False),
        (dict(every=2), False, True),
        (dict(exchanges="weights"), True, False),
        (dict(exchanges="weights", every=2), True, False),
        (dict(late=1), False, False),
    ],
)
def test_what_follows_from_what_it_states(fields, of_weights, adds_up):
    timing = Timing(**fields)
    assert (timing.of_weights, timing.adds_up) == (of_weights, adds_up)


def test_equal_timings_have_one_hash():
    one, other = (Timing(late=2, remembers={"a": 0.0}, adjusts=True) for _ in range(2))
    assert len({one, other, Timing(late=1), Timing(every=2)}) == 3


DAMPENED = SGD(0.1, momentum=0.9, dampening=0.5)


@pytest.mark.parametrize(
    ("sync", "fields", "text"),
    [
        (Outer(), dict(clip_norm=1.0), "under Outer no rank has it"),
        (Outer(), dict(ema=0.9), "under Outer each rank has its own"),
        (Outer(), dict(shard_optimizer=True), "under Outer each has its own"),
        (
            OwnStrategy(Added()),
            dict(optimizer=SGD(0.1, momentum=0.9, dampening=0.5)),
            "under Added",
        ),
        (dict(kind="own", given=ME, codec="int8"), {}, "codec: Outer sums no gradients in every"),
        (dict(kind="own", given=Added(), codec="int8"), {}, "codec: Added sums no gradients"),
        ("math:pi", {}, "is none of the strategies"),
        ("nowhere:Strategy", {}, "cannot be loaded"),
    ],
)
def test_what_does_not_combine_is_refused_by_name(sync, fields, text):
    with pytest.raises(ExperimentError, match=text):
        experiment(sync, **fields)


def test_one_that_claims_to_be_exact_is_not_inexact():
    assert experiment(Exact()).sync.inexact == ""
    coded = OwnStrategy(Exact(), codec="int8")
    assert coded.inexact.startswith("gradients travel as")


@pytest.mark.parametrize(("every", "warmup"), [(1, 0), (3, 0), (3, 2), (2, 4), (4, 3)])
def test_a_step_begins_anew_behind_one_that_moved_weights(every, warmup):
    timing = Timing(every=every, warmup=warmup)
    moves = [step < warmup or (step + 1) % every == 0 for step in range(12)]
    assert [timing.begins(step) for step in range(13)] == [True, *moves]
