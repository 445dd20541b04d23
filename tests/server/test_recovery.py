"""What becomes of jobs whose ranks are lost, in all the ways in which they can be."""

import os
import signal
import time

import pytest

from tests.server.fake_cluster import LEASE_S, WITHIN_S
from tests.server.fake_tasks import value_after
from workbench.server.attempt import attempt_folder
from workbench.store.messages import Answer
from workbench.store.rank_files import RankFiles


def value(record):
    packed = RankFiles(attempt_folder(record.directory, record.attempt), 0).answer
    return Answer.unpack(packed).value.evaluation["value"]


def test_a_job_runs_to_its_end(fake):
    record = fake.ended(fake.submit(keywords={"steps": 12}))
    assert (record.state, record.attempt, record.step) == ("finished", 1, 12), record
    assert value(record) == value_after(12)
    assert record.checkpoint.endswith("step-000012")
    assert record.held == record.pids == ()
    assert [engine.state for engine in fake.store.engines()] == ["idle"] * 3


@pytest.mark.slow
def test_a_rank_that_dies_is_replaced_and_the_job_goes_on(fake):
    job = fake.submit(keywords={"steps": 60})
    record = fake.at_step(job, 22)
    os.kill(record.pids[1], signal.SIGKILL)
    record = fake.ended(job)
    assert (record.state, record.attempt) == ("finished", 2), (record, fake.said(job))
    assert value(record) == value_after(60)
    assert record.attempts[0].is_lost
    assert "died: its process was ended by SIGKILL" in record.attempts[0].reason


@pytest.mark.slow
def test_an_idle_engine_takes_over_where_there_is_one(fake):
    job = fake.submit(engines=1, keywords={"steps": 60})
    record = fake.at_step(job, 22)
    fake.replaces = False
    os.kill(record.pids[0], signal.SIGKILL)
    record = fake.ended(job)
    fake.replaces = True
    (gone,) = record.attempts[0].places
    fake.start_engine(gone)
    assert (record.state, record.attempt, value(record)) == ("finished", 2, value_after(60))
    assert record.attempts[1].places == (1 - gone,)


@pytest.mark.slow
def test_a_rank_that_is_stopped_by_a_signal_is_ended(fake):
    job = fake.submit(keywords={"steps": 60})
    record = fake.at_step(job, 22)
    began = time.monotonic()
    os.kill(record.pids[1], signal.SIGSTOP)
    while not fake.store.job(job).attempts:
        assert time.monotonic() - began < WITHIN_S
        time.sleep(0.01)
    record = fake.ended(job)
    assert (record.state, value(record)) == ("finished", value_after(60))
    assert "stood still for" in record.attempts[0].reason


@pytest.mark.slow
def test_a_rank_that_is_stopped_for_a_moment_goes_on(fake):
    job = fake.submit(keywords={"steps": 60})
    record = fake.at_step(job, 22)
    os.kill(record.pids[1], signal.SIGSTOP)
    began = time.monotonic()
    while not (told := [event for event in fake.store.events(job=job) if event.kind == "stopped"]):
        assert time.monotonic() - began < WITHIN_S
        time.sleep(0.01)
    os.kill(record.pids[1], signal.SIGCONT)
    record = fake.ended(job)
    assert (record.state, record.attempt, value(record)) == ("finished", 1, value_after(60))
    assert told[0].text == (
        "rank 1 stands still, stopped by a signal; it is ended if that lasts 2 s"
    )
    texts = [event.text for event in fake.store.events(job=job) if event.kind == "stopped"]
    assert texts == [told[0].text, "rank 1 goes on"]


@pytest.mark.slow
def test_an_idle_engine_that_is_stopped_is_ended_before_a_job_has_it(fake):
    before = fake.store.engines()[1].pid
    os.kill(before, signal.SIGSTOP)
    deadline = time.monotonic() + 30
    while (engine := fake.store.engines()[1]).pid == before or engine.state != "idle":
        assert time.monotonic() < deadline, engine
        time.sleep(0.01)
    record = fake.ended(fake.submit(keywords={"steps": 5}))
    assert (record.state, record.attempt) == ("finished", 1)


@pytest.mark.slow
def test_a_pause_that_is_expected_is_no_fault(fake):
    job = fake.submit(keywords={"steps": 60})
    record = fake.at_step(job, 22)
    assert fake.ask("expect_paused", engine=record.held[1], paused=True) == ""
    os.kill(record.pids[1], signal.SIGSTOP)
    time.sleep(LEASE_S + 1.0)
    assert not fake.store.job(job).attempts
    os.kill(record.pids[1], signal.SIGCONT)
    assert fake.ask("expect_paused", engine=record.held[1], paused=False) == ""
    record = fake.ended(job)
    assert (record.state, record.attempt) == ("finished", 1)


def test_a_rank_that_raises_has_failed_for_good(fake):
    record = fake.ended(fake.submit(keywords={"steps": 60, "raises_at": 7, "who": 1}))
    assert (record.state, record.attempt) == ("failed", 1)
    assert (record.error.kind, record.error.rank) == ("ValueError", 1)
    assert "no room" in record.error.text
    assert record.checkpoint.endswith("step-000005")


@pytest.mark.slow
def test_a_job_that_dies_again_and_again_is_parked(fake):
    record = fake.ended(fake.submit(keywords={"steps": 60, "dies_at": 17}, max_attempts=2))
    assert record.state == "parked"
    assert record.error.kind == "EngineDied"
    assert "times before it came further than step" in record.reason
    assert len(record.attempts) <= 5


@pytest.mark.slow
def test_ranks_that_lose_each_other_try_again(fake):
    record = fake.ended(fake.submit(keywords={"steps": 30, "sleeps_at": 12}, max_attempts=1))
    assert record.state == "parked"
    assert "CommTimeout" in record.error.text
