"""A run that goes on under other plans is the run that went on under one."""

import gc
import itertools
import os

import pytest
import torch

from tests.train.runs import started
from tests.train.small import GRAPH
from workbench.client.run.requests import cost_of
from workbench.plan.collective.codec import Codec
from workbench.plan.experiment.experiment import SGD, AdamW, Experiment, Synthetic
from workbench.plan.experiment.sync import ParameterServer, Pipelined, Synchronous
from workbench.plan.plans.plan import Plan
from workbench.plan.plans.reshard import Reshard, held
from workbench.train.run.reshard import resharded_bytes, under


def synchronized(plan):
    return plan.with_batch_norm("synchronized")


ALONE = synchronized(Plan.data_parallel(GRAPH, 1))
PLANS = (
    synchronized(Plan.data_parallel(GRAPH, 3)),
    synchronized(Plan.hybrid(GRAPH, 3).with_layer("5", shares=(3, 0, 1)).with_rows((1, 0, 2))),
    synchronized(Plan.filters(GRAPH, 3, (8, 0, 3), grain=1)),
    synchronized(Plan.hybrid(GRAPH, 3)).with_rounds("B/K"),
    synchronized(Plan.data_parallel(GRAPH, 3, (0, 2, 1))),
)


def experiment(plan, **fields):
    return Experiment(
        plan=plan,
        data=Synthetic(samples=50),
        steps=2,
        precision="fp64",
        **{"batch_size": 20, "optimizer": AdamW(lr=0.01), **fields},
    )


def trained(world, first, plans, weights):
    """Losses of two steps under each plan, the last plan's pieces, and what each re-cut brought."""
    state = started(world, first, weights)
    losses, received, step = [], [], 0
    for plan in (first.plan, *plans):
        if step:
            before = resharded_bytes(world.recorder)
            state = under(state, plan, step)
            received.append(resharded_bytes(world.recorder) - before)
        for _ in range(first.steps):
            losses.append(state.stepper.run(step).loss)
            state.stepper.update()
            step += 1
    pieces = state.model.pieces()
    return losses, {name: piece.detach().clone() for name, piece in pieces.items()}, received


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer": AdamW(lr=0.01)},
        {"optimizer": SGD(lr=0.1, momentum=0.9, weight_decay=0.01), "shard_optimizer": True},
        {
            "optimizer": AdamW(lr=0.01),
            "shard_optimizer": (1, 0, 2),
            "sync": Synchronous(algorithm="direct"),
        },
        {"optimizer": SGD(lr=0.05, momentum=0.5), "sync": Pipelined(width=3)},
        {"optimizer": AdamW(lr=0.01), "sync": ParameterServer(server=1)},
    ],
    ids=["adamw", "sharded", "fused", "in-flight", "served"],
)
def test_plans_may_change_between_any_two_steps(on_ranks, weights, fields):
    first = experiment(PLANS[0], **fields)
    every = on_ranks(3, trained, first, PLANS[1:], weights)
    steps = len(PLANS) * first.steps
    alone = {"sync": Synchronous()} if isinstance(first.sync, ParameterServer) else {}
    alone |= {"shard_optimizer": False}
    ((expected, whole, _),) = on_ranks(
        1, trained, experiment(ALONE, **{**fields, **alone}).replace(steps=steps), (), weights
    )
    losses = [sum(parts) for parts in zip(*(found for found, _, _ in every), strict=True)]
    assert losses == pytest.approx(expected, rel=1e-10)
    for _, pieces, _ in every:  # whole ones, under the last plan; Adam magnifies rounding
        for name, piece in pieces.items():
            torch.testing.assert_close(piece, whole[name], rtol=1e-6, atol=1e-9)


def test_only_what_changes_hands_travels(on_ranks, weights):
    first = experiment(PLANS[0])
    every = on_ranks(3, trained, first, PLANS[1:], weights)
    for index, (before, after) in enumerate(itertools.pairwise(PLANS)):
        reshard = Reshard(before, after)
        for rank, (_, _, received) in enumerate(every):
            assert received[index] == 8 * reshard.received(rank, dict.fromkeys(GRAPH.trainable, 2))


def rows_taken(world, first, weights):
    state = started(world, first, weights)
    (batch,) = state.stepper.run(0).batches
    return batch.rows, len(batch.inputs[0])


def test_a_step_hands_out_rows_by_their_shares(on_ranks, weights):
    rows = PLANS[-1].rows_of(20)
    assert rows == (0, 13, 7)
    expected = [(rows, own) for own in rows]
    assert on_ranks(3, rows_taken, experiment(PLANS[-1]), weights) == expected


def files_over_re_cuts(world, first, plans, weights, times):
    """Files that are open after six re-cuts, and after all of them."""
    state = started(world, first, weights)
    found = []
    for step in range(times):
        state.stepper.run(step)
        state.stepper.update()
        state = under(state, plans[step % len(plans)], step + 1)
        if step in (5, times - 1):
            gc.collect()
            found.append(len(os.listdir("/proc/self/fd")))
    return found


@pytest.mark.slow
def test_files_do_not_add_up_over_many_re_cuts(on_ranks, weights):
    """Back and forth between plans; and on and on, to groups that were closed meanwhile."""
    pairs, whole = synchronized(Plan.hybrid(GRAPH, 4, 2)), synchronized(Plan.hybrid(GRAPH, 4))
    data = Plan.data_parallel(GRAPH, 4)
    for plans in ((whole, pairs), (data, whole, pairs)):
        first, times = experiment(pairs, batch_size=8), 36
        for some, many in on_ranks(4, files_over_re_cuts, first, plans, weights, times):
            # Fewer than one for each of them, and of a group that stays open there are several.
            assert many - some < times - 6


FEEDBACK = Codec(name="top_k", fraction=0.2, error_feedback=True)


def left_out(world, first, plans, weights):
    """What this rank's codecs have left out, by plan, as parts of whole tensors; notes; bytes."""
    state = started(world, first, weights)
    found, received, step = [], [], 0
    for plan in plans:
        for _ in range(2):
            state.stepper.run(step)
            state.stepper.update()
            step += 1
        state.strategy.settle()  # what is encoded is left out from then on
        found.append(placed(state))
        before = resharded_bytes(world.recorder)
        state = under(state, plan, step)
        received.append(resharded_bytes(world.recorder) - before)
        found.append(placed(state))
    return found, received, list(state.notes)


def placed(state):
    """Each residual where it lies in the whole tensor, zero elsewhere."""
    wholes = []
    for use in state.strategy.residuals:
        whole = {}
        for name, piece in use.items():
            at = state.model.placements[name]
            whole[name] = torch.zeros(at.shape, dtype=piece.dtype)
            start = 0
            regions = held(at, state.world.rank)
            dim = at.placement.dim if len(regions) and hasattr(at.placement, "dim") else 0
            for region in regions:
                length = region[dim][1] - region[dim][0] if region else 1
                part = piece.narrow(dim, start, length) if region else piece
                whole[name][tuple(slice(*span) for span in region)] = part
                start += length
        wholes.append(whole)
    return wholes


@pytest.mark.parametrize("sync", [Synchronous(codec=FEEDBACK), Pipelined(width=2, codec=FEEDBACK)])
def test_what_codecs_have_left_out_goes_along(on_ranks, weights, sync):
    """Its sum over all ranks is the same before and after, but for what no two ranks hold."""
    pairs = synchronized(Plan.filters(GRAPH, 4, (3, 1), group_size=2, grain=1))
    whole, alone = synchronized(Plan.data_parallel(GRAPH, 4)), synchronized(Plan.hybrid(GRAPH, 4))
    first = experiment(whole, sync=sync, optimizer=SGD(lr=0.02, momentum=0.9))
    ways = [(whole, pairs), (pairs, whole), (whole, alone)]
    every = on_ranks(4, left_out, first, [after for _, after in ways], weights)
    for index, (before, after) in enumerate(ways):
        reshard = Reshard(before, after)
        for use in range(len(every[0][0][0])):
            sums = [
                total([rank[0][2 * index + late][use] for rank in every]) for late in (False, True)
            ]
            for name, then in sums[0].items():
                assert then.abs().sum() > 0
                if reshard.residuals_kept(name):
                    torch.testing.assert_close(sums[1][name], then, rtol=1e-12, atol=1e-15)
                else:
                    assert name not in sums[1]
        cost = cost_of(first.replace(plan=before), after)
        assert tuple(rank[1][index] for rank in every) == cost.received_bytes
    assert any("dropped by a re-cut: no two ranks" in note for note in every[0][2])
    assert sum("dropped" in note for note in every[0][2]) == 1


def total(parts):
    names = {name for part in parts for name in part}
    return {name: sum(part[name] for part in parts if name in part) for name in names}
