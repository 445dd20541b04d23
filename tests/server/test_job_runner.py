"""How an attempt begins, without a cluster."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace

from workbench.server import job_runner
from workbench.server.job_runner import InitialWeights, JobRunner
from workbench.server.work import Work
from workbench.store import messages
from workbench.store.cluster_spec import key_of
from workbench.store.process import ProcessIdentity
from workbench.store.record import Request
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
    runner = JobRunner(store, None, fleet, None, InitialWeights(store, tmp_path, 1))
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
