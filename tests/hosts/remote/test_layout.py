"""Which engine is where, and what it gets there."""

import json
from dataclasses import replace

import pytest

from tests.hosts.remote.agents import FOUR, GPUS, hello
from workbench.hosts.host import Gpu
from workbench.hosts.remote.gathering import choose, devices_of, require_same, sites_of
from workbench.hosts.remote.reception import Hello, address_of, addresses, ends_at, versions
from workbench.store.errors import ClusterError


def places(chosen):
    return [(agent.host.name, agent.port) for agent in chosen]


def test_engines_of_a_host_are_neighbours_however_a_launcher_deals_its_processes():
    dealt = [hello("b", 0, 1), hello("a", 1, 2), hello("b", 2, 3), hello("a", 3, 4)]
    expected = [("b", 1), ("b", 3), ("a", 2), ("a", 4)]
    assert places(choose(dealt, 4)) == expected
    assert places(choose(dealt[::-1], 4)) == expected


def test_without_numbers_hosts_come_by_name_and_one_too_many_is_left_out():
    there = [hello("b", port=1), hello("a", port=2), hello("a", port=1), hello("c", port=1)]
    assert places(choose(there, 3)) == [("a", 1), ("a", 2), ("b", 1)]
    with pytest.raises(ClusterError, match="5 engines need as many agents, and 4 have registered"):
        choose(there, 5)


def test_the_agents_of_a_host_divide_its_cores_not_the_clusters():
    devices = devices_of([hello("a"), hello("a"), hello("b")])
    assert [(own.host, own.cores) for own in devices] == [
        ("a", (0, 1)),
        ("a", (2, 3)),
        ("b", (0, 1, 2, 3)),
    ]
    assert {own.sharers for own in devices} == {1}


def test_agents_that_a_launcher_has_bound_keep_what_they_have():
    bound = [hello("a", cores=((core,),)) for core in range(2)]
    assert [own.cores for own in devices_of(bound)] == [(0,), (1,)]
    alone = [hello("a", gpus=(gpu,)) for gpu in GPUS]
    assert [own.gpu for own in devices_of(alone)] == ["GPU-a", "GPU-b"]


def test_the_gpus_of_a_host_are_dealt_and_those_of_another_are_others():
    index = (Gpu("0", "H100", 80 << 30),)
    devices = devices_of([hello("a", gpus=GPUS)] * 2 + [hello("b", gpus=index)] * 2)
    assert [own.gpu for own in devices] == ["GPU-a", "GPU-b", "0", "0"]
    assert [own.sharers for own in devices] == [1, 1, 2, 2]


def test_ranks_are_told_the_interface_of_their_own_host(tmp_path):
    (site,) = sites_of([hello("a", port=7)], tmp_path, 20.0)
    assert site.enter[-4:] == ("address of a", "7", str(tmp_path), "20.0")
    assert site.environment["GLOO_SOCKET_IFNAME"] == "ib-a"


def test_another_version_on_a_host_is_named():
    other = replace(hello("a"), versions={**versions(), "torch": "1.0"})
    require_same([hello("b")], versions())
    with pytest.raises(ClusterError, match=r"a has torch 1.0, and this host \d"):
        require_same([hello("b"), other], versions())


def test_what_an_agent_says_is_read_as_it_was_meant():
    said = replace(hello("a", 3, 7, FOUR, GPUS), ends_at=1.5)
    assert Hello.read(json.loads(json.dumps(said.plain()))) == said
    here = Hello.here("127.0.0.1", 1, "lo")
    assert Hello.read(here.plain()) == here


def test_an_interface_that_is_not_there_is_refused_with_those_that_are():
    address, name = next(iter(addresses().items()))
    assert address_of(name) == address
    with pytest.raises(ValueError, match=rf"no interface 'ib9'.* there are {name} \({address}\)"):
        address_of("ib9")


def test_when_an_allocation_ends_is_what_the_batch_system_says(tmp_path):
    assert ends_at({}) is None
    assert ends_at({"WORKBENCH_ENDS_AT": "12.5", "SLURM_JOB_END_TIME": "9"}) == 12.5
    assert ends_at({"SLURM_JOB_END_TIME": "9"}) == 9
    assert ends_at({"SLURM_JOB_ID": "1", "PATH": str(tmp_path)}) is None  # no squeue
    squeue = tmp_path / "squeue"
    squeue.write_text('#!/bin/sh\n[ "$SLURM_TIME_FORMAT" = %s ] && echo 1795284000\n')
    squeue.chmod(0o755)
    assert ends_at({"SLURM_JOB_ID": "1", "PATH": f"{tmp_path}:/usr/bin:/bin"}) == 1795284000
