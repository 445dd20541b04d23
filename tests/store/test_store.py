"""One file for all: nothing is lost, nothing happens twice."""

import errno
import fcntl
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import FrameType

import pytest

from tests.scheduler.values import request
from workbench.store.errors import ClusterError, ControlMessageTooLarge, StoreError
from workbench.store.process import LEASE_S, FolderLock, ProcessIdentity, holder, renew
from workbench.store.record import AttemptRecord, ErrorRecord, Tally
from workbench.store.store import Store


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "server.sqlite", create=True)
    for index in range(3):
        store.set_engine(index, state="idle")
    yield store
    store.close()


def test_only_the_owner_reads_it(store):
    files = list(store.path.parent.iterdir())
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_what_was_submitted_is_there_for_everybody(store):
    submitted = request(
        2,
        packed=b"net",
        keywords=b"more",
        places=(0, 2),
        priority=3,
        seconds=1.5,
        owner=ProcessIdentity.here(),
        preemptible=False,
        tag="sweep",
    )
    job = Store(store.path).job(store.submit(submitted))
    assert (job.state, job.attempt, job.held, job.has_ended) == ("queued", 0, (), False)
    assert {name: getattr(job, name) for name in vars(submitted)} == vars(submitted)


def test_lists_leave_out_what_is_large(store):
    number = store.submit(request(2, packed=b"net"))
    (listed,) = store.jobs()
    assert (listed.id, listed.packed) == (number, b"")


def test_jobs_are_chosen_by_state_and_tag(store):
    one, two = store.submit(request(tag="a")), store.submit(request(tag="b"))
    store.update(two, state="running")
    assert [job.id for job in store.jobs(states=("running", "paused"))] == [two]
    assert [job.id for job in store.jobs(tag="a")] == [one]
    assert [job.id for job in store.jobs()] == [one, two]


def test_all_that_happens_to_a_job_is_kept(store):
    number = store.submit(request())
    changed = {
        "state": "failed",
        "step": 7,
        "reason": "it failed",
        "error": ErrorRecord("EngineDied", "gone", 1, "conv1", "Traceback", "was ended"),
        "checkpoint": "/there",
        "attempts": (AttemptRecord(1, (0, 2), 1.0, 2.0, 5, "killed"),),
        "processes": (ProcessIdentity(11, 1, "boot"), ProcessIdentity(12, 2, "boot")),
    }
    assert store.update(number, **changed)
    job = store.job(number)
    assert {name: getattr(job, name) for name in changed} == changed
    assert job.has_ended


def test_updates_are_checked(store):
    number = store.submit(request())
    assert not store.update(number, only_in=("running",), step=1)
    assert store.job(number).step == 0
    both = {number: {"step": 2}, store.submit(request()): {"step": 3}}
    assert store.update_all(both, only_in=("queued",)) == 2
    assert [job.step for job in store.jobs()] == [2, 3]
    with pytest.raises(ValueError, match=r"a job has no \['packed'\] to change"):
        store.update(number, packed=b"")
    with pytest.raises(ValueError, match="a state is one of"):
        store.update(number, state="asleep")
    with pytest.raises(ValueError, match="an engine has no"):
        store.set_engine(0, speed=1)
    with pytest.raises(StoreError, match="holds no job 99"):
        store.job(99)


def test_an_attempt_starts_once_however_many_try(store):
    number = store.submit(request(2))
    with ThreadPoolExecutor(8) as threads:
        claims = [threads.submit(store.claim, number, 0, (0, 1)) for _ in range(16)]
    assert sum(claim.result() for claim in claims) == 1
    job = store.job(number)
    assert (job.state, job.attempt, job.held) == ("starting", 1, (0, 1))
    assert [(each.state, each.job) for each in store.engines()] == [
        ("busy", number),
        ("busy", number),
        ("idle", None),
    ]


def test_engines_have_one_user(store):
    first, second = store.submit(request(2)), store.submit(request(2))
    assert store.claim(first, 0, (0, 1))
    assert not store.claim(second, 0, (1, 2))
    assert store.job(second).state == "queued"
    assert store.release(first, "finished", step=9)
    assert store.claim(second, 0, (1, 2))
    ended = store.job(first)
    assert (ended.state, ended.held, ended.step) == ("finished", (), 9)
    assert ended.ended_at >= ended.started_at


def test_an_attempt_goes_on_elsewhere(store):
    number = store.submit(request(2))
    store.claim(number, 0, (0, 1))
    store.set_engine(1, state="dead", death="was ended by SIGKILL")
    started_at = store.job(number).started_at
    assert not store.claim(number, 1, (0, 1), only_in=("starting",))
    assert store.claim(number, 1, (0, 2), only_in=("starting",), reason="engine 1 died")
    job = store.job(number)
    assert (job.attempt, job.held, job.reason) == (2, (0, 2), "engine 1 died")
    assert job.started_at == started_at
    assert [(each.state, each.job) for each in store.engines()] == [
        ("busy", number),
        ("dead", None),
        ("busy", number),
    ]


def test_time_with_engines_is_counted(store, monkeypatch):
    number = store.submit(request())
    monkeypatch.setattr("workbench.store.store.time.time", lambda: 100.0)
    store.claim(number, 0, (0,))
    assert (store.job(number).began_at, store.job(number).ran_s) == (100.0, 0.0)
    monkeypatch.setattr("workbench.store.store.time.time", lambda: 107.0)
    store.claim(number, 1, (1,), only_in=("starting",))
    assert (store.job(number).began_at, store.job(number).ran_s) == (107.0, 7.0)
    monkeypatch.setattr("workbench.store.store.time.time", lambda: 50.0)
    store.release(number, "queued")  # the clock was set back
    assert (store.job(number).began_at, store.job(number).ran_s) == (None, 7.0)


def test_releasing_is_done_by_one_only(store):
    number = store.submit(request())
    store.claim(number, 0, (0,))
    assert store.release(number, "queued", only_in=("starting",))
    assert not store.release(number, "failed", only_in=("starting",))
    job = store.job(number)
    assert (job.state, job.ended_at) == ("queued", None)


def test_calls_use_the_engines_of_their_lease_in_turn(store):
    lease = store.submit(request(2, kind="lease"))
    one, two = (store.submit(request(kind="call", lease=lease)) for _ in range(2))
    assert not store.claim(one, 0, (0,))  # the lease has nothing yet
    store.claim(lease, 0, (0, 1))
    assert store.claim(one, 0, (0,))
    assert not store.claim(two, 0, (0,))
    assert not store.claim(two, 0, (2,))  # not of the lease
    assert store.claim(two, 0, (1,))
    store.release(one, "finished")
    assert [each.job for each in store.engines()] == [lease, lease, None]


def test_engines_note_since_when(store):
    store.set_engine(
        0,
        state="busy",
        job=1,
        process=ProcessIdentity(7, 1, "boot"),
        name="core 1",
        is_assistant=True,
    )
    before = store.engines()[0]
    store.set_engine(0, cpu_share=0.5)
    after = store.engines()[0]
    assert after.since == before.since
    assert (after.pid, after.cpu_share, after.is_assistant) == (7, 0.5, True)


def test_changes_of_others_are_seen(store):
    other = Store(store.path)
    other.changed()
    assert not other.changed()
    number = store.submit(request())
    assert other.changed()
    assert not other.changed()
    other.update(number, step=1)
    assert not other.changed()
    assert store.changed()


WRITER = """
import sys
from tests.scheduler.values import request
from workbench.store.store import Store
store = Store(sys.argv[1])
for number in range(50):
    store.submit(request(name=f"{sys.argv[2]}-{number}"))
    store.claim(store.jobs()[number].id, 0, ())
"""


@pytest.mark.slow
def test_several_processes_and_threads_write_at_once(store):
    """Each submits 50 jobs, and all try to begin the same ones, of no engine."""
    command = [sys.executable, "-c", WRITER, str(store.path)]
    processes = [subprocess.Popen([*command, name]) for name in "ab"]
    threads = [
        threading.Thread(target=lambda: [store.submit(request()) for _ in range(50)])
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [process.wait(60) for process in processes] == [0, 0]
    jobs = store.jobs()
    assert [job.id for job in jobs] == list(range(1, 201))
    assert all(job.attempt <= 1 for job in jobs)
    assert sum(job.attempt for job in jobs) >= 50


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "game"}, "a job is one of"),
        ({"engines": 0}, "positive number of engines"),
        ({"engines": True}, "positive number of engines"),
        ({"engines": 2, "places": (1, 1)}, "2 different places"),
        ({"seconds": -1.0}, "not negative"),
        ({"seconds": float("nan")}, "not negative"),
        ({"max_attempts": 0}, "at least one attempt"),
    ],
)
def test_impossible_requests(wrong, message):
    with pytest.raises(ValueError, match=message):
        request(**wrong)


@pytest.mark.parametrize("what", ["packed", "keywords"])
def test_what_is_packed_is_small(what):
    large = bytes((64 << 10) + 1)
    with pytest.raises(ControlMessageTooLarge, match="65,537 bytes"):
        request(**{what: large})


def test_events_come_in_order_and_by_job(store):
    store.event("began", kind="start", job=1)
    store.event("slow", kind="straggler", level="warning", job=2, engine=3)
    store.event("done", kind="end", job=1)
    assert [each.text for each in store.events()] == ["began", "slow", "done"]
    assert [each.text for each in store.events(after=1)] == ["slow", "done"]
    assert [each.text for each in store.events(job=1)] == ["began", "done"]
    assert [each.text for each in store.events(limit=1)] == ["done"]
    (slow,) = store.events(job=2)
    assert (slow.level, slow.kind, slow.engine) == ("warning", "straggler", 3)


def test_old_events_are_forgotten(store, monkeypatch):
    monkeypatch.setattr("workbench.store.store.EVENTS_KEPT", 3)
    for number in range(5):
        store.event(str(number), kind="test")
    assert [each.text for each in store.events()] == ["2", "3", "4"]


def test_old_jobs_are_forgotten_once_they_have_ended(store, monkeypatch):
    monkeypatch.setattr("workbench.store.store.JOBS_KEPT", 2)
    ended, waiting, *others = (store.submit(request(2, packed=b"net")) for _ in range(4))
    for number in (ended, *others):
        store.count_message("sent", 10, number)
        assert store.release(number, "finished")
    store.count_message("sent", 5)
    assert len(store.jobs()) == 4
    last = store.submit(request(2))
    assert [job.id for job in store.jobs()] == [waiting, others[1], last]
    with pytest.raises(StoreError, match=f"no job {ended}"):
        store.job(ended)
    assert store.job(others[1]).packed == b"net"
    assert store.ledger()["sent"] == Tally(4, 35)
    assert store.ledger(ended)["sent"] == Tally()


def test_old_commands_are_forgotten_once_they_were_carried_out(store, monkeypatch):
    monkeypatch.setattr("workbench.store.store.COMMANDS_KEPT", 2)
    first, second, third = (store.command("stop", 4) for _ in range(3))
    store.answer_command(first)
    store.answer_command(third)
    fourth = store.command("stop", 4)
    assert [each.id for each in store.commands()] == [second, fourth]
    with pytest.raises(StoreError, match=f"no command {first}"):
        store.command_of(first)
    assert store.command_of(third).done_at is not None


def test_commands_are_carried_out_in_order(store):
    first, second = store.command("stop", 4), store.command("priority", 4, priority=2)
    assert [each.id for each in store.commands()] == [first, second]
    assert store.commands()[1].payload == {"priority": 2}
    store.answer_command(first, "it has ended")
    assert [each.id for each in store.commands()] == [second]
    answered = store.command_of(first)
    assert (answered.kind, answered.job, answered.error) == ("stop", 4, "it has ended")
    assert answered.done_at >= answered.at
    with pytest.raises(StoreError, match="holds no command 9"):
        store.command_of(9)


def test_messages_are_counted_and_large_ones_refused(store):
    store.count_message("sent", 100, job=1)
    store.count_message("sent", 20, job=1)
    store.count_message("received", 7, job=2)
    store.count_message("received", 90_000, messages=2)
    assert store.ledger(1) == {"sent": Tally(2, 120), "received": Tally()}
    assert store.ledger() == {"sent": Tally(2, 120), "received": Tally(3, 90_007)}
    with pytest.raises(ControlMessageTooLarge, match="of job 1 of 65,537 bytes"):
        store.count_message("sent", 65_537, job=1)
    with pytest.raises(ControlMessageTooLarge, match="command 'stop'"):
        store.command("stop", 1, why="x" * 70_000)
    assert store.ledger(1)["sent"] == Tally(2, 120)
    with pytest.raises(ValueError, match="'sent' or 'received'"):
        store.count_message("lost", 1)


def test_notes(store):
    assert store.meta("meeting") is None
    store.set_meta("meeting", "127.0.0.1:1")
    store.set_meta("meeting", "127.0.0.1:2")
    assert store.meta("meeting") == "127.0.0.1:2"
    store.set_meta("meeting", None)
    assert store.meta("meeting") is None


def test_owners_are_known_by_more_than_their_number(store):
    here = ProcessIdentity.here()
    store.attach(here)
    store.attach(here)
    assert store.owners() == (here,)
    assert here.is_alive
    assert not replace(here, started=here.started + 1).is_alive
    assert not replace(here, boot="another").is_alive
    store.detach(here)
    assert store.owners() == ()


def test_an_owner_that_ended_is_noticed_even_before_it_was_collected():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = ProcessIdentity.of(process.pid)
    assert owner.is_alive
    process.kill()
    while owner.is_alive:  # until the signal has arrived
        pass
    process.communicate()
    with pytest.raises(ProcessLookupError, match="no process"):
        ProcessIdentity.of(process.pid)


def test_an_interrupt_while_the_store_is_locked_leaves_it_open_to_others(store):
    """It is raised when the lock was had, and so must be given back."""
    begun = threading.Event()
    other = sqlite3.connect(store.path, isolation_level=None, check_same_thread=False)

    def traced(sql: str) -> None:
        if sql.startswith("BEGIN"):
            begun.set()

    def interrupted(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is traced.__code__:  # SQLite would swallow what is raised there
                signal.setitimer(signal.ITIMER_REAL, 0.01)
                return
            frame = frame.f_back
        raise KeyboardInterrupt

    def interrupt() -> None:
        begun.wait()
        os.kill(os.getpid(), signal.SIGALRM)
        other.execute("ROLLBACK")

    before = signal.signal(signal.SIGALRM, interrupted)
    other.execute("BEGIN IMMEDIATE")
    store.events()  # opens this thread's connection
    store._connection().set_trace_callback(traced)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            store.event("text", kind="kind")
    finally:
        thread.join()
        other.close()
        signal.signal(signal.SIGALRM, before)
    Store(store.path, patience_s=0.0).event("text", kind="kind")
    assert len(store.events()) == 1


def held(folder, identity, *, seconds_ago=0.0):
    """A folder whose lock file names a process, and was renewed so long ago."""
    path = folder / "supervisor.pid"
    path.write_text(f"{identity.pid} {identity.started} {identity.boot}\n")
    os.utime(path, (time.time() - seconds_ago,) * 2)
    return path


def test_a_process_of_another_kernel_holds_a_folder_as_long_as_it_says_so(tmp_path):
    """Nobody here sees whether it lives: it may be on another host, or of before a reboot."""
    other = replace(ProcessIdentity.here(), boot="another")
    path = held(tmp_path, other)
    assert holder(path) == other
    assert not other.is_near
    with pytest.raises(ClusterError, match=f"has a supervisor already, process {os.getpid()}"):
        FolderLock(path, "supervisor")
    held(tmp_path, other, seconds_ago=2 * LEASE_S)
    assert holder(path) is None
    with FolderLock(path, "supervisor"):
        assert holder(path) == ProcessIdentity.here()
        renew(path)


def test_a_file_that_cannot_be_locked_is_no_file_that_is_locked(tmp_path, monkeypatch):
    def refuses(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuses)
    with pytest.raises(ClusterError, match=r"cannot be locked \(No locks available\)"):
        FolderLock(tmp_path / "supervisor.pid", "supervisor")
