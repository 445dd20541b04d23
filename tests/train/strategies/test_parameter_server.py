"""The parameter server: synchronous steps bit by bit, with the optimizer's state in one place."""

import pytest

from tests.train.recurrence import stepwise
from tests.train.runs import same, session, started, trained
from tests.train.small import GRAPH
from workbench.plan.experiment.experiment import (
    SGD,
    AdamW,
    Experiment,
    ParameterServer,
    Synchronous,
    Synthetic,
)
from workbench.plan.plans.plan import Plan
from workbench.train.checkpoint import checkpoint

MOMENTUM = SGD(lr=0.02, momentum=0.9, weight_decay=0.01)
FIELDS = dict(data=Synthetic(samples=50), batch_size=20, steps=4, checkpoint_every=2)
DATA = Plan.data_parallel(GRAPH, 3)
HYBRID = Plan.hybrid(GRAPH, 4, 2).with_batch_norm("synchronized")
UNEQUAL = Plan.hybrid(GRAPH, 3, 3).with_layer("5", shares=(3, 0, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "value", "server", "fields"),
    [
        (DATA, MOMENTUM, 1, {}),
        (HYBRID, AdamW(lr=0.01), 3, dict(accumulate=2)),
        (HYBRID.with_rounds("B/K"), MOMENTUM, 0, dict(precision="bf16")),
        (UNEQUAL, AdamW(lr=0.01), 2, dict(precision="fp64")),
    ],
    ids=["data", "hybrid", "rounds", "unequal"],
)
def test_weights_and_state_are_those_of_synchronous_steps(
    on_ranks, weights, plan, value, server, fields
):
    run = Experiment(plan=plan, optimizer=value, **FIELDS, **fields)
    served = run.replace(sync=ParameterServer(server=server, bucket_bytes=1000))
    summed = run.replace(sync=Synchronous(algorithm="direct"))
    expected = on_ranks(plan.world_size, trained, summed, weights)
    for mine, whole in zip(
        on_ranks(plan.world_size, trained, served, weights), expected, strict=True
    ):
        same(mine[0], whole[0])


def test_between_hosts(on_ranks, weights):
    run = Experiment(plan=DATA, optimizer=MOMENTUM, **FIELDS)
    served = run.replace(sync=ParameterServer())
    summed = run.replace(sync=Synchronous(algorithm="direct"))
    expected = on_ranks(3, trained, summed, weights, shared_memory=False)
    found = on_ranks(3, trained, served, weights, shared_memory=False)
    for mine, whole in zip(found, expected, strict=True):
        same(mine[0], whole[0])


def test_everything_goes_through_the_server(on_ranks, weights):
    run = Experiment(plan=DATA, optimizer=MOMENTUM, sync=ParameterServer(server=1), **FIELDS)
    n = 4 * sum(w.numel for layer in GRAPH.layers for w in layer.weights if w.trainable)
    for rank, (_, _, rows) in enumerate(on_ranks(3, stepwise, run, weights)):
        received = {op: size for op, layer, _, _, size in rows if layer != "status"}
        into, back = received["reduce"], received["broadcast"]
        assert into == (4 * 2 * n if rank == 1 else 0)
        assert back == (0 if rank == 1 else 4 * n)  # sent by the server, (p - 1) n of them a step


def held(world, experiment, weights):
    """For how many elements this rank has state."""
    state = started(world, experiment, weights)
    state.stepper.run(0)
    state.stepper.update()
    return sum(tensor.numel() for tensor in state.updater.tensors())


def test_only_servers_have_state(on_ranks, weights):
    pieces = [
        HYBRID.flow.weights[w.name] for layer in GRAPH.layers for w in layer.weights if w.trainable
    ]
    run = Experiment(plan=HYBRID, optimizer=MOMENTUM, sync=ParameterServer(server=2), **FIELDS)
    whole = sum(p.piece_numel(0) for p in pieces if p.group_size == 1)
    cut = [sum(p.piece_numel(r) for p in pieces if p.group_size == 2) for r in (0, 1)]
    assert on_ranks(4, held, run, weights) == [0, 0, whole + cut[0], cut[1]]


@pytest.mark.slow
def test_a_checkpoint_serves_any_strategy(on_ranks, weights, tmp_path):
    run = Experiment(plan=HYBRID, optimizer=AdamW(lr=0.01), **FIELDS)
    served, summed = run.replace(sync=ParameterServer(server=1)), run
    folders = {}
    for name, each in (("served", served), ("summed", summed)):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        on_ranks.seated(4, session, each, weights, folders[name], None, None)
    ends = {name: checkpoint.latest(folder) for name, folder in folders.items()}
    whole = {name: checkpoint.load(end, GRAPH).reader for name, end in ends.items()}
    assert set(whole["served"].names) == set(whole["summed"].names)
    same(*({n: r.read(n) for n in r.names} for r in (whole["served"], whole["summed"])))
    half = folders["summed"] / "step-000002"
    again = tmp_path / "again"
    again.mkdir()
    on_ranks.seated(4, session, served, weights, again, half, None)
    resumed = checkpoint.load(checkpoint.latest(again), GRAPH).reader
    same(
        {n: resumed.read(n) for n in resumed.names},
        {n: whole["summed"].read(n) for n in whole["summed"].names},
    )
