"""Opening and closing worlds, and the groups in them."""

import gc
import os
import resource
import signal
import socket
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.ranks import all_ranks
from workbench.comm.all_reduce import all_reduce, start_all_reduce
from workbench.comm.collectives import all_gather
from workbench.comm.groups import world as world_module
from workbench.comm.groups.group import Group
from workbench.comm.groups.world import RankConfig, SealedStore, World, backend_of
from workbench.comm.messages.errors import CommError, CommTimeout, PeerLost
from workbench.comm.messages.recorder import Recorder
from workbench.plan.placement.placement import Shard


def threads(world):
    return world.rank, world.size, str(world.device), torch.get_num_threads(), dist.get_rank()


def test_a_rank_knows_its_place(on_ranks):
    assert on_ranks(3, threads) == [(rank, 3, "cpu", 1, rank) for rank in range(3)]


def test_who_does_not_come_to_the_opening_is_named():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    threads = torch.get_num_threads()
    config = RankConfig(1, 3, "127.0.0.1", store.port, "a world", timeout_s=0.1, threads=threads)
    with pytest.raises(
        CommTimeout, match="the world to open; did not arrive: rank 0, rank 2"
    ) as caught:
        with World.open(config):
            pass
    assert caught.value.missing == (0, 2)
    assert not dist.is_initialized()


def test_a_store_that_is_gone_is_not_waited_for():
    """A port at which nobody listens: torch would try again for all the time that there is."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    config = RankConfig(0, 2, "127.0.0.1", port, "gone", timeout_s=3600.0)
    with pytest.raises(CommError, match=f"rank 0 does not reach the store .* 127.0.0.1:{port}"):
        with World.open(config):
            pass


def test_a_world_that_could_not_be_made_leaves_no_trace(monkeypatch):
    def fail(*_, **__):
        dist.distributed_c10d._process_group_name([], use_hashed_name=False)
        raise RuntimeError("connection closed")

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    config = RankConfig(0, 1, "127.0.0.1", store.port, "a world", threads=torch.get_num_threads())
    monkeypatch.setattr(dist, "init_process_group", fail)
    with pytest.raises(RuntimeError, match="connection closed"), World.open(config):
        pass
    # Else this rank's groups would have other names than the other ranks' from now on.
    assert dist.distributed_c10d._world.group_count == 0


def test_an_interrupt_while_a_world_closes_does_not_keep_the_next_from_opening(monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def config(number):
        threads = torch.get_num_threads()
        return RankConfig(0, 1, "127.0.0.1", store.port, f"world {number}", threads=threads)

    close = World._close

    def interrupted(world):
        signal.raise_signal(signal.SIGINT)  # not heard
        close(world)

    monkeypatch.setattr(World, "_close", interrupted)
    with World.open(config(0)):
        pass
    assert not dist.is_initialized()
    monkeypatch.setattr(World, "_close", lambda _: None)  # it came before that could begin
    with World.open(config(1)):
        pass
    assert dist.is_initialized()
    monkeypatch.undo()
    with World.open(config(2)) as world:
        assert world.groups([("all", (0,))])
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("devices", "backend"),
    [
        (["gpu a"], "nccl"),
        (["gpu a", "gpu b", "gpu c"], "nccl"),
        (["gpu a", "gpu b", "cpu"], "gloo"),
        (["gpu a", "cpu"], "gloo"),
        (["gpu a", "gpu b", "gpu a"], "gloo"),
        (["cpu", "cpu"], "gloo"),
        (["cpu"], "gloo"),
    ],
)
def test_the_backend_follows_from_what_all_ranks_compute_on(devices, backend):
    """The rule alone; a world of both kinds needs a GPU (tests/gpu)."""
    assert backend_of(devices) == backend


def test_a_rank_takes_what_the_devices_of_all_ask_for(monkeypatch):
    """Two ranks that say they are on GPUs of their own, beside one that is on none."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    taken, threads = [], torch.get_num_threads()

    def asked(backend, **_):
        taken.append(backend)
        raise RuntimeError("enough")

    monkeypatch.setattr(dist, "init_process_group", asked)
    for number, beside in enumerate((["gpu a", "gpu b"], ["gpu a", "cpu"])):
        monkeypatch.setattr(world_module, "_device_name", lambda _device: "gpu c")
        notes = SealedStore(dist.PrefixStore(f"world {number}", store), "")
        for rank, device in enumerate(beside, start=1):
            notes.set(f"the world to open/{rank}", device)
        config = RankConfig(0, 3, "127.0.0.1", store.port, f"world {number}", threads=threads)
        with pytest.raises(RuntimeError, match="enough"), World.open(config):
            pass
    assert taken == ["nccl", "gloo"]


SPECS = [
    ("shard", (0, 1)),
    ("shard", (2, 3)),
    ("replica", (0, 2)),
    ("replica", (1, 3)),
    ("reversed", (3, 2, 1, 0)),
    ("replica", (0, 1)),
    ("alone", (2,)),
]


def sums_and_order(world):
    groups = world.groups(SPECS)
    rank, answers = torch.tensor([float(world.rank)]), {}
    for spec, group in groups.items():
        assert (group.ranks, group.size) == (spec[1], len(spec[1]))
        assert group.ranks[group.rank] == world.rank
        gathered = all_gather(rank, Shard(0, (1,) * group.size), group)
        answers[group.name] = all_reduce(rank, group).item(), gathered.tolist()
    return answers


def test_groups_hold_their_ranks_in_order(on_ranks):
    answers = on_ranks(4, sums_and_order)
    for rank, got in enumerate(answers):
        assert got == {
            f"{purpose}({','.join(map(str, ranks))})": (sum(ranks), list(ranks))
            for purpose, ranks in SPECS
            if rank in ranks
        }


def refused(world):
    messages = []
    for specs in (
        [("shard", (0, 1)), ("shard", (0, 1))],
        [("shard", (0, 2))],
        [("shard", (0, 0))],
        [("shard", ())],
    ):
        with pytest.raises(ValueError, match="shard") as caught:
            world.groups(specs)
        messages.append(str(caught.value))
    return messages


def test_impossible_groups_are_refused(on_ranks):
    assert on_ranks(2, refused)[0] == [
        "every group can be asked for once, got [('shard', (0, 1)), ('shard', (0, 1))]",
        "group 'shard' needs one or more different ranks of 0..1, got (0, 2)",
        "group 'shard' needs one or more different ranks of 0..1, got (0, 0)",
        "group 'shard' needs one or more different ranks of 0..1, got ()",
    ]


def test_a_group_has_a_link_if_and_only_if_it_has_several_ranks():
    assert Group("alone", (3,), 0, Recorder()).size == 1
    with pytest.raises(ValueError, match="without one"):
        Group("pair", (0, 1), 0, Recorder())


def different_settings(world):
    spec = ("shard" if world.rank == 0 else "replica", (0, 1))
    with pytest.raises(ValueError, match="wants") as caught:
        world.groups([spec])
    return str(caught.value)


def test_ranks_must_want_the_same_groups(on_ranks):
    assert on_ranks(2, different_settings) == [
        "rank 0 wants [('shard', (0, 1))], rank 1 [('replica', (0, 1))]",
        "rank 1 wants [('replica', (0, 1))], rank 0 [('shard', (0, 1))]",
    ]


def one_makes_no_groups(world):
    if world.rank == 1:
        return world.store.wait(["given up"])
    world._watch.timeout_s = 0.5  # from here on: to open the world may take longer
    with pytest.raises(
        CommTimeout, match=r"groups to be made \(call 1\); did not arrive: rank 1"
    ) as caught:
        all_ranks(world)
    world.store.set("given up", "")
    return caught.value.missing


def test_who_makes_no_groups_is_named(on_ranks):
    assert on_ranks(2, one_makes_no_groups, anew=True)[0] == (1,)


def nothing(world):
    return all_reduce(torch.ones(1), all_ranks(world)).item()


def test_worlds_follow_each_other_in_one_process(on_ranks):
    assert [on_ranks(size, nothing, anew=True)[0] for size in (2, 4, 1, 3, 2)] == [2, 4, 1, 3, 2]


def open_files():
    return len(os.listdir("/proc/self/fd"))


def made_and_let_go(world, times):
    """Files that are open after each of many makings of groups, which work while they are there."""
    found = []
    gc.collect()
    gc.freeze()  # or each collection would go through all that torch has imported
    for turn in range(times):
        everyone = tuple(range(world.size))
        groups = world.groups([(f"turn {turn}", everyone), (f"pair {turn}", everyone[:2])])
        x = torch.ones(1000)
        for group in groups.values():
            flats = [group.buffer(1000, x).copy_(x) for _ in range(3)]
            for flat in flats:
                start_all_reduce(flat, group).wait()
                assert flat.eq(group.size).all()
            assert all_gather(x, Shard(0, (1000,) * group.size), group).sum() == 1000 * group.size
        del flats, flat
        world.let_go(groups.values())
        del group, groups
        gc.collect()
        found.append(open_files())
    gc.unfreeze()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("shared_memory", [True, False])
def test_files_do_not_add_up_over_many_groups(on_ranks, shared_memory):
    """Threads of gloo may close a connection a little later: no later time has more."""
    for found in on_ranks(3, made_and_let_go, 12, shared_memory=shared_memory):
        assert max(found[4:]) <= max(found[:4]) + 6, found


def alone_in_a_sum(config):
    """Rank 1 fails, and rank 0, whose sum is under way, leaves without it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world_module, "_patience", lambda config: timedelta(seconds=2))
        with suppress(ZeroDivisionError, PeerLost), World.open(config) as world:
            group = all_ranks(world)
            all_reduce(torch.ones(1), group, layer="meets")
            if world.rank == 1:
                raise ZeroDivisionError
            start_all_reduce(torch.ones(1), group, algorithm="backend", layer="lost")
            raise ZeroDivisionError
    return gloo_threads()


def gloo_threads(config=None):
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum("gloo" in name for name in names)


def gloo_threads_now(config):
    gc.collect()  # what earlier tests have left
    return gloo_threads()


def gloo_threads_later(config, most):
    until = time.monotonic() + 60
    while gloo_threads() > most and time.monotonic() < until:
        gc.collect()  # a failure's traceback refers to the groups
        time.sleep(0.1)
    return gloo_threads()


@pytest.mark.slow
def test_groups_of_a_lost_rank_go_when_nobody_waits_in_them_any_more(on_ranks):
    before = max(on_ranks.seated(2, gloo_threads_now))
    assert on_ranks.seated(2, alone_in_a_sum)[0] > before
    assert max(on_ranks.seated(2, gloo_threads_later, before)) <= before


def worlds_in_cycles(config):
    """Threads after each of some worlds, whose groups only a collection of garbage finds."""
    found = []
    gc.disable()
    try:
        for number in range(3):
            with World.open(replace(config, prefix=f"{config.prefix}, world {number}")) as world:
                holder = [all_ranks(world)]
                holder.append(holder)
            found.append(gloo_threads())
    finally:
        gc.enable()
    return found


def test_a_closed_world_has_no_threads_though_its_groups_are_in_cycles(on_ranks):
    for first, *others in on_ranks.seated(2, worlds_in_cycles):
        assert others == [first] * 2


def one_group_and_buffers(world, count):
    """Files that are open before and after so many buffers are made."""
    group = all_ranks(world)
    before = open_files()
    flats = [group.buffer(1000, torch.zeros(1)) for _ in range(count)]
    assert all(group.shared(flat) is not None for flat in flats)
    return before, open_files()


def test_buffers_need_no_open_files(on_ranks):
    """gloo may close a connection of a world before a little later."""
    for before, after in on_ranks(3, one_group_and_buffers, 50):
        assert after <= before


def closed_one(world):
    kept, closed = world.groups([("kept", (0, 1)), ("closed", (0, 1))]).values()
    world.let_go([closed])
    again = world.groups([("closed", (0, 1))])["closed", (0, 1)]
    return [all_reduce(torch.ones(1), group).item() for group in (kept, again)]


def test_the_other_groups_stay_when_one_is_closed(on_ranks):
    assert on_ranks(2, closed_one, anew=True) == [[2.0, 2.0]] * 2


def limited(config):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        with World.open(config):
            return resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_rank_may_open_as_many_files_as_the_system_lets_it(on_ranks):
    for soft, hard in on_ranks.seated(2, limited):
        assert soft == hard or hard == resource.RLIM_INFINITY


def test_what_torch_does_not_see_is_added_up_over_buffers():
    world = object.__new__(World)
    buffers = {n: SimpleNamespace(nbytes=n, held_bytes=3 * n) for n in (100, 10)}
    world._links = [SimpleNamespace(local=None, buffers={n: b}) for n, b in buffers.items()]
    assert world.staged_bytes == 2 * (100 + 10)
    assert world.shared_bytes == 3 * (100 + 10)
