"""Engines on emulated hosts: two ranks on each of two."""

import os
import signal
import time
from collections.abc import Iterator

import pytest
from torch import nn

import workbench as wb
from tests.client import leftovers
from tests.client.test_orphans import Owner
from tests.hosts.emulated.needs import needs_hosts, traces

pytestmark = [needs_hosts, pytest.mark.slow]

LONG_S = 120.0
NET = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
TRANSPORTS = {
    (0, 1, 2, 3): "shared memory within hosts, gloo across",
    **dict.fromkeys([(0, 1), (2, 3)], "shared memory"),
    **dict.fromkeys([(0, 2), (1, 3)], "gloo"),
}


@pytest.fixture(scope="module")
def experiment() -> wb.Experiment:
    """Layers cut inside each host; what their weights get is averaged between the hosts."""
    plan = wb.Plan.hybrid(wb.trace(NET, input_shape=(1, 8, 8)), world_size=4, group_size=2)
    return wb.Experiment(
        plan=plan, data="digits", batch_size=64, optimizer=wb.SGD(lr=0.1), steps=10
    )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[wb.Cluster]:
    directory = tmp_path_factory.mktemp("runs")
    with wb.Hosts(2, bandwidth="1gbit", speeds=(1, 0.5)) as hosts:
        cluster = wb.Cluster(4, hosts=hosts, directory=directory, timeout=60.0)
        yield cluster
    assert cluster.is_stopped  # the hosts have seen to it
    assert not leftovers.of(cluster.folder)
    assert traces(os.getpid()) == []


def test_engines_are_on_their_hosts(cluster, experiment):
    assert [device.host for device in cluster.devices] == ["host0", "host0", "host1", "host1"]
    assert "on host0: 0, 1; host1: 2, 3 (" in repr(cluster)
    assert (
        "&lt;Hosts(2, bandwidth=&#x27;1gbit&#x27;, speeds=(1.0, 0.5))&gt;" in cluster._repr_html_()
    )
    groups = list(TRANSPORTS)
    ranks = cluster.call(
        "tests.hosts.emulated.on_hosts:look", experiment, module=NET, groups=groups
    )
    first, second, third, fourth = (rank["network"] for rank in ranks)
    here = os.stat("/proc/self/ns/net").st_ino
    assert first == second != third == fourth
    assert here not in (first, third)
    for index, rank in enumerate(ranks):
        assert rank["interface"] == "eth0"
        assert any(f"-host{index // 2}" in line for line in rank["group"])
        assert rank["sums"] == {group: len(group) for group in groups if index in group}
        # Memory is shared on a host only; all else takes the links.
        assert rank["transports"] == {
            group: transport for group, transport in TRANSPORTS.items() if index in group
        }


def test_a_split_over_hosts_is_proved_exact(cluster, experiment):
    found = cluster.verify(experiment.plan, module=NET)
    assert found.exact, found


def test_a_dead_engine_is_replaced_on_its_host(cluster, experiment):
    pid = cluster.pids[3]
    before = os.stat(f"/proc/{pid}/ns/net").st_ino
    os.kill(pid, signal.SIGKILL)
    while cluster.pids[3] in (pid, 0):
        time.sleep(0.01)
    run = cluster.train(experiment, module=NET).wait(LONG_S)
    assert run.state == "finished"
    assert os.stat(f"/proc/{cluster.pids[3]}/ns/net").st_ino == before


def test_training_does_not_depend_on_where_it_runs(cluster, experiment, tmp_path):
    run = cluster.train(experiment, module=NET).wait(LONG_S)
    with wb.Cluster(4, directory=tmp_path, timeout=60.0) as plain:
        alike = plain.train(experiment, module=NET).wait(LONG_S)
    columns = ["step", "rank", "loss"]
    assert run.metrics[columns].equals(alike.metrics[columns])
    assert run.evaluation == alike.evaluation


def test_a_bench_has_ours_and_a_peer_on_the_same_hosts(cluster, experiment):
    ranks = cluster.call(
        "workbench.bench.harness.match:measure",
        experiment,
        module=NET,
        steps=1,
        rivals=[("ddp 25",)],
    )
    losses = {name: sum(rank.losses[name] for rank in ranks) for name in ranks[0].losses}
    assert losses["workbench"] == pytest.approx(losses["torch DDP, 25 MiB"], rel=1e-5)


def test_a_cluster_starts_and_ends_hosts_that_are_not_there_yet(tmp_path, experiment):
    hosts = wb.Hosts(2)
    cluster = wb.Cluster(2, hosts=hosts, directory=tmp_path)
    assert hosts.is_up
    cluster.restart()
    assert hosts.is_up
    cluster.stop()
    assert not hosts.is_up


def test_a_killed_owner_leaves_what_the_next_one_removes(tmp_path):
    owner = Owner(tmp_path, "hosts")
    try:
        owner.read_until_busy()
    finally:
        owner.process.kill()
        owner.process.communicate()
    assert leftovers.gone_within(owner.pid, 60.0)
    assert traces(owner.pid)
    with wb.Hosts(1):
        assert traces(owner.pid) == []
