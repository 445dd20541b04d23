"""Ranks that hold the same weights are compared, to the bit; who differs is named."""

import re

import pytest
import torch

from tests.train.runs import go_on, started
from tests.train.small import GRAPH
from workbench.comm.groups.world import World
from workbench.plan.experiment.experiment import (
    SGD,
    Experiment,
    LocalSGD,
    ParameterServer,
    Pipelined,
    Synchronous,
    Synthetic,
)
from workbench.plan.experiment.sync import OwnStrategy, Strategy
from workbench.plan.plans.plan import Plan
from workbench.store.messages import StopRequest
from workbench.train.run.equality import ReplicasDiffer, check_equal, digests
from workbench.train.run.loop import Loop
from workbench.train.run.memory import PeakMeter
from workbench.train.run.requests import LearningRates

PAIRS = Plan.hybrid(GRAPH, 4, 2).with_layer("10", scheme="duplicate", group_size=2)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.uint8)


def experiment(**fields):
    given = dict(plan=PAIRS, data=Synthetic(samples=50), batch_size=20, optimizer=SGD(lr=0.05))
    return Experiment(**{**given, "steps": 5, **fields})


def digest(tensor):
    return digests([tensor]).item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 7, 1000, 300_001])
def test_a_digest_changes_with_every_bit_and_its_place(dtype, length):
    x = torch.arange(length).remainder(100).to(dtype)
    assert digest(x) == digest(x.clone())
    flat = x.view(torch.uint8) if not x.is_complex() else torch.view_as_real(x).view(torch.uint8)
    flat = flat.view(-1)
    for at in {0, len(flat) // 2, len(flat) - 1}:
        for bit in (0, 7):
            before = digest(x)
            flat[at] ^= 1 << bit
            assert digest(x) != before
    if length > 1:
        assert digest(x.roll(1)) != digest(x)


def test_a_digest_is_of_what_a_tensor_holds_and_not_of_where_it_lies():
    x = torch.randn(40, 30)
    assert digest(x.t()) == digest(x.t().contiguous())
    room = torch.zeros(1300)
    for start in range(4):
        room[start : start + 1200] = x.flatten()
        assert digest(room[start : start + 1200].view(40, 30)) == digest(x)
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    assert digests([x[:0], x[:, :0]]).tolist() == [0, 0]


def tampered(world, run, weights, changes):
    """What each rank is told after some steps, as they are and with each change alone."""
    state = started(world, run, weights)
    go_on(state, range(3))
    check_equal(state.model, state.everyone, 3, run.sync)
    told = []
    for name, ranks in changes:
        flat = state.model.trainable()[name].detach().view(-1)
        kept = flat.clone()
        if world.rank in ranks:
            flat[-1:] = torch.nextafter(flat[-1:], torch.ones(1))
        with pytest.raises(ReplicasDiffer) as caught:
            check_equal(state.model, state.everyone, 3, run.sync)
        told.append((caught.value.layer, caught.value.ranks, str(caught.value)))
        flat.copy_(kept)
    check_equal(state.model, state.everyone, 3, run.sync)
    return told


@pytest.mark.parametrize(
    "fields", [{}, {"shard_optimizer": True}, {"sync": ParameterServer(server=1)}], ids=str
)
def test_a_rank_that_differs_by_one_bit_is_named_with_the_layer(on_ranks, weights, fields):
    """Whole weights on all ranks, also within groups; and pieces on two ranks each."""
    changes = [("0.weight", (2,)), ("10.weight", (3,)), ("5.weight", (3,)), ("5.bias", (0,))]
    every = on_ranks(4, tampered, experiment(**fields), weights, changes)
    assert all(told == every[0] for told in every)
    found = [(layer, ranks) for layer, ranks, _ in every[0]]
    # Of two that differ, either may be right: then it is the first that is held against the other.
    assert found == [("0", (2,)), ("10", (3,)), ("5", (3,)), ("5", (2,))]
    text = every[0][0][2]
    assert re.match("'0.weight' of layer '0' has other bits on rank 2 than .* after 3 steps", text)
    assert "ranks 0, 1, 2, 3: 1 thread, torch" in text
    assert "number of threads" in text


def session(config, run, weights, directory, changed_after):
    """A run in which rank 2 changes a weight of its own; the steps before it was found."""
    rows = []
    with PeakMeter(torch.device("cpu")) as meter, World.open(config) as world:
        state = started(world, run, weights)

        def emit(row):
            rows.append(row["step"])
            if world.rank == 2 and row["step"] == changed_after:
                with torch.no_grad():
                    state.model.trainable()["0.weight"][0, 0, 0, 0] += 1e-3

        loop = Loop(state, LearningRates(run.optimizer.lr), meter, directory, StopRequest(), emit)
        try:
            return rows, loop.run().reason, (), 0
        except ReplicasDiffer as error:
            compared = [row for row in world.recorder.rows() if row.layer == "equality"]
            return rows, error.layer, error.ranks, sum(row.calls for row in compared)


@pytest.mark.parametrize(
    ("fields", "changed_after", "seen", "compared"),
    [
        pytest.param({"evaluate_every": 2}, 2, [0, 1, 2], 3, id="evaluation"),
        pytest.param({"checkpoint_every": 2}, 0, [0, 1], 2, id="checkpoint"),
        pytest.param({}, 3, [0, 1, 2, 3], 2, id="end"),
        pytest.param({"sync": Pipelined(width=3)}, 3, [0, 1, 2, 3], 2, id="pipelined"),
    ],
)
def test_a_run_ends_when_its_ranks_have_parted(
    on_ranks, weights, tmp_path, fields, changed_after, seen, compared
):
    """After the first step, and whenever others are to see the weights."""
    run = experiment(**fields)
    found = on_ranks.seated(4, session, run, weights, tmp_path, changed_after)
    assert found == [(seen, "0", (2,), compared + 1)] * 4  # and what each computes with
    assert not list(tmp_path.glob("step-*"))


@pytest.mark.parametrize("every", [1, 2])
def test_what_is_not_to_be_equal_yet_is_not_compared(on_ranks, weights, tmp_path, every):
    run = experiment(sync=LocalSGD(every=every), evaluate_every=1, checkpoint_every=3)
    found = on_ranks.seated(4, session, run, weights, tmp_path, None)
    assert [rows for rows, *_ in found] == [[0, 1, 2, 3, 4]] * 4
    assert [reason for _, reason, *_ in found] == ["finished"] * 4


class OwnRule(Strategy):
    """As the built-in one."""


def parted(world, run, weights):
    """What is said of a rank that differs."""
    state = started(world, run, weights)
    state.stepper.run(0)
    state.stepper.update()
    if world.rank == 1:
        next(iter(state.model.trainable().values())).data.view(-1)[:1] += 1
    with pytest.raises(ReplicasDiffer) as caught:
        check_equal(state.model, state.everyone, 1, run.sync)
    return str(caught.value)


@pytest.mark.parametrize(
    ("sync", "own"),
    [
        (Synchronous(algorithm="tests.own_sums:Tree"), "'Tree'"),
        (Synchronous(codec="tests.own_sums:Sign"), "'Sign'"),
        (
            OwnStrategy(f"{__name__}:OwnRule", algorithm="tests.own_sums:Tree"),
            "'Tree' or 'OwnRule'",
        ),
    ],
    ids=str,
)
def test_what_is_ones_own_is_named_first(on_ranks, weights, sync, own):
    for text in on_ranks(4, parted, experiment(sync=sync), weights):
        assert f"Perhaps your own {own} gives ranks different bits, as wb.check_extension" in text
