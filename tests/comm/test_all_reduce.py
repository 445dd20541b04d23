"""The all-reduce by name, between processes: sums, bits, and what is recorded of it."""

import threading
import time
from dataclasses import replace

import pytest
import torch

from tests.ranks import all_ranks
from workbench.comm.all_reduce import all_reduce, start_all_reduce
from workbench.comm.collectives import all_gather
from workbench.comm.groups.world import World
from workbench.comm.messages.errors import PeerLost
from workbench.plan.placement.placement import Shard
from workbench.predict.traffic import collective_costs

LENGTHS = (0, 1, 3, 1000, 70_001)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)
CASES = [(length, torch.float32) for length in LENGTHS] + [(50, dtype) for dtype in DTYPES]


def sample(length, rank, dtype):
    generator = torch.Generator().manual_seed(1000 * length + rank)
    return (10 * torch.randn(length, generator=generator, dtype=torch.float64)).to(dtype)


def sums(world, algorithm):
    """Each case out of place, in place and in a buffer: whether bits agree, and the error."""
    group, found = all_ranks(world), []
    for case, (length, dtype) in enumerate(CASES):
        x = sample(length, world.rank, dtype)
        before = x.clone()
        results = [all_reduce(x, group, algorithm=algorithm, layer=f"{case} blocks")]
        assert torch.equal(x, before)
        start_all_reduce(x, group, algorithm=algorithm, layer=f"{case} plain").wait()
        buffer = group.buffer(length, x)
        buffer.copy_(before)
        pending = start_all_reduce(buffer, group, algorithm=algorithm, layer=f"{case} buffer")
        while not pending.poll():
            pass
        results += [x, buffer]
        exact = sum(sample(length, rank, dtype).double() for rank in range(world.size))
        size = sum(sample(length, rank, dtype).double().abs() for rank in range(world.size))
        eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0
        for result in results:
            assert result.dtype == dtype
            assert ((result.double() - exact).abs() <= world.size * eps * size).all(), case
        everywhere = all_gather(results[0][None], Shard(0, (1,) * world.size), group)
        assert torch.equal(everywhere, results[0].expand_as(everywhere))
        found.append([torch.equal(results[0], result) for result in results])
    rows = {r.layer: (r.messages, r.bytes, r.rounds) for r in world.recorder.rows()}
    return found, rows


def check_record(rank_rows, costs):
    for case, (length, dtype) in enumerate(CASES):
        for rank, cost in enumerate(costs(length, dtype.itemsize)):
            for kind in ("blocks", "plain", "buffer"):
                assert rank_rows[rank][f"{case} {kind}"] == cost, (case, kind, rank)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", collective_costs.FLAT)
def test_flat_algorithms(on_ranks, name, size):
    answers = on_ranks(size, sums, name, shared_memory=False)
    assert all(all(all(same) for same in found) for found, _ in answers)

    def costs(length, itemsize):
        every = collective_costs.FLAT[name](length, itemsize, size)
        return [(cost.messages, cost.bytes, cost.rounds) for cost in every]

    check_record([rows for _, rows in answers], costs)


HOSTS = ["aabb", "abab", "aaab", "aabc", "abc", "aaa"]


@pytest.mark.slow
@pytest.mark.parametrize("hosts", HOSTS)
def test_hierarchical(on_ranks, hosts):
    answers = on_ranks(len(hosts), sums, "hierarchical", hosts=hosts)
    assert all(all(all(same) for same in found) for found, _ in answers)
    names = sorted(set(hosts))
    order = [rank for name in names for rank, host in enumerate(hosts) if host == name]

    def costs(length, itemsize):
        sizes = [hosts.count(name) for name in names]
        every = collective_costs.hierarchical(length, itemsize, sizes)
        both = dict(zip(order, every.both, strict=True))
        return [(both[r].messages, both[r].bytes, both[r].rounds) for r in range(len(hosts))]

    check_record([rows for _, rows in answers], costs)


def many_at_once(world):
    """Several algorithms under way in a group, waited for in another order on every rank."""
    group = all_ranks(world)
    names = ("ring", "backend", "hierarchical", "halving_doubling", "direct", "auto") * 3
    flats = [group.buffer(500 + i, torch.ones(1)).fill_(i + world.rank) for i in range(len(names))]
    pendings = [
        start_all_reduce(flat, group, algorithm=name)
        for flat, name in zip(flats, names, strict=True)
    ]
    total = all_reduce(torch.ones(3), group, algorithm="ring").tolist()
    generator = torch.Generator().manual_seed(world.rank)
    for index in torch.randperm(len(names), generator=generator).tolist():
        pendings[index].wait()
        pendings[index].wait()  # a second time is nothing
    return [flat.unique().tolist() for flat in flats], total


@pytest.mark.parametrize("hosts", ["aaaa", "aabb", "abca", "abcd"])
def test_ranks_may_wait_in_any_order(on_ranks, hosts):
    for values, total in on_ranks(4, many_at_once, hosts=hosts):
        assert values == [[4.0 * i + 6.0] for i in range(18)]
        assert total == [4.0] * 3


def one_leaves(config, algorithm):
    try:
        with World.open(replace(config, host="aabb"[config.rank])) as world:
            group = all_ranks(world)
            if world.rank != 1:
                all_reduce(torch.ones(9), group, algorithm=algorithm, layer="fc")
    except PeerLost as error:
        return str(error)


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical"])
def test_a_lost_peer_is_reported_with_the_layer(on_ranks, algorithm):
    """Also by those who do not communicate with it."""
    began = time.monotonic()
    answers = on_ranks.seated(4, one_leaves, algorithm)
    assert time.monotonic() - began < 40.0
    for rank in (0, 2, 3):
        assert answers[rank].startswith(f"rank {rank} ")
        assert "all_reduce of layer 'fc'" in answers[rank]


class Gone:
    """A communicator that knows already, as a message starts, that a connection broke."""

    def recv(self, *_):
        raise RuntimeError("Connection closed by peer")


def with_nobody(world):
    group = all_ranks(world)
    group.link.process_group = Gone()
    with pytest.raises(PeerLost) as caught:
        all_reduce(torch.ones(9), group, algorithm="ring", layer="fc")
    return str(caught.value)


def test_a_connection_that_is_broken_before_the_start_is_reported_with_the_layer(on_ranks):
    for said in on_ranks(2, with_nobody, shared_memory=False, anew=True):
        assert "all_reduce of layer 'fc'" in said
        assert "Connection closed by peer" in said


def threads(world):
    before = threading.active_count()
    group = all_ranks(world)
    for _ in range(20):
        all_reduce(torch.ones(9), group, algorithm="ring")
    return before, threading.active_count()


def test_threads_that_wait_end_with_their_world(on_ranks):
    for _ in range(3):
        for before, during in on_ranks(3, threads, anew=True):
            assert before < during <= before + 2


def refused(world):
    with pytest.raises(ValueError, match="no all-reduce algorithm 'tree'"):
        all_reduce(torch.ones(1), all_ranks(world), algorithm="tree")
    with pytest.raises(ValueError, match="no all-reduce algorithm 'tree'"):
        start_all_reduce(torch.ones(1), all_ranks(world), algorithm="tree")


def test_what_is_no_algorithm_is_refused(on_ranks):
    on_ranks(1, refused)
