import pytest

from tests.widgets.dashboard.fake import FakeRun, row
from workbench.widgets.dashboard.runs import Status
from workbench.widgets.dashboard.series import Series


def status(num_steps, state="running", error=None):
    run, series = FakeRun(world_size=1), Series(1)
    run.error = error
    series.extend(row(step, 0) for step in range(num_steps))
    return Status.of(run, series, state)


def test_a_running_run_says_how_long_it_will_take():
    assert status(40).left_s == pytest.approx(8.0)
    assert (
        str(status(40)) == "running, 40 of 80 steps, 0:08 elapsed, 0:08 left, test accuracy 79.0 %"
    )


@pytest.mark.parametrize("num_steps", [0, 1])
def test_before_two_steps_nobody_knows(num_steps):
    assert status(num_steps).left_s is None


def test_an_ended_run_has_nothing_left_and_is_not_stopping():
    run = FakeRun()
    run.stop()
    assert Status.of(run, Series(4), "running").stopping
    ended = Status.of(run, Series(4), "stopped")
    assert ended.ended
    assert not ended.stopping
    assert ended.left_s is None


def test_a_failed_run_says_why_and_what_to_do():
    failed = status(3, "failed", RuntimeError("rank 2 ran out of memory"))
    assert failed.error == "rank 2 ran out of memory"
    assert "run.metrics" in failed.advice
    assert status(3, "failed", KeyError()).error == "KeyError"


def test_a_run_that_waits_says_for_what():
    run = FakeRun()
    run.notes, run.reason = ["a note"], "2 engines are needed, 1 is free"
    status = Status.of(run, Series(4), "queued")
    assert (status.notes, status.reason) == (("a note",), run.reason)


def test_others_need_no_advice():
    assert status(80, "finished").advice == ""
