"""A cluster outlives whoever started it; nothing outlives its supervisor."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import ipyparallel
import pytest
import torch.distributed as dist
import zmq

from tests.engine.test_calls import EXPERIMENT
from tests.supervisor import supervising
from workbench.hosts.processes import is_alive
from workbench.server.engine_calls import Calls
from workbench.store.cluster_spec import Site, connection_file, key_of
from workbench.store.cluster_store import STORE
from workbench.store.errors import ClusterError, ControlMessageTooLarge
from workbench.store.messages import Answer, Assignment, pack, pack_keywords
from workbench.store.process import RENDEZVOUS, ProcessIdentity, holder
from workbench.store.rank_files import RankFiles
from workbench.store.record import EngineRecord, Request
from workbench.store.store import Store
from workbench.supervisor import start, supervisor_of
from workbench.supervisor import supervisor as supervisor_module
from workbench.supervisor.kept_process import RestartPolicy
from workbench.supervisor.supervisor import Supervisor

ROOT = Path(__file__).resolve().parents[2]
LONG_S = 120.0  # a torch is imported on the way, on a machine that may have other work


@dataclass
class Kept:
    folder: Path
    store: Store

    def pids(self) -> dict[int, int | None]:
        return {engine.index: engine.pid for engine in self.store.engines()}

    def events(self, kind: str) -> list[str]:
        return [event.text for event in self.store.events() if event.kind == kind]

    def server(self) -> int | None:
        for process in supervising.processes(self.folder):
            if "tests.supervisor.greeter" in process.cmdline():
                return process.pid
        return None


def end(folder: Path) -> None:
    """Ends a cluster as `shutdown` does, if it is there; nothing of it may be left."""
    if (supervisor := supervisor_of(folder)) is not None:
        Store(folder / STORE).command("shutdown")
        supervising.until(lambda: not supervisor.is_alive, folder)
    assert not supervising.processes(folder)
    assert not folder.exists()


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Iterator[Kept]:
    """One engine and the assistant, of a notebook that was killed when they were ready."""
    folder = tmp_path_factory.mktemp("runs") / ".cluster-of-a-notebook"
    notebook = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("notebook.py")), str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    with notebook:
        assert notebook.stdout.readline() == b"started\n"
        store = Store(folder / STORE)
        store.attach(ProcessIdentity.here())
        supervising.until(lambda: supervising.idle(folder, store), folder)
        before = Kept(folder, store).pids()
        os.killpg(notebook.pid, signal.SIGINT)
        os.killpg(notebook.pid, signal.SIGKILL)
    kept = Kept(folder, store)
    supervising.until(lambda: len(store.owners()) == 1, folder)  # the supervisor has seen it
    assert kept.pids() == before
    yield kept
    end(folder)


@pytest.fixture
def calls(kept) -> Iterator[Calls]:
    calls = Calls(kept.folder, lambda _direction, _bytes, _job: None)
    yield calls
    calls.close()


@pytest.mark.slow
def test_engines_work_on_without_their_notebook(kept, calls, tmp_path):
    engine = kept.store.engines()[0]
    arguments, own = pack_keywords({"first": 1}, key_of(kept.folder)), {"second": 2}
    task, packed = "tests.engine.test_calls:adds", pack(EXPERIMENT)
    given = Assignment(task, packed, arguments, own, tmp_path, 0, trains=False)
    calls.call(engine.engine_id, "run", given)
    answer = supervising.until(lambda: RankFiles(tmp_path, 0).answer, kept.folder)
    assert Answer.unpack(answer).value == 3 + EXPERIMENT.batch_size
    assert RankFiles(tmp_path, 0).pid == engine.pid


@pytest.mark.slow
def test_messages_are_counted_and_large_ones_refused(kept):
    counted = []
    calls = Calls(kept.folder, lambda *each: counted.append(each))
    engine_id = kept.store.engines()[0].engine_id
    calls.call(engine_id, "introduce", job=7).get(timeout=LONG_S)
    supervising.until(lambda: len(counted) == 2, kept.folder)
    assert [(direction, job) for direction, _bytes, job in counted] == [
        ("sent", 7),
        ("received", 7),
    ]
    assert all(0 < num_bytes < 1000 for _direction, num_bytes, _job in counted)
    with pytest.raises(ControlMessageTooLarge, match="at most 65,536"):
        calls.call(engine_id, "builtins:len", bytes(65_536))
    with pytest.raises(ClusterError, match="no engine has the id 99"):
        calls.call(99, "introduce")
    assert len(counted) == 2
    memories = ("history", "results", "_futures", "_output_futures")
    remembered = [getattr(calls._client, each) for each in memories]
    supervising.until(lambda: not any(remembered), kept.folder)
    calls.close()


@pytest.mark.slow
def test_ranks_meet_where_the_supervisor_says(kept):
    address, _, port = supervising.until(lambda: kept.store.meta("meeting"), kept.folder).partition(
        ":"
    )
    meeting = dist.TCPStore(address, int(port), is_master=False)
    meeting.set("met", "here")
    assert meeting.get("met") == b"here"
    assert address == "127.0.0.1"


@pytest.mark.slow
def test_a_store_where_ranks_meet_that_died_is_opened_again(kept):
    place = supervising.until(lambda: kept.store.meta("meeting"), kept.folder)
    died = holder(kept.folder / RENDEZVOUS)
    died.send(signal.SIGKILL)
    supervising.until(lambda: kept.store.meta("meeting") not in (None, place), kept.folder)
    (told,) = supervising.until(lambda: kept.events("rendezvous_died"), kept.folder)
    assert f"(process {died.pid}) was ended by SIGKILL" in told
    address, _, port = kept.store.meta("meeting").partition(":")
    meeting = dist.TCPStore(address, int(port), is_master=False)
    meeting.set("met", "again")
    assert meeting.get("met") == b"again"


@pytest.mark.slow
def test_an_engine_that_died_is_replaced(kept):
    pid = kept.pids()[0]
    os.kill(pid, signal.SIGKILL)
    supervising.until(lambda: kept.pids()[0] != pid, kept.folder)
    supervising.until(lambda: supervising.idle(kept.folder, kept.store), kept.folder)
    assert kept.store.engines()[0].death == "was ended by SIGKILL"
    assert f"engine 0 (process {pid}) was ended by SIGKILL" in kept.events("engine_died")[-1]


@pytest.mark.slow
def test_a_server_that_died_is_started_again(kept):
    before, server = kept.pids(), supervising.until(kept.server, kept.folder)
    os.kill(server, signal.SIGKILL)
    supervising.until(lambda: kept.server() not in (None, server), kept.folder)
    assert f"(process {server}) was ended by SIGKILL" in kept.events("server_died")[-1]
    assert kept.pids() == before


@pytest.mark.slow
def test_the_controller_answers_nobody_who_does_not_know_its_public_key(kept, tmp_path):
    path = connection_file(kept.folder, "client")
    assert path.stat().st_mode & 0o777 == 0o600
    told = json.loads(path.read_text())
    for key in (zmq.curve_keypair()[0].decode(), None):  # another, and none: as it was before Curve
        other = tmp_path / "client.json"
        other.write_text(json.dumps({**told, "curve_serverkey": key}))
        with pytest.raises(ipyparallel.TimeoutError):
            ipyparallel.Client(str(other), timeout=0.5)
    with ipyparallel.Client(str(path), timeout=LONG_S) as client:
        assert client.ids


@pytest.mark.slow
def test_a_controller_that_died_is_started_again(kept, calls):
    """Engines and clients go on with it, as if it were the same; so does a client that comes."""
    engines = kept.store.engines()
    (controller,) = (
        each
        for each in supervising.processes(kept.folder)
        if "ipyparallel.controller" in each.cmdline()
        and each.ppid() == supervisor_of(kept.folder).pid
    )
    controller.kill()
    supervising.until(lambda: kept.events("controller_died"), kept.folder)
    later = Calls(kept.folder, lambda _direction, _bytes, _job: None)
    ids = {engine.engine_id for engine in engines}
    supervising.until(lambda: ids <= set(later.registered), kept.folder)

    def introduced(by: Calls, engine: EngineRecord) -> int | None:
        with suppress(ipyparallel.TimeoutError):  # too soon: the engine was not connected again
            return by.call(engine.engine_id, "introduce").get(timeout=0.5)

    for each, engine in product((later, calls), engines):
        told = supervising.until(partial(introduced, each, engine), kept.folder)
        assert told == engine.pid
    later.close()
    assert kept.pids() == {engine.index: engine.pid for engine in engines}


@pytest.mark.slow
def test_a_folder_has_one_supervisor(kept):
    supervisor = supervisor_of(kept.folder)
    with pytest.raises(ClusterError, match=f"has a supervisor already, process {supervisor.pid}"):
        start(kept.folder)
    assert supervisor_of(kept.folder) == supervisor


@pytest.mark.slow
def test_nothing_outlives_a_killed_supervisor(tmp_path):
    folder = tmp_path / ".cluster-killed"
    start(folder, supervising.spec(1))
    store, supervisor = Store(folder / STORE), supervisor_of(folder)
    supervising.until(lambda: store.meta("meeting") and (folder / "greeter").exists(), folder)
    supervising.until(lambda: supervising.idle(folder, store), folder)
    os.kill(store.engines()[0].pid, signal.SIGSTOP)  # even one that cannot look
    os.kill(supervisor.pid, signal.SIGKILL)
    supervising.until(lambda: not supervising.processes(folder), folder)
    assert supervisor_of(folder) is None


@pytest.mark.slow
def test_a_cluster_ends_when_nobody_needs_it_and_keeps_what_it_has_done(tmp_path):
    folder = tmp_path / ".cluster-lingers"
    start(folder, supervising.spec(1, linger_s=0.1))
    store, supervisor = Store(folder / STORE), supervisor_of(folder)
    job = store.submit(Request(kind="train", name="mlp", task="a:b", engines=1))
    store.detach(ProcessIdentity.here())
    supervising.until(lambda: len(supervising.processes(folder)) > 2, folder)
    assert supervisor.is_alive  # there is something to do
    store.update(job, state="finished")
    supervising.until(lambda: not supervisor.is_alive, folder)
    assert not supervising.processes(folder)
    assert not (folder / "profile").exists()
    assert Store(folder / STORE).job(job).state == "finished"
    start(folder)
    assert supervisor_of(folder).pid != supervisor.pid
    end(folder)


@pytest.mark.slow
def test_engines_that_end_at_once_are_not_started_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor_module, "PATIENCE", RestartPolicy(10.0, 0.01, 0.02, most=3))
    folder = tmp_path / ".cluster-poisoned"
    folder.mkdir()
    spec = supervising.spec(1)
    nowhere = Site(("sh", "-c", "echo no such host; exit 7"), {})
    spec = replace(spec, sites=(nowhere, spec.sites[1]), server="json.tool")
    store = Store(folder / STORE, create=True)
    store.attach(ProcessIdentity.here())

    async def keep() -> None:
        supervisor = asyncio.create_task(Supervisor(folder, spec, store).run())
        while not [event for event in store.events() if event.kind == "engine_given_up"]:
            await asyncio.sleep(0.01)
        Store(store.path).command("shutdown", remove=False)
        await supervisor

    asyncio.run(asyncio.wait_for(keep(), supervising.SOON_S))
    texts = [event.text for event in Store(store.path).events() if event.engine == 0]
    assert len(texts) == 3
    assert "exited with 7, as did those before it" in texts[-1]
    assert "no such host" in texts[-1]
    assert store.engines()[0].state == "dead"
    assert not supervising.processes(folder)


@pytest.mark.slow
def test_a_supervisor_that_cannot_start_says_why(tmp_path):
    folder = tmp_path / ".cluster-nothing"
    with pytest.raises(ClusterError, match="is no cluster's folder"):
        start(folder)
    (tmp_path / "workbench").mkdir()  # in the place of ours, wherever that is installed
    (tmp_path / "workbench" / "__init__.py").touch()
    with pytest.raises(ClusterError, match=r"no supervisor for .*No module named"):
        start(folder, supervising.spec(1, environment={"PYTHONPATH": str(tmp_path)}))
    assert supervisor_of(folder) is None


@pytest.mark.slow
def test_a_supervisor_whose_caller_was_interrupted_starts_nothing(tmp_path):
    supervising.spec(1).save(tmp_path)
    Store(tmp_path / STORE, create=True)
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "workbench.supervisor", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    supervisor.stdout.close()
    assert supervisor.wait(supervising.SOON_S) == 1
    assert supervisor_of(tmp_path) is None
    assert not supervising.processes(tmp_path)


def test_a_process_that_is_gone_is_never_the_supervisor(tmp_path):
    (tmp_path / "supervisor.pid").write_text(f"{os.getpid()} 1 here\n")
    here = ProcessIdentity.here()
    (tmp_path / "supervisor.pid").write_text(f"{here.pid} {here.started + 1} {here.boot}\n")
    assert is_alive(here.pid)
    assert supervisor_of(tmp_path) is None
    (tmp_path / "supervisor.pid").write_text("")
    assert supervisor_of(tmp_path) is None
