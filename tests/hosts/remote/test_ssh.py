"""Engines that were brought by SSH: two on each of two emulated hosts."""

import shutil
import subprocess
from collections.abc import Iterator

import pytest

import workbench as wb
from tests.client import leftovers
from tests.hosts.emulated.needs import needs_hosts
from tests.hosts.remote.training import LONG_S, NET, experiment, trains, until

pytestmark = [
    pytest.mark.slow,
    needs_hosts,
    pytest.mark.skipif(not shutil.which("sshd", path="/usr/sbin:/usr/bin"), reason="no sshd here"),
]

STEPS = 1_000_000  # more than it makes


@pytest.fixture(scope="module")
def hosts() -> Iterator[wb.Hosts]:
    with wb.Hosts(2) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def cluster(hosts, tmp_path_factory) -> Iterator[wb.Cluster]:
    profile = str(hosts.ssh(tmp_path_factory.mktemp("profile"), engines=2))
    runs = tmp_path_factory.mktemp("runs")
    with wb.Cluster(4, profile=profile, directory=runs, lease=2.0) as cluster:
        yield cluster
    assert leftovers.gone_within(cluster.folder, LONG_S)


def test_a_split_over_hosts_trains_and_is_exact(cluster, hosts):
    assert [device.host for device in cluster.devices] == ["host0", "host0", "host1", "host1"]
    # Cores were divided among the engines of a host, which has some of this machine's.
    for index, device in enumerate(cluster.devices):
        assert set(device.cores) <= set(hosts.cores[index // 2])
    trains(cluster)
    ranks = cluster.call(
        "tests.hosts.emulated.on_hosts:look", experiment(), module=NET, groups=[(0, 1), (1, 2)]
    )
    networks = [rank["network"] for rank in ranks]
    assert networks[0] == networks[1] != networks[2] == networks[3]
    assert ranks[1]["transports"] == {(0, 1): "shared memory", (1, 2): "gloo"}


def test_a_host_that_vanishes_is_noticed_and_a_run_goes_on_without_it(cluster, hosts):
    told = experiment().replace(steps=STEPS, checkpoint_every=20)
    run = cluster.jobs.submit(told, module=NET)

    def record():
        return cluster.link.store.job(run.id)

    until(lambda: record().checkpoint or list(run.directory.glob("step-*")), cluster)
    subprocess.run(hosts.command(1, ["ip", "link", "set", "eth0", "down"]), check=True)
    until(lambda: record().attempts, cluster)
    (lost,) = record().attempts
    assert lost.is_lost
    assert "its host does not answer any more" in lost.reason
    run.stop()
    assert run.wait(LONG_S).state == "stopped"
    run = cluster.jobs.submit(told, engines=2, module=NET, resume=run)
    until(lambda: record().state == "running" and record().held == (0, 1), cluster)
    until(lambda: record().step > lost.step, cluster)
    run.stop()
    assert run.wait(LONG_S).state == "stopped"
    # Its agent, which nobody can tell, would wait for its supervisor for some minutes more.
    subprocess.run(hosts.command(1, ["ip", "link", "set", "eth0", "up"]), check=True)
