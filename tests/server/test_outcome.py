"""What becomes of jobs, from how their ranks ended."""

from dataclasses import replace

import pytest

from workbench.server.outcome import End, decide_outcome, losses_in_place
from workbench.store.messages import Answer, TrainingOutcome
from workbench.store.record import AttemptRecord, JobRecord

JOB = JobRecord(id=1, kind="train", name="job", task="m:f", engines=2, max_attempts=2)
DIED = End(1, 101, None, "was ended by SIGKILL")
STUCK = End(0, 100, None, "was ended by SIGKILL", is_killed=True)
INTERRUPTED = End(0, 100, Answer("interrupted"))
NEVER = End(0, 100, None)


def returned(reason: str = "finished", message: str = "") -> End:
    return End(0, 100, Answer("returned", TrainingOutcome(reason, 8, "step-8", message=message)))


def raised(kind: str, rank: int = 0) -> End:
    return End(rank, 100 + rank, Answer("raised", error=(kind, "why")))


def verdict(*ends: End, requested: str = "", job: JobRecord = JOB, step: int = 8, resumed: int = 0):
    return decide_outcome(job, ends, requested, step=step, resumed=resumed)


@pytest.mark.parametrize(
    ("ends", "requested", "state"),
    [
        ([returned(), returned()], "", "finished"),
        ([returned(), returned()], "pause", "finished"),
        ([returned("stopped")], "stop", "stopped"),
        ([returned("stopped")], "pause", "paused"),
        ([returned("stopped")], "preempt", "queued"),
        ([returned("stopped")], "", "stopped"),
        ([returned("diverged", "no number")], "", "failed"),
        ([INTERRUPTED, DIED], "", "starting"),
        ([raised("PeerLost"), DIED], "", "starting"),
        ([raised("CommTimeout"), raised("PeerLost", 1)], "", "starting"),
        ([raised("CommTimeout"), replace(STUCK, rank=1)], "", "starting"),
        ([raised("DistNetworkError"), raised("DistNetworkError", 1)], "", "starting"),
        ([raised("ValueError"), raised("PeerLost", 1)], "", "failed"),
        ([raised("ValueError"), replace(STUCK, rank=1)], "", "failed"),
        ([INTERRUPTED, DIED], "stop", "stopped"),
        ([INTERRUPTED, DIED], "pause", "paused"),
        ([raised("ValueError"), INTERRUPTED], "stop", "failed"),
        ([NEVER, NEVER], "", "starting"),
        ([NEVER, NEVER], "stop", "stopped"),
        ([INTERRUPTED, NEVER], "preempt", "queued"),
        ([STUCK, replace(INTERRUPTED, rank=1)], "stop", "stopped"),
        ([raised("CommTimeout"), replace(INTERRUPTED, rank=1)], "stop", "stopped"),
        ([INTERRUPTED, DIED], "cancel", "cancelled"),
        ([INTERRUPTED, INTERRUPTED], "", "starting"),
        ([INTERRUPTED, replace(STUCK, rank=1)], "", "starting"),
        ([INTERRUPTED, raised("ValueError", 1)], "", "failed"),
    ],
)
def test_what_becomes_of_training(ends, requested, state):
    assert verdict(*ends, requested=requested).state == state


@pytest.mark.parametrize("ends", [[INTERRUPTED, DIED], [STUCK, NEVER], [raised("PeerLost"), DIED]])
def test_what_was_lost_while_it_was_being_stopped_is_no_failure(ends):
    assert verdict(*ends, requested="stop").error is None


def test_a_call_is_not_tried_again():
    call = replace(JOB, kind="call")
    found = verdict(INTERRUPTED, DIED, job=call)
    assert (found.state, found.error.kind, found.error.rank) == ("failed", "EngineDied", 1)
    assert verdict(End(0, 100, Answer("returned")), job=call).state == "finished"


def lost(step: int, resumed: int = 0, *, is_lost: bool = True) -> AttemptRecord:
    return AttemptRecord(1, (0, 1), 0.0, 1.0, step, "died", resumed, is_lost)


@pytest.mark.parametrize(
    ("before", "step", "resumed", "count"),
    [
        ([], 8, 0, 1),
        ([lost(8)], 8, 0, 2),
        ([lost(9)], 8, 0, 2),
        ([lost(7)], 8, 0, 1),  # this one got further
        ([lost(8, 0)], 8, 5, 1),  # this one began at a later checkpoint
        ([lost(8), lost(8), lost(8)], 8, 0, 4),
        ([lost(8), lost(6, is_lost=False)], 5, 0, 1),  # one that was paused is no loss
    ],
)
def test_losses_that_came_no_further_are_counted(before, step, resumed, count):
    assert losses_in_place(before, step, resumed) == count


def test_a_job_that_is_lost_in_place_is_parked():
    again = replace(JOB, attempts=(lost(8),))
    found = verdict(INTERRUPTED, DIED, job=again)
    assert found.state == "parked"
    assert "2 times before it came further than step 8" in found.reason
