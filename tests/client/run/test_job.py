"""A job that is watched while its store cannot be read."""

from types import SimpleNamespace

import pytest

from workbench.client.run.job import Job
from workbench.store.errors import StoreDamaged, StoreError
from workbench.store.record import Request
from workbench.store.store import Store


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
