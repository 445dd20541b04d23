"""What becomes of a job whose attempt is over: decided from what its ranks left alone.

Of several failures, the first one counts; one text tells of all.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from workbench.store.errors import EngineDied, RankError, RunError
from workbench.store.messages import Answer, TrainingOutcome
from workbench.store.record import AttemptRecord, ErrorRecord, JobRecord, JobState


@dataclass(frozen=True)
class End:
    """How one rank ended.

    Attributes:
        answer: what it answered; None where it died.
        death: how its process ended, "was ended by SIGKILL"; "" where it lives.
        is_killed: whether it was ended by us, because it did not answer after others had failed.
    """

    rank: int
    pid: int
    answer: Answer | None
    death: str = ""
    is_killed: bool = False


def first_failure(ends: Sequence[End]) -> RunError | None:
    """The error of the rank that failed first; None where all returned.

    A lost process comes before any exception: what the others raise is that they lost it.
    Exceptions are ordered by the clock, which ranks on one host share; but those of ranks that lost
    another come last: a rank leaves its world before it can say what it raised. Ranks that only
    ended because they were interrupted, after another had failed, are not failures.
    """
    died = [end for end in ends if end.death and not end.is_killed]
    raised = [end for end in ends if end.answer and end.answer.kind == "raised"]
    raised.sort(key=_turn)
    interrupted = [end for end in ends if end.answer and end.answer.kind == "interrupted"]
    stuck = [end for end in ends if end.is_killed]
    if died:
        first = died[0]
        text = f"rank {first.rank} (pid {first.pid}) died: its process {first.death}"
        more = _others(died[1:] + raised), _stuck(stuck)
        return EngineDied(_join(text, *more), first.rank, first.death)
    if raised:
        return _raised(raised[0], _others(raised[1:]), _stuck(stuck))
    if interrupted or stuck:
        first = (interrupted or stuck)[0]
        text = f"rank {first.rank} (pid {first.pid}) was interrupted"
        return RankError(_join(text, _stuck(stuck)), first.rank, kind="KeyboardInterrupt")
    return None


def _turn(end: End) -> tuple[bool, float]:
    answer = end.answer
    assert answer is not None
    return answer.error[0] in _LOST, answer.time


def _raised(end: End, *more: str) -> RankError:
    answer = end.answer
    assert answer is not None
    kind, text = answer.error
    place = f" in layer {answer.layer!r}" if answer.layer else ""
    message = _join(
        f"rank {end.rank} failed{place}: {kind}: {text}",
        *more,
        f"\nThe traceback of rank {end.rank}:\n{answer.traceback}",
    )
    return RankError(
        message,
        end.rank,
        layer=answer.layer,
        kind=kind,
        text=text,
        remote_traceback=answer.traceback,
    )


def _others(ends: Sequence[End]) -> str:
    """'2 other ranks failed after it: PeerLost on ranks 0, 1', or nothing."""
    if not ends:
        return ""
    kinds = defaultdict(list)
    for end in ends:
        kinds[end.answer.error[0] if end.answer else "died"].append(end.rank)
    told = "; ".join(f"{kind} on rank{_list(ranks)}" for kind, ranks in kinds.items())
    return f"{len(ends)} other rank{'s' * (len(ends) > 1)} failed after it: {told}"


def _stuck(ends: Sequence[End]) -> str:
    if not ends:
        return ""
    return (
        f"rank{_list([end.rank for end in ends])} could not be interrupted and had to be ended; "
        "new engines are started for the next run"
    )


def _list(ranks: Sequence[int]) -> str:
    return f"{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def _join(*parts: str) -> str:
    return "\n".join(part for part in parts if part)


REQUESTS = ("", "preempt", "pause", "stop", "cancel")
"""What may be requested for a job that runs; a later one goes before earlier ones."""

_BECOMES: dict[str, JobState] = {
    "preempt": "queued",
    "pause": "paused",
    "stop": "stopped",
    "cancel": "cancelled",
}
_WHY: dict[str, str] = {
    "preempt": "makes room for a job of higher priority",
    "pause": "paused",
    "stop": "stopped",
    "cancel": "cancelled",
}
# What ranks raise that lost each other, or the store where they meet, which ends with the
# supervisor. Where none raised anything else, and all live, what was lost is what lay between them.
_LOST = frozenset(("CommTimeout", "PeerLost", "CommError", "DistNetworkError"))


@dataclass(frozen=True)
class JobOutcome:
    """What becomes of a job.

    Attributes:
        state: the state that it takes; "starting": it is tried again.
        reason: the reason, for people.
        error: what it failed with, or what the attempt did.
        outcome: what rank 0 reported, where the job trained to an end.
        is_lost: whether the attempt ended because a process or a connection was lost.
    """

    state: JobState
    reason: str
    error: ErrorRecord | None = None
    outcome: TrainingOutcome | None = None
    is_lost: bool = False


def becomes(requested: str) -> JobOutcome:
    """What becomes of a job whose ranks have ended, or never began, as was requested."""
    return JobOutcome(_BECOMES[requested], _WHY[requested])


def decide_outcome(
    job: JobRecord, ends: Sequence[End], requested: str, *, step: int, resumed: int
) -> JobOutcome:
    """What becomes of a job, all of whose ranks have ended.

    A rank that raised would raise again: its job has failed. A process that was lost is the fault
    of nothing in the job, as far as is known, so that a training job is tried again; until it has
    been lost `max_attempts` times without getting further, each time from the same checkpoint.

    Args:
        job: the job's record; `attempts` are those before this one.
        requested: what was requested of it, one of `REQUESTS`.
    """
    if requested == "cancel":
        return becomes(requested)
    failure = first_failure(ends)
    if failure is None and all(end.answer for end in ends):
        return _returned(ends, requested)
    is_lost = _is_lost(ends)
    has_raised = any(end.answer and end.answer.kind == "raised" for end in ends)
    has_died = any(end.death and not end.is_killed for end in ends)
    if requested and not has_raised and not has_died:
        return becomes(requested)  # before all had begun; those that had were interrupted, or ended
    error = _record(failure)
    text = error.text.splitlines()[0]
    if not is_lost or job.kind != "train":
        return JobOutcome("failed", text, error)
    if requested:
        return replace(becomes(requested), reason=f"{_WHY[requested]}; {text}", is_lost=True)
    losses = losses_in_place(job.attempts, step, resumed)
    if losses >= job.max_attempts:
        reason = f"lost {losses} times before it came further than step {step}; the last: {text}"
        return JobOutcome("parked", reason, error, is_lost=True)
    return JobOutcome("starting", text, error, is_lost=True)


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


def _returned(ends: Sequence[End], requested: str) -> JobOutcome:
    answer = ends[0].answer
    outcome = answer.value if answer is not None else None
    if not isinstance(outcome, TrainingOutcome):
        return JobOutcome("finished", "")
    if outcome.reason == "diverged":
        return JobOutcome("failed", outcome.message, ErrorRecord("Diverged", outcome.message))
    if outcome.reason == "finished":
        return JobOutcome("finished", "", None, outcome)
    return JobOutcome(
        _BECOMES.get(requested, "stopped"), _WHY.get(requested, "stopped"), None, outcome
    )


def _is_lost(ends: Sequence[End]) -> bool:
    """Whether ranks were lost, and none raised for a reason of its own before.

    So is one that was interrupted, where nothing was requested and no other had failed: somebody
    outside did that. And so are those that never began, where no other has failed.
    """
    if any(end.death and not end.is_killed for end in ends):
        return True
    answers = [end.answer for end in ends if end.answer]
    kinds = {answer.error[0] for answer in answers if answer.kind == "raised"}
    interrupted = any(answer.kind == "interrupted" for answer in answers)
    have_not_begun = len(answers) < len(ends)
    return kinds <= _LOST and bool(kinds or interrupted or have_not_begun)


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
