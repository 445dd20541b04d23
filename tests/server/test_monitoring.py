"""What is seen of processes, of the pace of ranks, and of checkpoints."""

import json
import os
import signal
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from workbench.plan.experiment.metrics import COLUMNS
from workbench.server import vitals
from workbench.server.attempt import Attempt
from workbench.server.fleet import Watch
from workbench.server.job import Work
from workbench.server.monitor import HostHealth, Monitor, Standstill
from workbench.server.pace import LOOKS, MemoryTrend, Pace
from workbench.server.vitals import Sample, Vitals
from workbench.store.process import ProcessIdentity
from workbench.store.record import Request
from workbench.store.run_folder import newest_whole
from workbench.store.store import Store
from workbench.store.telemetry import pack_row


def rows(step: int, *compute_s: float, time: float = 0.0):
    empty = dict.fromkeys(COLUMNS, 0.0)
    return {
        rank: {**empty, "rank": rank, "step": step, "compute_s": seconds, "time": time}
        for rank, seconds in enumerate(compute_s)
    }


def test_a_straggler_is_told_once_and_when_it_is_none_any_more():
    pace, told = Pace(), []
    for step in range(3 * LOOKS):
        told += pace.poll(rows(step, 1.0, 1.0, 2.0))
    assert told == ["rank 2 is 2.0 times slower than the others since step 0"]
    assert pace.step == 3 * LOOKS
    for step in range(3 * LOOKS, 6 * LOOKS):
        told += pace.poll(rows(step, 1.0, 1.0, 1.0))
    assert len(told) == 2
    assert told[1].startswith("rank 2 is as fast as the others again")


def test_rows_that_come_twice_say_nothing_new():
    pace = Pace()
    assert not any(pace.poll(rows(0, 1.0, 9.0)) for _ in range(3 * LOOKS))


def test_steps_that_take_longer_than_predicted_are_told_once():
    pace, told = Pace(predicted_s=0.5), []
    for step in range(4 * LOOKS):
        told += pace.poll(rows(step, 0.1, time=step * 1.0))
    assert told == ["a step takes 1 s, 2.0 times as long as predicted, since step 2"]


def test_memory_that_grows_is_told_once_it_has_settled():
    trend, told = MemoryTrend(), []
    for step in range(0, 300, 10):
        row = {"step": step, "rss_bytes": (1 if step < 60 else 1 + step / 200) * 2**30}
        told += trend.poll({0: row, 1: {**row, "rss_bytes": 2**30}}, resumed=10)
    assert told == [
        "the memory of rank 0 has grown from 1.3 to 2.0 GiB since step 60",
    ]


def test_what_passes_through_interfaces_is_told_by_the_second(monkeypatch):
    passed = iter([{"eth0": (100, 50)}, {"eth0": (300, 50), "eth1": (7, 7)}, {"eth0": (0, 90)}])
    monkeypatch.setattr(
        psutil,
        "net_io_counters",
        lambda pernic: {
            name: SimpleNamespace(bytes_recv=received, bytes_sent=sent)
            for name, (received, sent) in next(passed).items()
        },
    )
    host = HostHealth()
    found = [host.poll(now)["network"] for now in (10.0, 12.0, 16.0)]
    assert found == [{}, {"eth0": (100.0, 0.0)}, {"eth0": (0.0, 10.0)}]


def test_the_end_of_a_process_is_seen_at_once():
    watch = Watch()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        watched = ProcessIdentity.of(process.pid)
        assert watch.add(watched)
        assert watch.wait(0.01) == set()
        process.kill()
        assert watch.wait(10.0) == {watched}
        assert not watch.add(watched)


@pytest.mark.parametrize("changed", [{"started": 0}, {"boot": "before it was started again"}])
def test_a_stranger_who_has_the_id_now_is_neither_watched_nor_signalled(tmp_path, changed):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        stored = replace(ProcessIdentity.of(stranger.pid), **changed)
        assert not Watch().add(stored)
        attempt = Attempt(1, 1, tmp_path / "1", (0,), (stored,))
        attempt.kill(attempt.ranks[0], "it was silent")
        assert not stored.send(signal.SIGKILL)
        assert stranger.poll() is None
        stranger.communicate()
    assert stranger.returncode == 1  # nobody has ended it: its input did


def test_a_process_that_is_stopped_is_told_from_one_that_works_in_turns(tmp_path):
    vitals = Vitals(tmp_path)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.1)
        vitals.poll(process.pid, 0.0)
        vitals.poll(process.pid, 1.0)
        assert vitals.stopped_s(process.pid, 2.0) == 2.0
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.1)
        vitals.poll(process.pid, 3.0)  # it stands still again, and has worked meanwhile
        assert vitals.stopped_s(process.pid, 3.0) == 0.0
        assert vitals.cpu_share(process.pid) > 0
        process.kill()
    vitals.poll(process.pid, 4.0)
    assert vitals.rss_bytes(process.pid) == 0


STOPPED_S = 0.5
TICK_S = 0.1  # of a server at rest


def found_at(monkeypatch, folder, *, stopped_at, reports_every, worked_s=0.0):
    """When a rank is found that is stopped at a time; it works so much in each tick after that."""
    clock = SimpleNamespace(now=0.0)

    def sample():
        late = max(0.0, clock.now - stopped_at)
        return Sample("T" if late else "S", clock.now - late + late / TICK_S * worked_s, 1)

    monkeypatch.setattr(vitals, "Process", lambda pid, folder: SimpleNamespace(sample=sample))
    said = [0]

    def has_reported():
        before, now = said[0], int(min(clock.now, stopped_at) / reports_every)
        said[0] = now
        return now != before

    standstill = Standstill(Vitals(folder), STOPPED_S)
    rank = SimpleNamespace(pid=1, number=1, has_ended=False, has_reported=has_reported)
    running = [(None, SimpleNamespace(ranks=[rank]))]
    while clock.now < stopped_at + 5.0:
        if list(standstill.poll(running, clock.now)):
            return clock.now
        clock.now += TICK_S
    return None


@pytest.mark.parametrize("reports_every", [0.1, 0.4, 60.0])
def test_whoever_stands_still_is_found_in_time(monkeypatch, tmp_path, reports_every):
    for hundredths in range(200, 320, 3):
        stopped_at = hundredths / 100
        how = {"stopped_at": stopped_at, "reports_every": reports_every}
        found = found_at(monkeypatch, tmp_path, **how)
        assert STOPPED_S <= found - stopped_at <= 1.5


def test_whoever_works_in_turns_does_not_stand_still(monkeypatch, tmp_path):
    """Held for 100 times as long as it works, and so within a tick of the kernel's for long."""
    how = {"stopped_at": 2.0, "reports_every": 60.0}
    assert found_at(monkeypatch, tmp_path, **how, worked_s=TICK_S / 100) is None


def test_the_time_that_a_process_works_is_known_to_less_than_a_tick(tmp_path):
    process, before = vitals.Process(os.getpid(), tmp_path), time.process_time()
    assert before <= process.sample().cpu_s <= time.process_time()
    process.close()


def saved(directory, step: int, num_bytes: int = 8, crc: int = zlib.crc32(bytes(8))) -> None:
    folder = directory / f"step-{step:06d}"
    folder.mkdir()
    entry = {"dtype": "F64", "shape": [], "data_offsets": [0, 8]}
    metadata = {"crc32": json.dumps({"w": crc})}
    header = json.dumps({"__metadata__": metadata, "w": entry}).encode()
    file = len(header).to_bytes(8, "little") + header + bytes(num_bytes)
    (folder / "rank-00000.safetensors").write_bytes(file)
    (folder / "index.toml").write_text(
        '[tensors.w]\npieces = [{ file = "rank-00000.safetensors" }]\n'
    )
    (folder / "checkpoint.toml").touch()


def test_a_checkpoint_that_is_damaged_is_passed_over(tmp_path):
    assert newest_whole(tmp_path / "nowhere") == (None, [])
    saved(tmp_path, 5)
    saved(tmp_path, 10, num_bytes=7)
    saved(tmp_path, 15)
    (tmp_path / "step-000015" / "rank-00000.safetensors").unlink()
    saved(tmp_path, 20, crc=7)
    (tmp_path / "step-000025.tmp").mkdir()
    found, damaged = newest_whole(tmp_path)
    assert (found.step, found.path.name) == (5, "step-000005")
    assert [text.split()[0] for text in damaged] == ["step-000020", "step-000015", "step-000010"]
    assert newest_whole(tmp_path, checked=False)[0].step == 20


@pytest.mark.parametrize("waits_for_a_disk", [True, False])
def test_a_rank_that_is_silent_is_ended_unless_it_waits_for_a_disk(tmp_path, waits_for_a_disk):
    store = Store(tmp_path / "server.sqlite", create=True)
    job = store.submit(Request(kind="train", name="run", task="a:b", engines=1))
    monitor = Monitor(
        tmp_path, store, SimpleNamespace(timeout_s=30.0, suspicion_s=1.0, lease_s=20.0), None
    )
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        places = (0,), (ProcessIdentity.of(process.pid),)
        attempt, work = Attempt(job, 1, tmp_path, *places), Work(store.job(job), 0.0)
        files = attempt.ranks[0].files
        assert files.begin()
        files.rows.write_bytes(pack_row(rows(1, 0.1)[0]))
        attempt.none_has_begun()
        monitor._poll_rows([(work, attempt)], 0.0)
        if waits_for_a_disk:
            files.renew()
        monitor._poll_rows([(work, attempt)], 1000.0)
        assert bool(attempt.ranks[0].killed) != waits_for_a_disk
        process.kill()


def test_the_time_in_which_the_server_stood_still_itself_counts_against_nobody(tmp_path):
    """As where a whole host is suspended: all of it goes on, and ranks not before the server."""
    store = Store(tmp_path / "server.sqlite", create=True)
    job = store.submit(Request(kind="train", name="run", task="a:b", engines=1))
    spec = SimpleNamespace(timeout_s=30.0, suspicion_s=1.0, lease_s=20.0)
    records = {0: SimpleNamespace(state="busy")}
    fleet = SimpleNamespace(records=records, living=lambda: (), died=())
    monitor = Monitor(tmp_path, store, spec, fleet)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        places = (0,), (ProcessIdentity.of(process.pid),)
        attempt, work = Attempt(job, 1, tmp_path, *places), Work(store.job(job), 0.0)
        work.attempt, rank = attempt, attempt.ranks[0]
        assert rank.files.begin()
        rank.files.rows.write_bytes(pack_row(rows(1, 0.1)[0]))
        attempt.none_has_begun()
        monitor.poll([work], 0.0)
        os.kill(process.pid, signal.SIGSTOP)
        until_stopped(process.pid)
        for halves in range(2, 10):
            monitor.poll([work], halves / 2)
        assert [event.kind for event in store.events(job=job)] == ["stopped"]
        for now in (10_000, 10_001, 10_010, 10_011):
            monitor.poll([work], now)
        assert not rank.killed
        for now in range(10_012, 10_030):
            monitor.poll([work], now)
        assert rank.killed.startswith("stood still for 2")  # those 20 s that were seen
        process.kill()


def until_stopped(pid: int) -> None:
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
