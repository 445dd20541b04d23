"""Jobs that make room for others, and that take the room that there is."""

import time

import pytest

from tests.server.fake_tasks import value_after
from tests.server.test_recovery import value
from tests.server.test_restarts import was_run_once


@pytest.mark.slow
def test_jobs_side_by_side(fake):
    first, second = (fake.submit(engines=1, keywords={"steps": 80}) for _ in range(2))
    fake.at_step(first, 10)
    fake.until(second, "running")
    third = fake.submit(keywords={"steps": 4})
    while not fake.store.job(third).reason:
        time.sleep(0.01)
    records = [fake.ended(job) for job in (first, second, third)]
    assert [record.state for record in records] == ["finished"] * 3
    assert {record.attempts[0].places for record in records} == {(0,), (1,), (0, 1)}


@pytest.mark.slow
def test_a_job_of_higher_priority_goes_first(fake):
    """The one that runs leaves a checkpoint, and goes on after it."""
    long = fake.submit(keywords={"steps": 500, "every": 1000}, seconds=100.0)
    fake.at_step(long, 20)
    urgent = fake.submit(keywords={"steps": 10}, priority=1)
    assert fake.ended(urgent).state == "finished"
    assert not fake.store.job(long).has_ended
    record = fake.ended(long)
    assert (record.state, record.attempt, value(record)) == ("finished", 2, value_after(500))
    assert record.attempts[1].resumed == record.attempts[0].step
    assert was_run_once(record.directory)


def test_a_job_that_can_never_fit_says_so(fake):
    job = fake.submit(engines=5)
    while not (reason := fake.store.job(job).reason):
        time.sleep(0.01)
    assert "at most 2 would fit" in reason
