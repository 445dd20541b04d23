"""How an attempt begins, without a cluster."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace

from workbench.server import job_runner
from workbench.server.job import Work
from workbench.server.job_runner import REPLACED_WITHIN_S, InitialWeights, JobRunner
from workbench.store import messages
from workbench.store.cluster_spec import HERE, ClusterSpec, EngineDevice, key_of
from workbench.store.process import ProcessIdentity
from workbench.store.rank_files import RankFiles
from workbench.store.record import AttemptRecord, EngineRecord, Request
from workbench.store.run_folder import FoundCheckpoint
from workbench.store.store import Store

WITHIN_S = 60.0


def test_the_server_waits_for_no_checkpoint_to_be_read(tmp_path, monkeypatch):
    is_read, found = threading.Event(), FoundCheckpoint(tmp_path / "step-000005", 5)

    def newest(directory):
        assert is_read.wait(WITHIN_S)
        return found, ["step-000010 is passed over"]

    monkeypatch.setattr(job_runner, "newest_whole", newest)
    store = Store(tmp_path / "server.sqlite", create=True)
    store.set_engine(0, state="idle", process=ProcessIdentity.here(), engine_id=0)
    keywords = messages.pack_keywords({"weights": Path("w")}, key_of(tmp_path))
    request = Request(kind="train", name="job", task="", engines=1, directory=str(tmp_path / "job"),
                      keywords=keywords)  # fmt: skip
    job = store.submit(request)
    assert store.claim(job, 0, (0,))
    fleet = SimpleNamespace(
        is_ready=lambda place: True, processes=lambda _: (ProcessIdentity.here(),)
    )
    runner = JobRunner(tmp_path, store, None, fleet, None, InitialWeights(store, tmp_path, 1))
    work = Work.of(store.job(job), 0.0)
    assert runner.advance(work, 0.0)
    assert work.attempt is None
    is_read.set()
    deadline = time.monotonic() + WITHIN_S
    while work.attempt is None:
        assert time.monotonic() < deadline
        assert runner.advance(work, 0.0)
    assert (work.resumed, store.job(job).checkpoint) == (5, str(found.path))
    assert [event.text for event in store.events(job=job)] == ["step-000010 is passed over"]


def test_ranks_that_two_servers_call_find_each_other(tmp_path, monkeypatch):
    """The first one was killed when it had called one of them."""
    monkeypatch.setattr(job_runner, "_listens", lambda meeting: True)
    store = Store(tmp_path / "server.sqlite", create=True)
    store.set_meta("meeting", "127.0.0.1:1234")
    here = ProcessIdentity.here()
    engines = {n: EngineRecord(index=n, engine_id=n, process=here) for n in range(2)}
    device = EngineDevice("cpu", "here", "cpu", (), 1, 1 << 30)
    spec = ClusterSpec(devices=(device,) * 3, sites=(HERE,) * 3, address="127.0.0.1")
    request = Request(kind="train", name="job", task="", engines=2, directory=str(tmp_path / "job"))
    job, given = store.submit(request), []

    def server() -> None:
        calls = SimpleNamespace(call=lambda _engine, one, **_: given.append(one))
        weights = InitialWeights(store, tmp_path, 2)
        fleet = SimpleNamespace(records=engines, died=(), how=None)
        work = Work.of(store.job(job), 0.0)
        JobRunner(tmp_path, store, spec, fleet, calls, weights).advance(work, 0.0)

    for index in engines:
        store.set_engine(index, state="idle", process=here, engine_id=index)
    assert store.claim(job, 0, (0, 1))
    store.update(job, processes=(here, here))
    server()
    assert RankFiles(given[0].folder, 0).begin()
    server()
    assert [one.rank for one in given] == [0, 1, 1]
    assert len({one.own["config"].secret for one in given}) == 1


def test_a_job_takes_other_engines_where_one_of_its_own_is_lost_for_good(tmp_path):
    """As with the host that it was on; the engine that is free is on another one."""
    store = Store(tmp_path / "server.sqlite", create=True)
    here = ProcessIdentity.here()
    for index in range(3):
        store.set_engine(index, state="idle", process=here, engine_id=index)
    request = Request(kind="train", name="job", task="", engines=2, directory=str(tmp_path / "job"))
    job = store.submit(request)
    assert store.claim(job, 0, (0, 1))
    lost = AttemptRecord(1, (0, 1), 0.0, 1.0, is_lost=True)
    store.update(job, attempts=(lost,))
    free = [2]
    fleet = SimpleNamespace(
        is_ready=lambda place: place != 1,
        idle=lambda: free,
    )
    runner = JobRunner(tmp_path, store, None, fleet, None, InitialWeights(store, tmp_path, 3))
    work = Work.of(store.job(job), 0.0)
    assert runner.advance(work, REPLACED_WITHIN_S / 2)
    free.clear()
    assert runner.advance(work, 2 * REPLACED_WITHIN_S)
    assert store.job(job).state == "starting"
    free.append(2)
    assert not runner.advance(work, 2 * REPLACED_WITHIN_S)
    found = store.job(job)
    assert (found.state, found.held) == ("queued", ())
    assert found.reason == "engines [1] did not come back soon, and others are free"
