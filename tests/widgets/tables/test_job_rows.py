"""Jobs as rows: their order, their pages, what may be asked of them, when they end."""

import pytest

from tests.scheduler.values import job, running
from workbench.store.record import AttemptRecord, ErrorRecord
from workbench.widgets.tables.job_table import ACTIONS, foreseen, page_of, row, why_not


def ids(jobs, words="", number=1, size=10):
    return [each.id for each in page_of(jobs, words, number, size, now=100.0).jobs]


def test_those_that_run_come_first_then_those_that_wait_and_the_newest_that_ended():
    jobs = [
        job(1, state="finished", ended_at=50.0),
        job(2),
        job(3, priority=1),
        running(4, (0,)),
        job(5, state="paused"),
        job(6, state="failed", ended_at=60.0),
    ]
    assert ids(jobs) == [4, 3, 2, 5, 6, 1]
    assert ids(jobs, "queued") == [3, 2]
    assert ids(jobs, "NET 6") == [6]


def test_pages_and_a_page_beyond_the_last():
    jobs = [job(number) for number in range(1, 26)]
    page = page_of(jobs, "", 3, 10, now=100.0)
    assert [each.id for each in page.jobs] == [21, 22, 23, 24, 25]
    assert (page.pages, page.found, page.total) == (3, 25, 25)
    assert page_of(jobs, "", 99, 10, now=100.0).number == 3
    assert page_of([], "", 0, 10).pages == 1


def test_ten_thousand_jobs():
    jobs = [job(n, state="finished", ended_at=float(n)) for n in range(1, 10_001)]
    page = page_of([*jobs, running(10_001, (0,))], "", 1, 20, now=1e5)
    assert [each.id for each in page.jobs[:3]] == [10_001, 10_000, 9_999]
    assert page.pages == 501


def test_the_end_is_foreseen_from_the_job_s_own_pace():
    going = running(1, (0, 1), began_at=100.0, step=30, steps=90)
    assert foreseen(going, 130.0) == ("ends", 190.0)
    again = AttemptRecord(1, (0, 1), 0.0, 90.0, step=20)
    resumed = running(1, (0, 1), began_at=100.0, step=30, steps=90, attempts=(again,))
    assert foreseen(resumed, 130.0) == ("ends", 310.0)


def test_the_end_is_foreseen_from_what_was_predicted_before_the_first_step():
    assert foreseen(running(1, (0,), steps=10, seconds=40.0), 5.0) == ("ends", 45.0)
    assert foreseen(running(1, (0,), steps=10), 5.0) == ("", None)
    assert foreseen(job(1), 50.0) == ("", None)
    assert foreseen(job(1, state="stopped", ended_at=7.0), 50.0) == ("ended", 7.0)
    assert foreseen(job(1, state="paused"), 50.0) == ("", None)


@pytest.mark.parametrize(
    ("state", "possible"),
    [
        ("queued", {"pause", "stop", "cancel", "up", "down"}),
        ("running", {"pause", "stop", "cancel", "up", "down"}),
        ("stopping", {"cancel", "up", "down"}),
        ("paused", {"resume", "stop", "cancel", "up", "down"}),
        ("failed", {"resume"}),
        ("finished", set()),
    ],
)
def test_what_may_be_asked(state, possible):
    assert {action for action in ACTIONS if not why_not(job(1, state=state), action)} == possible


def test_a_row_says_where_and_why():
    assert row(running(1, (2, 0)), 5.0)["engines"] == "on 2, 0"
    assert row(job(1, 3), 5.0)["engines"] == "3 wanted"
    failed = job(1, state="failed", error=ErrorRecord("RankError", "rank 1 ran out of memory"))
    assert row(failed, 5.0)["reason"] == "RankError: rank 1 ran out of memory"
    assert row(failed, 5.0)["engines"] == "1"
