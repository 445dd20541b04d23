"""A file that cannot be used is never written over, and what to do is said."""

import os
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.scheduler.values import request
from workbench.store.cluster_store import open_store
from workbench.store.errors import ClusterError, StoreDamaged, StoreError
from workbench.store.store import Store


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "server.sqlite"
    store = Store(path, create=True)
    store.submit(request(name="kept", packed=b"net"))
    store.close()
    return path


def test_it_is_open_to_processes_of_its_own_host_alone(path):
    assert open_store(path.parent, read_only=True).job(1).name == "kept"
    lock = path.with_name("supervisor.pid")
    lock.write_text("17 4711 another-kernel\n")
    for read_only in (True, False):
        with pytest.raises(ClusterError, match="is kept on another host"):
            open_store(path.parent, read_only=read_only)
    os.utime(lock, (0, 0))  # it has not said for long that it lives
    assert open_store(path.parent).job(1).name == "kept"


def test_making_it_again_keeps_it(path):
    assert Store(path, create=True).job(1).name == "kept"


def test_several_may_make_it_at_once(tmp_path):
    path = tmp_path / "server.sqlite"
    with ThreadPoolExecutor(8) as threads:
        made = [threads.submit(Store, path, create=True) for _ in range(16)]
    assert [each.result().submit(request()) for each in made] == list(range(1, 17))
    assert not list(tmp_path.glob("*.part"))


def test_it_must_be_there(tmp_path):
    with pytest.raises(StoreError, match="is not there"):
        Store(tmp_path / "server.sqlite")
    with pytest.raises(StoreError, match="cannot be made: No such file"):
        Store(tmp_path / "nowhere" / "server.sqlite", create=True)


@pytest.mark.parametrize("create", [False, True])
def test_something_else_is_left_alone(tmp_path, create):
    text = tmp_path / "text"
    text.write_text("no database, but some text that is long enough to be looked at" * 20)
    with pytest.raises(StoreDamaged, match="is damaged"):
        Store(text, create=create)
    assert text.read_text().startswith("no database")
    other = tmp_path / "other"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE mine (x)")
    connection.close()
    before = other.read_bytes()
    with pytest.raises(StoreError, match="no cluster's jobs, but something else"):
        Store(other, create=create)
    assert other.read_bytes() == before


def test_another_version_is_named(path):
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 7")
    connection.close()
    with pytest.raises(StoreError, match="has version 7, and this workbench reads version 3"):
        Store(path)


def test_a_lock_that_is_held_for_long(path):
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    store = Store(path, patience_s=0.1)
    assert store.job(1).name == "kept"  # reading goes on
    with pytest.raises(StoreError, match="is locked by another process for too long"):
        store.submit(request())
    holder.execute("ROLLBACK")
    holder.close()
    assert store.submit(request()) == 2


def test_a_lock_that_is_held_for_a_moment_is_waited_for(path):
    holder = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    holder.execute("BEGIN IMMEDIATE")
    timer = threading.Timer(0.2, lambda: holder.execute("ROLLBACK"))
    timer.start()
    assert Store(path).submit(request()) == 2
    timer.join()
    holder.close()


def test_a_full_disk(path):
    store = Store(path)
    connection = store._connection()
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreError, match="cannot grow, the disk is full: make room"):
        store.submit(request(packed=bytes(60_000)))
    connection.execute("PRAGMA max_page_count = 1000000")
    assert store.submit(request(packed=bytes(60_000))) == 2  # as if nothing had been
    assert [job.name for job in store.jobs()] == ["kept", "net"]


def test_read_only_where_asked(path):
    store = Store(path, read_only=True)
    assert store.job(1).packed == b"net"
    with pytest.raises(StoreError, match="read only: nothing in it can change"):
        store.submit(request())


def test_read_only_where_nothing_else_is_possible(path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    store = Store(path)
    assert store.read_only
    assert store.job(1).name == "kept"


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to root")
def test_a_folder_that_is_read_only(path):
    path.parent.chmod(0o500)
    try:
        assert Store(path).job(1).name == "kept"
    finally:
        path.parent.chmod(0o700)
