"""A relay is its engine, as far as whoever has its process id can tell."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.hosts.remote.agents import hello
from workbench.hosts.host import probe, whole_host
from workbench.hosts.remote import agent as agent_module
from workbench.hosts.remote import wire
from workbench.hosts.remote.gathering import sites_of
from workbench.hosts.remote.reception import Reception
from workbench.store.cluster_spec import ClusterSpec, Launch
from workbench.store.process import LOST, UNREACHED, stat_file
from workbench.supervisor.cluster_processes import engine_environment

SOON_S = 60.0
SECRET = "a-token-that-nobody-on-the-way-may-read"
STANDS = """
import os, signal, sys, time
def note(number, frame):
    print(signal.Signals(number).name, flush=True)
for number in (signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, note)
print("pid", os.getpid(), os.environ["WORKBENCH_PID"], flush=True)
while True:
    time.sleep(0.01)
"""

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="relays need Linux")


def until(true):
    deadline = time.monotonic() + SOON_S
    while not (found := true()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


@pytest.fixture
def reception(tmp_path) -> Iterator[Reception]:
    reception = Reception(wire.new_key(tmp_path), "127.0.0.1", None)
    yield reception
    reception.close()


@pytest.fixture
def agent(tmp_path, reception) -> "Iterator[subprocess.Popen[bytes]]":
    """It ends with the reception."""
    (tmp_path / "agents").mkdir()
    launch = Launch(engines=1, config="", environment={"TOKEN": SECRET})
    ClusterSpec(launch=launch).save(tmp_path)
    arguments = [str(tmp_path), reception.nonce, reception.places, wire.ANY, "--mpi"]
    with subprocess.Popen([sys.executable, "-m", agent_module.MODULE, *arguments]) as agent:
        until(lambda: reception.there)
        yield agent
        reception.close()
        assert agent.wait(SOON_S) == 0


@pytest.fixture
def place(reception, agent) -> tuple[str, str]:
    """Where the agent listens."""
    ((hello, reached),) = reception.there
    assert (hello.address, reached) == ("127.0.0.1", "127.0.0.1")
    return hello.address, str(hello.port)


@contextmanager
def relay(
    folder: Path,
    place: tuple[str, str],
    code: str,
    lease_s: float = 5.0,
    **environment: str,
) -> "Iterator[subprocess.Popen[bytes]]":
    module = "workbench.hosts.remote.relay"
    told = {"WORKBENCH_ENGINE": "0", "WORKBENCH_PARENT": str(os.getpid())}
    told |= {"WORKBENCH_CARRIED": "WORKBENCH_ENGINE", **environment}
    with subprocess.Popen(
        [sys.executable, "-m", module, *place, str(folder), str(lease_s), "python", "-c", code],
        env={**os.environ, **told},
        stdout=subprocess.PIPE,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def words(folder: Path, least: int = 0) -> list[str]:
    """What an engine has written; none before there are so many."""
    log = folder / "agents" / "engine-0.log"
    found = log.read_text().split() if log.exists() else []
    return found if len(found) >= least else []


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.slow
def test_signals_reach_an_engine_and_its_end_is_the_relays(tmp_path, place):
    with relay(tmp_path, place, STANDS) as one:
        _, pid, known_as, *_ = until(lambda: words(tmp_path, 3))
        assert int(known_as) == one.pid
        one.send_signal(signal.SIGINT)
        until(lambda: "SIGINT" in words(tmp_path))
        one.send_signal(signal.SIGUSR1)
        until(lambda: "SIGUSR1" in words(tmp_path))
        stat = stat_file(tmp_path, one.pid)
        one.send_signal(signal.SIGTSTP)
        until(lambda: state_of(int(pid)) == "T")
        until(lambda: ") T " in stat.read_text())  # what the job server sees
        one.send_signal(signal.SIGCONT)
        until(lambda: state_of(int(pid)) != "T")
        os.kill(int(pid), signal.SIGKILL)
        assert one.wait(SOON_S) == -signal.SIGKILL
        assert b"SIGUSR1" in one.stdout.read()  # the last that the engine wrote
        assert not stat.exists()
    with relay(tmp_path, place, "raise SystemExit(3)") as next_one:
        assert next_one.wait(SOON_S) == 3
    with relay(tmp_path, place, STANDS) as last:
        pid = int(until(lambda: words(tmp_path, 2))[1])
        last.kill()
        until(lambda: not Path(f"/proc/{pid}").exists())


@pytest.fixture
def overheard(place) -> "Iterator[tuple[tuple[str, str], bytearray]]":
    """A place between relay and agent, and all that was said there."""
    said = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pass_on(source: socket.socket, target: socket.socket) -> None:
            with source, suppress(OSError):
                while content := source.recv(1 << 16):
                    said.extend(content)
                    target.sendall(content)
                target.shutdown(socket.SHUT_WR)

        def stand_between() -> None:
            near, far = listener.accept()[0], socket.create_connection((place[0], int(place[1])))
            for ends in ((near, far), (far, near)):
                threading.Thread(target=pass_on, args=ends, daemon=True).start()

        threading.Thread(target=stand_between, daemon=True).start()
        yield ("127.0.0.1", str(listener.getsockname()[1])), said


@pytest.mark.slow
def test_variables_of_a_profile_reach_an_engine_and_nobody_on_the_way(tmp_path, overheard):
    between, said = overheard
    (site,) = sites_of([hello("a")], tmp_path, 5.0)
    environment = engine_environment(0, whole_host(probe()), site, tmp_path, tmp_path / "engine")
    code = f"import os; raise SystemExit(3 * (os.environ['TOKEN'] == {SECRET[::-1]!r}[::-1]))"
    with relay(tmp_path, between, code, **environment) as one:
        assert one.wait(SOON_S) == 3
    assert b"WORKBENCH_ENGINE" in said
    assert SECRET.encode() not in said


@pytest.mark.slow
def test_a_host_that_is_suspended_for_a_moment_is_not_lost(tmp_path, place, agent):
    with relay(tmp_path, place, STANDS, lease_s=4.0) as one:
        pid = int(until(lambda: words(tmp_path, 2))[1])
        agent.send_signal(signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            one.wait(1.5)
        agent.send_signal(signal.SIGCONT)
        with pytest.raises(subprocess.TimeoutExpired):
            one.wait(4.0)  # longer than what was left of the lease
        assert state_of(int(pid)) != "T"
        agent.send_signal(signal.SIGSTOP)
        assert one.wait(SOON_S) == LOST
        assert b"its host does not answer any more" in one.stdout.read()
        agent.send_signal(signal.SIGCONT)


@pytest.mark.slow
def test_the_time_in_which_a_relay_stood_still_itself_does_not_count(tmp_path, place):
    with relay(tmp_path, place, STANDS, lease_s=1.0) as one:
        until(lambda: words(tmp_path, 2))
        one.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        one.send_signal(signal.SIGCONT)
        with pytest.raises(subprocess.TimeoutExpired):
            one.wait(1.0)
        one.kill()


@pytest.mark.slow
def test_an_engine_ends_with_the_supervisor(tmp_path, place, reception):
    with relay(tmp_path, place, STANDS) as one:
        pid = int(until(lambda: words(tmp_path, 2))[1])
        reception.close()
        until(lambda: not Path(f"/proc/{pid}").exists())
        assert one.wait(SOON_S) in (LOST, -signal.SIGKILL)


def test_nobody_answers(tmp_path):
    (tmp_path / wire.KEY).write_bytes(b"key")
    with relay(tmp_path, ("127.0.0.1", "1"), "pass") as one:
        assert one.wait(SOON_S) == UNREACHED
        assert b"nothing answers at 127.0.0.1:1" in one.stdout.read()


@pytest.mark.slow
def test_who_does_not_know_the_key_starts_nothing(tmp_path, place):
    (tmp_path / wire.KEY).write_bytes(b"another")
    with relay(tmp_path, place, STANDS) as one:
        assert one.wait(SOON_S) == UNREACHED
    assert words(tmp_path) == []


@pytest.mark.slow
def test_who_is_silent_keeps_nobody_waiting(tmp_path, place):
    with socket.create_connection((place[0], int(place[1]))):
        began = time.monotonic()
        with relay(tmp_path, place, "raise SystemExit(3)") as one:
            assert one.wait(SOON_S) == 3
        assert time.monotonic() - began < wire.PATIENCE_S


def test_an_agent_that_does_not_see_the_folder_says_so(tmp_path, reception, monkeypatch):
    monkeypatch.setattr(agent_module, "SEEN_WITHIN_S", 0.0)
    elsewhere = tmp_path / "elsewhere"
    with pytest.raises(SystemExit, match=r"does not see .*elsewhere: Cluster\(directory"):
        agent_module.main([str(elsewhere), reception.nonce, reception.places, wire.ANY])
    until(lambda: "on a file system that all hosts share" in reception.complaint)
    assert reception.there == []


def test_an_agent_that_cannot_reach_the_supervisor_says_where_it_tried(tmp_path):
    with pytest.raises(SystemExit, match=r"cannot reach .* at 127.0.0.1:1 \(.*Profile\(address="):
        agent_module.main([str(tmp_path), "nonce", "127.0.0.1:1", wire.ANY])
