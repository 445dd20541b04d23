"""Emulated hosts: real namespaces, links and control groups, and nothing of them afterwards."""

import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

import workbench as wb
from tests.hosts.emulated.needs import needs_hosts, traces
from tests.hosts.test_devices import FOUR
from workbench.hosts.emulated import network
from workbench.hosts.emulated.network import ShapedLink
from workbench.hosts.emulated.quota import CpuController
from workbench.store.errors import HostsError

RATE, BURST = 2.5e6, 16 << 10
SPEED = 0.25

# Receives what some others send, and says "ready PORT" first and "done" last.
RECEIVE = """
import socket, sys
server = socket.create_server(("", 0))
print("ready", server.getsockname()[1], flush=True)
for _ in range(int(sys.argv[1])):
    with server.accept()[0] as connection:
        while connection.recv(1 << 16):
            pass
print("done")
"""
# Says "ready" when it is connected, and sends when it is told to.
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
    print("ready", flush=True)
    input()
    connection.sendall(bytes(int(sys.argv[3])))
"""
SLEEP = "import time; print('ready', flush=True); time.sleep(60)"
REFUSED = """
import socket, sys
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[1])))
except ConnectionRefusedError:
    print("refused")
"""
COMPUTE = """
import time
began = time.perf_counter()
while time.process_time() < 0.2:
    pass
print(time.perf_counter() - began)
"""


@pytest.fixture(scope="module")
def hosts():
    with wb.Hosts(3, bandwidth=RATE, burst_bytes=BURST, speeds=(1, 1, SPEED)) as hosts:
        yield hosts
    assert traces(os.getpid()) == []


def python(hosts: wb.Hosts, index: int, code: str, *arguments: object) -> "subprocess.Popen[str]":
    argv = [sys.executable, "-ISc", code, *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(hosts.command(index, argv), text=True, **pipes)


def said(process: "subprocess.Popen[str]", *, told: str = "", status: int = 0) -> str:
    """The rest of what a process says until it ends."""
    text = process.communicate(told)[0]
    assert process.returncode == status
    return text


REACHES = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1.0).close()
    print("reached")
except OSError as error:
    print(type(error).__name__)
"""


@pytest.mark.slow
def test_a_host_without_its_cable_reaches_nobody_and_nobody_it(hosts):
    with python(hosts, 1, RECEIVE, 2) as server:
        port = server.stdout.readline().split()[1]
        hosts.disconnect(1)
        try:
            for index in (0, 2):
                found = said(python(hosts, index, REACHES, hosts.addresses[1], port))
                assert found in ("TimeoutError\n", "OSError\n")
            own = said(python(hosts, 1, REACHES, hosts.addresses[0], port))
            assert own in ("TimeoutError\n", "OSError\n")
        finally:
            hosts.reconnect(1)
        for index in (0, 2):  # who had looked for it in vain does so again after some seconds
            deadline = time.monotonic() + 60.0
            while said(python(hosts, index, REACHES, hosts.addresses[1], port)) != "reached\n":
                assert time.monotonic() < deadline
        assert server.wait(60.0) == 0


@pytest.mark.parametrize(
    ("count", "options", "match"),
    [
        (0, {}, "from 1 to 250 hosts, got 0"),
        (251, {}, "from 1 to 250 hosts, got 251"),
        (2.0, {}, "is an integer, got 2.0"),
        (True, {}, "is an integer, got True"),
        (2, {"bandwidth": "1gbps"}, "got '1gbps'"),
        (2, {"speeds": (1, 1, 1)}, "3 speeds for 2 hosts"),
        (2, {"speeds": (1, 0)}, r"from 0.01 to 1, got \(1.0, 0.0\)"),
        (2, {"speeds": (1, 1.5)}, r"from 0.01 to 1, got \(1.0, 1.5\)"),
        (2, {"burst_bytes": 100}, "at least 2048 bytes"),
        (2, {"queue_limit_s": 0}, "a positive number of seconds"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(count, options, match):
    with pytest.raises(ValueError, match=match):
        wb.Hosts(count, **options)


def test_hosts_that_are_not_there_say_how_to_have_them():
    hosts = wb.Hosts(2, speeds=(1, 0.5))
    assert not hosts.is_up
    assert repr(hosts) == "<Hosts(2, bandwidth='1gbit', speeds=(1.0, 0.5)): not started>"
    with pytest.raises(HostsError, match=r"not there: use them in `with wb.Hosts"):
        hosts.command(0, ["true"])
    hosts.stop()


def test_engines_are_divided_in_blocks():
    hosts = wb.Hosts(2)
    assert hosts.seating(4) == (0, 0, 1, 1)
    assert hosts.seating(3) == (0, 0, 1)
    with pytest.raises(ValueError, match="2 hosts need as many engines at least, got 1"):
        wb.Cluster(1, hosts=hosts)
    with pytest.raises(TypeError, match=r"made by wb.Hosts\(...\), got int"):
        wb.Cluster(4, hosts=2)


@pytest.fixture
def no_root():
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield
    os.seteuid(user)


def test_without_root_the_error_says_what_still_works(no_root):
    with pytest.raises(HostsError) as caught:
        wb.Hosts(2).start()
    assert "need root on Linux" in str(caught.value)
    assert f"this process has the user id {os.geteuid()}" in str(caught.value)
    assert "wb.Cluster(n) still works" in str(caught.value)


def test_a_tool_that_is_missing_is_named_with_its_package(monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(HostsError, match="install iproute2 util-linux"):
        wb.Hosts(2).start()


@needs_hosts
def test_hosts_see_each_other_and_this_one_on_a_network_of_their_own(hosts):
    assert repr(hosts) == "<Hosts(3, bandwidth='20mbit', speeds=(1.0, 1.0, 0.25))>"
    assert all(address in hosts._repr_html_() for address in hosts.addresses)
    receiver = python(hosts, 1, RECEIVE, 2)
    port = receiver.stdout.readline().split()[1]
    for sender in (0, 2):
        process = python(hosts, sender, SEND, hosts.addresses[1], port, 10)
        assert said(process, told="go\n") == "ready\n"
    assert said(receiver) == "done\n"
    with socket.create_server((hosts.address, 0)) as server:
        sender = python(hosts, 0, SEND, hosts.address, server.getsockname()[1], 10)
        with server.accept()[0] as connection:
            assert said(sender, told="go\n") == "ready\n"
            assert connection.recv(10) == bytes(10)
    with socket.create_server(("127.0.0.1", 0)) as server:  # which is not a host's own
        assert said(python(hosts, 0, REFUSED, server.getsockname()[1])) == "refused\n"


@needs_hosts
def test_hosts_that_share_a_core_say_so(monkeypatch):
    monkeypatch.setattr("workbench.hosts.emulated.hosts.probe", lambda: FOUR)
    with wb.Hosts(5) as hosts:
        assert [device.cores for device in hosts.devices(5)] == [(0,), (1,), (2,), (3,), (0,)]
        assert [device.sharers for device in hosts.devices(5)] == [2, 1, 1, 1, 2]
        assert [device.sharers for device in hosts.devices(6)] == [3, 3, 1, 1, 1, 3]


@needs_hosts
def test_a_command_runs_on_its_host_s_cores_and_interface(hosts):
    code = "import os; print(sorted(os.sched_getaffinity(0)), os.environ['GLOO_SOCKET_IFNAME'])"
    assert said(python(hosts, 2, code)) == f"{sorted(hosts.cores[2])} eth0\n"


@needs_hosts
@pytest.mark.parametrize("pairs", [[(0, 1), (0, 2)], [(1, 0), (2, 0)]], ids=["up", "down"])
def test_a_link_passes_no_more_than_its_rate(hosts, pairs):
    """Nothing can make this faster, so no noise can make it fail."""
    num_bytes = 500_000
    receivers = {}
    for host in sorted({receiver for _, receiver in pairs}):
        process = python(hosts, host, RECEIVE, sum(receiver == host for _, receiver in pairs))
        receivers[host] = process, process.stdout.readline().split()[1]
    senders = [
        python(hosts, sender, SEND, hosts.addresses[receiver], receivers[receiver][1], num_bytes)
        for sender, receiver in pairs
    ]
    for process in senders:
        assert process.stdout.readline() == "ready\n"
    began = time.perf_counter()
    for process in senders:
        print("go", file=process.stdin, flush=True)
    assert [said(process) for process, _port in receivers.values()] == ["done\n"] * len(receivers)
    took = time.perf_counter() - began
    assert [said(process) for process in senders] == ["", ""]
    assert took >= (len(pairs) * num_bytes - BURST) / RATE


@needs_hosts
def test_a_slow_host_gets_no_more_than_its_part_of_a_core(hosts):
    took = said(python(hosts, 2, COMPUTE))
    # The kernel may lend a period's quota and its own slice.
    assert float(took) >= 0.6 * 0.2 / SPEED


@needs_hosts
def test_what_hosts_get_is_measured(hosts):
    found = hosts.measure(0.2)
    assert len(found.bandwidths) == len(found.speeds) == 3
    assert all(0 < bandwidth for bandwidth in found.bandwidths)
    assert all(0 < speed <= 1 for speed in found.speeds)
    with pytest.raises(ValueError, match="positive number of seconds"):
        hosts.measure(0)


@needs_hosts
def test_a_host_that_cannot_be_measured_is_told(hosts, monkeypatch):
    monkeypatch.setattr("workbench.hosts.emulated.measuring.GAUGE", "/nowhere/gauge.py")
    with pytest.raises(HostsError, match=r"could not be measured:\n.*No such file"):
        hosts.measure(0.2)


@needs_hosts
def test_an_exception_leaves_neither_hosts_nor_what_runs_on_them():
    processes = []
    hosts = wb.Hosts(2, speeds=(1, 0.5))

    def fail() -> None:
        with hosts:
            processes.extend(python(hosts, i, SLEEP) for i in (0, 1))
            for process in processes:
                process.stdout.readline()
            assert len(traces(os.getpid())) >= 6
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not hosts.is_up
    for process in processes:
        assert said(process, status=-9) == ""


@needs_hosts
def test_hosts_that_nobody_refers_to_are_removed():
    hosts = wb.Hosts(1)
    hosts.start()
    tag = hosts._there().network.tag
    del hosts
    assert not any(network.belongs(name, tag) for name in traces(os.getpid()))


@needs_hosts
def test_a_failure_while_they_are_made_leaves_nothing(monkeypatch):
    before = traces(os.getpid())
    monkeypatch.setattr(
        "workbench.hosts.emulated.network.INTERFACE", "a name that is no interface's"
    )
    with pytest.raises(HostsError, match=r"`ip -n .*` failed: .*interface"):
        wb.Hosts(2).start()
    assert traces(os.getpid()) == before


@needs_hosts
def test_several_at_once_have_their_own_names_and_addresses(hosts):
    with ExitStack() as stack:
        others = [stack.enter_context(wb.Hosts(1)) for _ in range(2)]
        assert len({hosts.address, *(other.address for other in others)}) == 3
        with pytest.raises(HostsError, match="are there already"):
            others[0].start()
    assert hosts.is_up


@needs_hosts
def test_what_a_dead_process_left_is_removed_but_no_process_of_its_own_is_killed():
    ended = subprocess.Popen(["true"])
    ended.wait()
    tag, controller = f"wb{ended.pid}-0", CpuController.find()
    network.make(tag, 2, ShapedLink.of("1gbit", None, 0.05))
    joins = [controller.make(tag, index, None) for index in (0, 1)]
    with subprocess.Popen(["sleep", "60"]) as stranger:
        joins[1].write_text(str(stranger.pid))
        with wb.Hosts(1):
            assert traces(ended.pid) == [joins[1].parent.name]
        assert stranger.poll() is None
        stranger.kill()
    with wb.Hosts(1):
        assert traces(ended.pid) == []
