"""A job that is watched while its store cannot be read."""

from types import SimpleNamespace

import pytest

from tests.client.fake_session import row
from workbench.client.run import job as watching
from workbench.client.run.job import Job
from workbench.store.errors import StoreDamaged, StoreError
from workbench.store.rank_files import RankFiles
from workbench.store.record import Request
from workbench.store.store import Store
from workbench.store.telemetry import AttemptReader, Telemetry


class Link:
    """A way to a store that gives some errors first."""

    key = b""

    def __init__(self, store, errors, *, is_kept):
        self.store, self.is_kept = store, is_kept
        self._errors = iter(errors)

    def refreshed(self, record):
        for error in self._errors:
            raise error
        return self.store.job(record.id)


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "server.sqlite", create=True)
    job = store.submit(
        Request(kind="train", name="job", task="", engines=1, directory=str(tmp_path / "run"))
    )
    listener = SimpleNamespace(turn=lambda state, reason: store.release(job, "stopped"))
    return store, job, listener


def test_a_disk_that_is_full_for_a_while_is_no_failure_of_the_run(store):
    store, job, listener = store
    link = Link(store, [StoreError("the disk is full")] * 3, is_kept=True)
    assert Job(link, job).watch(listener) == []


@pytest.mark.parametrize(
    ("error", "is_kept"), [(StoreError("it is gone"), False), (StoreDamaged("it is damaged"), True)]
)
def test_a_store_that_is_lost_is_told(store, error, is_kept):
    store, job, _ = store
    with pytest.raises(type(error), match="it is"):
        Job(Link(store, [error], is_kept=is_kept), job).watch(SimpleNamespace(turn=lambda *_: None))


def test_rows_that_cannot_be_read_for_a_moment_are_read_later(store, tmp_path, monkeypatch):
    store, number, _ = store
    store.claim(number, 0, ())
    files = RankFiles(tmp_path / "run" / "attempts" / "1", 0)
    files.folder.mkdir(parents=True)
    telemetry = Telemetry(files)
    telemetry.emit(row(0, 0))
    telemetry.close()
    store.release(number, "stopped")
    read, errors, found = AttemptReader.read, iter([OSError(5, "Input/output error")] * 3), []

    def reads(reader, *most):
        for error in errors:
            raise error
        return read(reader, *most)

    monkeypatch.setattr(AttemptReader, "read", reads)
    listener = SimpleNamespace(take=found.extend, turn=lambda *_: None, note=lambda _: None)
    job = Job(Link(store, [], is_kept=True), number)
    assert job.watch(listener) == []
    assert [each["step"] for each in found] == [0]
    assert not job.has_lost_rows


def test_rows_that_stay_unreadable_are_missed_and_the_job_has_ended(store, monkeypatch):
    store, number, _ = store
    store.claim(number, 0, ())
    store.release(number, "stopped")

    def unreadable(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(AttemptReader, "read", unreadable)
    monkeypatch.setattr(watching, "READ_WITHIN_S", 0.1)
    job = Job(Link(store, [], is_kept=True), number)
    assert job.watch(SimpleNamespace(turn=lambda *_: None, note=lambda _: None)) == []
    assert job.has_lost_rows
