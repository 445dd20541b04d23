"""Another learning rate, or a checkpoint, while a run goes on; ranks are played by the test."""

import math

import pytest

from tests.client.fake_job import LONG_S, Job
from workbench.store.errors import ClusterError
from workbench.train.run.requests import CarriedOut, RunRequests


@pytest.mark.parametrize("value", [0, -0.1, math.nan, math.inf, "0.1", True, None])
def test_a_rate_is_a_positive_number(start, value):
    job = Job()
    run = start(job)
    with pytest.raises(ValueError, match=f"positive number, got {value!r}"):
        run.set_lr(value)
    assert RunRequests(run.directory).newest() == 0
    job.may_end.set()
    run.wait(LONG_S)


def test_what_was_carried_out_is_noted_whoever_requested_it(start):
    jobs = [Job(), Job()]
    mine, other = (start(job) for job in jobs)  # in one directory
    rate, saved = mine.set_lr(0.025), mine.checkpoint_now()
    assert "not yet" in repr(rate)
    with pytest.raises(TimeoutError, match="not carried out yet"):
        rate.wait(0.0)
    requests = RunRequests(mine.directory)
    requests.carry_out(1, CarriedOut(4, before=0.1))
    requests.carry_out(2, CarriedOut(4, 0.5))
    assert (rate.wait(LONG_S).step, saved.wait(LONG_S).seconds) == (4, 0.5)
    for job, run in zip(jobs, (mine, other), strict=True):
        job.may_end.set()
        run.wait(LONG_S)
        assert run.experiment.optimizer.lr == 0.025
        assert run.notes == [
            "learning rate 0.025 since step 4",
            "checkpoint after step 4, as requested, in 0.5 s",
        ]


def test_a_run_that_has_ended_takes_no_requests(start):
    job = Job()
    job.may_end.set()
    run = start(job).wait(LONG_S)
    for request in (lambda: run.set_lr(0.1), run.checkpoint_now):
        with pytest.raises(ClusterError, match="has ended"):
            request()


def test_a_request_that_comes_too_late_says_so(start):
    job = Job()
    run = start(job)
    saving = run.checkpoint_now()
    job.may_end.set()
    run.wait(LONG_S)
    with pytest.raises(ClusterError, match=r"ended before SaveNow\(\) was carried out"):
        saving.wait(LONG_S)
