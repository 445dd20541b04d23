"""Who sends to whom: rows add up to the traffic, and pairs are those of the algorithms."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.comm.lockstep import run
from tests.layers import nets
from tests.layers.drawn import GRAPHS
from tests.predict.traffic.test_traffic import experiment, runs
from workbench.comm.algorithms import flat as executed
from workbench.plan.collective.codec import Codec
from workbench.plan.experiment.experiment import LocalSGD, ParameterServer, Synchronous
from workbench.plan.io.errors import ExperimentError
from workbench.plan.plans.plan import Plan
from workbench.predict.traffic.collective_costs import (
    FLAT,
    Part,
    direct,
    hierarchical,
    ring,
    summed,
)
from workbench.predict.traffic.traffic import pairs_of, traffic_of
from workbench.program.step import program_of

PROFILE = settings(max_examples=40, derandomize=True, database=None)
CODED = [None, Codec(name="int8", chunk=4), Codec(name="top_k", fraction=0.3)]


def check(wanted, ranks_per_host=None):
    """The rows of every collective, against what it brings."""
    program = program_of(wanted, ranks_per_host)
    traffic, pairs = traffic_of(program).collectives, pairs_of(program)
    assert [(p.op, p.layer, p.phase, p.every) for p in pairs] == [
        (c.op, c.layer, c.phase, c.every) for c in traffic
    ]
    for own, collective in zip(pairs, traffic, strict=True):
        assert own.bytes.sum(axis=1).tolist() == list(collective.bytes)
        assert not own.bytes.diagonal().any()
        group = {rank: index for index, g in enumerate(collective.groups) for rank in g}
        takers, senders = own.bytes.nonzero()
        assert all(group[a] == group[b] for a, b in zip(takers, senders, strict=True))
    return pairs


@PROFILE
@given(case=runs(), hosts=st.sampled_from([None, 1, 2]))
def test_any_plan(case, hosts):
    check(case[1], hosts)


@pytest.mark.parametrize(
    "sync",
    [
        Synchronous(algorithm="ring", bucket_bytes=600),
        Synchronous(algorithm="halving_doubling", bucket_bytes=600),
        Synchronous(algorithm="hierarchical", bucket_bytes=600),
        Synchronous(codec="int8", bucket_bytes=600),
        LocalSGD(every=3, bucket_bytes=600),
        ParameterServer(server=1, bucket_bytes=600),
    ],
    ids=lambda sync: getattr(sync, "algorithm", sync.kind),
)
@pytest.mark.parametrize("world", [4, 6])
def test_strategies(sync, world):
    check(experiment(Plan.hybrid(GRAPHS[nets.Picture], world, 2), sync=sync), 3)


def test_a_parameter_server_hears_all_and_answers_all():
    served = experiment(Plan.data_parallel(GRAPHS[nets.Picture], 3), sync=ParameterServer(server=1))
    reduce, broadcast = (p for p in check(served) if p.op in ("reduce", "broadcast"))
    assert set(zip(*reduce.bytes.nonzero(), strict=True)) == {(1, 0), (1, 2)}
    assert np.array_equal(broadcast.bytes, reduce.bytes.T)


@PROFILE
@given(
    length=st.integers(0, 300),
    ranks=st.integers(1, 9),
    codec=st.sampled_from(CODED),
    name=st.sampled_from(sorted(FLAT)),
)
def test_flat_algorithms_bring_what_they_cost(length, ranks, codec, name):
    if name == "halving_doubling":
        codec = None
    formula = {"ring": ring, "direct": direct}.get(name)
    costs = FLAT[name](length, 4, ranks) if codec is None else formula(length, 4, ranks, codec)
    found = summed(Part(name, length, 4, codec, 1), (ranks,))
    assert found.sum(axis=1).tolist() == costs.bytes.tolist()


@pytest.mark.parametrize("name", sorted(FLAT))
@PROFILE
@given(length=st.integers(0, 40), ranks=st.integers(1, 9))
def test_pairs_are_those_between_which_messages_go(name, length, ranks):
    flats = [torch.ones(length) for _ in range(ranks)]
    went: dict[tuple[int, int], int] = {}
    run([executed.FLAT[name].rounds(flat, range(ranks), me) for me, flat in enumerate(flats)], went)
    found = summed(Part(name, length, 4, None, 1), (ranks,))
    assert {
        (int(t), int(g)): int(found[t, g]) for t, g in zip(*found.nonzero(), strict=True)
    } == went


@PROFILE
@given(
    length=st.integers(0, 300),
    hosts=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    codec=st.sampled_from(CODED),
)
def test_two_levels_bring_what_they_cost(length, hosts, codec):
    found = summed(Part("hierarchical", length, 4, codec, 1), hosts)
    costs = hierarchical(length, 4, hosts, codec).both
    assert found.sum(axis=1).tolist() == costs.bytes.tolist()


def test_neighbours_of_a_ring_and_distances_of_halving_doubling():
    near = summed(Part("ring", 40, 1, None, 1), (4,))
    assert near.tolist() == [[0, 0, 0, 60], [60, 0, 0, 0], [0, 60, 0, 0], [0, 0, 60, 0]]
    far = summed(Part("halving_doubling", 40, 1, None, 1), (4,))
    assert far.tolist() == [[0, 20, 40, 0], [20, 0, 0, 40], [40, 0, 0, 20], [0, 40, 20, 0]]


def test_too_many_ranks_are_refused():
    wide = experiment(Plan.data_parallel(GRAPHS[nets.Picture], 1024), batch_size=2048)
    with pytest.raises(ExperimentError, match="up to 512 ranks, got 1,024"):
        pairs_of(program_of(wide, None))
