"""What becomes of a job whose attempt is over: decided from what its ranks left alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from workbench.cluster.errors import EngineDied, RankError, RunError
from workbench.cluster.failure import End, first_failure
from workbench.cluster.jobs.record import AttemptRecord, ErrorRecord, JobRecord, State
from workbench.train.control import Outcome

WISHES = ("", "resize", "preempt", "pause", "stop", "cancel")
"""What may be wished for a job that runs; a later one goes before earlier ones."""

_BECOMES: dict[str, State] = {
    "resize": "queued",
    "preempt": "queued",
    "pause": "paused",
    "stop": "stopped",
    "cancel": "cancelled",
}
_WHY: dict[str, str] = {
    "resize": "goes on with another number of ranks",
    "preempt": "makes room for a job of higher priority",
    "pause": "paused",
    "stop": "stopped",
    "cancel": "cancelled",
}
# What ranks raise that lost each other. Where none raised anything else, and all live, what
# was lost is what lay between them.
_LOST = frozenset(("CommTimeout", "PeerLost", "CommError"))


@dataclass(frozen=True)
class Verdict:
    """What becomes of a job.

    Attributes:
        state: that it takes; "starting": it is tried again.
        reason: why, for people.
        error: what it failed with, or what the attempt did.
        outcome: of rank 0, where the job trained to an end.
        is_lost: whether the attempt ended because a process or a connection was lost.
    """

    state: State
    reason: str
    error: ErrorRecord | None = None
    outcome: Outcome | None = None
    is_lost: bool = False


def becomes(wish: str) -> Verdict:
    """What becomes of a job whose ranks have ended, or never began, as was wished."""
    return Verdict(_BECOMES[wish], _WHY[wish])


def judge(job: JobRecord, ends: Sequence[End], wish: str, *, step: int, resumed: int) -> Verdict:
    """What becomes of a job, all of whose ranks have ended.

    A rank that raised would raise again: its job has failed. A process that was lost is the fault
    of nothing in the job, as far as is known, so that a training job is tried again; until it has
    been lost `max_attempts` times without getting further, each time from the same checkpoint.

    Args:
        job: its record; `attempts` are those before this one.
        ends: of the ranks.
        wish: what was wished for it.
        step: updates that were done when it ended.
        resumed: updates that were done when the attempt began.
    """
    if wish == "cancel":
        return becomes(wish)
    failure = first_failure(ends)
    if failure is None and all(end.answer for end in ends):
        return _returned(ends, wish)
    is_lost = _is_lost(ends)
    has_raised = any(end.answer and end.answer.kind == "raised" for end in ends)
    has_died = any(end.death and not end.is_killed for end in ends)
    if wish and not has_raised and not has_died:
        return becomes(wish)  # before all had begun; those that had were interrupted, or ended
    error = _record(failure)
    text = error.text.splitlines()[0]
    if not is_lost or job.kind != "train":
        return Verdict("failed", text, error)
    if wish:
        return replace(becomes(wish), reason=f"{_WHY[wish]}; {text}", is_lost=True)
    losses = losses_in_place(job.attempts, step, resumed)
    if losses >= job.max_attempts:
        reason = f"lost {losses} times before it came further than step {step}; the last: {text}"
        return Verdict("parked", reason, error, is_lost=True)
    return Verdict("starting", text, error, is_lost=True)


def losses_in_place(before: Sequence[AttemptRecord], step: int, resumed: int) -> int:
    """How many attempts in a row, this one included, were lost without getting further.

    One that got beyond all that were lost before it, or that began at a later checkpoint than the
    last one, got further.
    """
    count = 1
    for earlier in reversed(before):
        if not earlier.is_lost or earlier.resumed < resumed or earlier.step < step:
            break
        count += 1
    return count


def _returned(ends: Sequence[End], wish: str) -> Verdict:
    answer = ends[0].answer
    outcome = answer.value if answer is not None else None
    if not isinstance(outcome, Outcome):
        return Verdict("finished", "")
    if outcome.reason == "diverged":
        return Verdict("failed", outcome.message, ErrorRecord("Diverged", outcome.message))
    if outcome.reason == "finished":
        return Verdict("finished", "", None, outcome)
    return Verdict(_BECOMES.get(wish, "stopped"), _WHY.get(wish, "stopped"), None, outcome)


def _is_lost(ends: Sequence[End]) -> bool:
    """Whether ranks were lost, and none raised for a reason of its own before."""
    if any(end.death and not end.is_killed for end in ends):
        return True
    kinds = {end.answer.error[0] for end in ends if end.answer and end.answer.kind == "raised"}
    return kinds <= _LOST and bool(kinds or any(end.death for end in ends))


def _record(failure: RunError | None) -> ErrorRecord:
    if isinstance(failure, EngineDied):
        return ErrorRecord("EngineDied", str(failure), failure.rank, death=failure.death)
    if not isinstance(failure, RankError):
        return ErrorRecord("ClusterError", "not all of its ranks began")
    return ErrorRecord(
        failure.kind,
        str(failure),
        failure.rank,
        failure.layer,
        failure.remote_traceback,
    )
