"""What the server does with one job has nothing to do with the others."""

import subprocess
import sys
from dataclasses import replace

import pytest

from tests.plan.graphs import mlp
from tests.server.fake_server import FolderCalls
from tests.server.meeting import meeting_place
from tests.store.test_messages import experiment
from workbench.plan import Plan
from workbench.server.fleet import NOBODY_COMES_AFTER_S
from workbench.server.job_runner import PARKED_AFTER_S
from workbench.server.loop import Server
from workbench.store import messages
from workbench.store.cluster_spec import HERE, ClusterSpec, EngineDevice, key_of
from workbench.store.process import ProcessIdentity
from workbench.store.record import Request
from workbench.store.store import Store


@pytest.fixture
def folder(tmp_path):
    """That of a cluster of three engines, which have come, and an assistant."""
    store = Store(tmp_path / "server.sqlite", create=True)
    (tmp_path / "arrivals").mkdir()
    waits = [sys.executable, "-c", "input()"]
    engines = [subprocess.Popen(waits, stdin=subprocess.PIPE) for _ in range(4)]
    for index, engine in enumerate(engines):
        process, is_assistant = ProcessIdentity.of(engine.pid), index == 3
        store.set_engine(index, process=process, is_assistant=is_assistant, memory_bytes=1)
        (tmp_path / "arrivals" / str(engine.pid)).touch()
        (tmp_path / "inbox" / str(engine.pid)).mkdir(parents=True)
    with meeting_place() as place:
        store.set_meta("meeting", place)
        yield tmp_path
    for engine in engines:
        engine.kill()
        engine.communicate()


def submitted(store, folder, directory, **fields):
    packed = messages.pack(experiment(Plan.data_parallel(mlp(4, 4), 2)))
    keywords = messages.pack_keywords({}, key_of(folder))
    request = Request(kind="train", name="a run", task="a:b", packed=packed, keywords=keywords,
                      engines=1, directory=str(directory), **fields)  # fmt: skip
    return store.submit(request)


def served(folder, store):
    device = EngineDevice("cpu", "here", "cpu", (), 1, 1)
    spec = ClusterSpec(devices=(device,) * 4, sites=(HERE,) * 4, address="127.0.0.1")
    return Server(folder, replace(spec, timeout_s=4.0), store, FolderCalls(folder, store))


def test_a_job_whose_folder_fails_is_parked_and_the_others_go_on(folder, caplog):
    store = Store(folder / "server.sqlite")
    (folder / "no-folder").touch()
    bad = submitted(store, folder, folder / "no-folder" / "of-a-run")
    (folder / "run").mkdir()
    good = submitted(store, folder, folder / "run")
    server, now = served(folder, store), 0.0
    while not list(folder.glob("inbox/*/*.call")) or "ails" not in caplog.text:
        server.tick(now, 0.001)
        now += 0.05
        assert now < 20.0, store.events()
    assert store.job(good).state == "starting"
    server.tick(now + PARKED_AFTER_S, 0.001)
    assert store.job(bad).state == "parked"
    assert "NotADirectoryError" in store.job(bad).reason
    assert store.job(good).state == "starting"
    later = submitted(store, folder, folder / "run")
    while store.job(later).state != "starting":
        server.tick(now + PARKED_AFTER_S, 0.001)
        now += 0.05
        assert now < 40.0, store.events()


def test_ranks_are_not_sent_where_nobody_listens(folder):
    """The store in which they would meet was just killed, and its supervisor does not know yet."""
    store = Store(folder / "server.sqlite")
    (folder / "run").mkdir()
    place = store.meta("meeting")
    store.set_meta("meeting", "127.0.0.1:1")
    run = submitted(store, folder, folder / "run")
    server = served(folder, store)
    for tick in range(40):
        server.tick(0.05 * tick, 0.001)
    assert store.job(run).state == "starting"
    assert not list(folder.glob("inbox/*/*.call"))
    store.set_meta("meeting", place)
    now = 2.0
    while not list(folder.glob("inbox/*/*.call")):
        server.tick(now, 0.001)
        now += 0.05
        assert now < 20.0, store.events()


def test_initial_weights_are_made_at_once(folder):
    """Not when the server next looks for what nobody tells of: each run would begin later."""
    store = Store(folder / "server.sqlite")
    (folder / "run").mkdir()
    run = submitted(store, folder, folder / "run", needs_weights=True)
    server = served(folder, store)
    while not (calls := [job for job in store.jobs() if job.kind == "call"]):
        server.tick(0.0, 0.001)
    server.tick(0.0, 0.001)
    (call,) = calls
    assert store.job(call.id).state == "starting"
    assert store.job(run).state == "starting"


def test_a_call_fails_whose_engine_nobody_starts_again(folder):
    """Lent engines are waited for by whoever has them: as after the end of a host."""
    store = Store(folder / "server.sqlite")
    lease = store.submit(Request(kind="lease", name="a measurement", task="", engines=3))
    server, now = served(folder, store), 0.0
    while store.job(lease).state != "running":
        server.tick(now, 0.001)
        now += 0.05
        assert now < 20.0, store.events()
    store.set_engine(1, state="dead", death="was ended by SIGKILL")
    call = store.submit(
        Request(kind="call", name="a call", task="a:b", engines=3, places=(0, 1, 2), lease=lease)
    )
    for _ in range(40):
        server.tick(now, 0.001)
        now += 0.05
    assert store.job(call).state == "queued"
    server.tick(now + NOBODY_COMES_AFTER_S, 0.001)
    ended = store.job(call)
    assert ended.state == "failed"
    assert ended.reason.startswith("engine 1, of rank 1, was ended by SIGKILL, and no other")
    assert (ended.error.kind, ended.error.rank) == ("EngineDied", 1)
