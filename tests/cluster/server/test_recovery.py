"""What becomes of jobs whose ranks are lost, in all the ways in which they can be."""

import os
import signal
import time

from tests.cluster.server.fake_tasks import value_after
from workbench.cluster.answer import Answer
from workbench.cluster.rank_files import RankFiles
from workbench.cluster.server.attempt import attempt_folder


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


def test_a_rank_that_dies_is_replaced_and_the_job_goes_on(fake):
    job = fake.submit(keywords={"steps": 60})
    record = fake.at_step(job, 22)
    began = time.monotonic()
    os.kill(record.pids[1], signal.SIGKILL)
    record = fake.ended(job)
    assert (record.state, record.attempt) == ("finished", 2), (record, fake.said(job))
    assert value(record) == value_after(60)
    assert record.attempts[0].is_lost
    assert "died: its process was ended by SIGKILL" in record.attempts[0].reason
    assert time.monotonic() - began < 10
