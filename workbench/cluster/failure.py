"""Which of several failures came first, and one text that tells it."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from workbench.cluster.answer import Answer
from workbench.cluster.errors import EngineDied, RankError, RunError


@dataclass(frozen=True)
class End:
    """How one rank ended.

    Attributes:
        rank: its number.
        pid: its process.
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
    Exceptions are ordered by the clock, which ranks on one host share. Ranks that only
    ended because they were interrupted, after another had failed, are not failures.
    """
    died = [end for end in ends if end.death and not end.is_killed]
    raised = [end for end in ends if end.answer and end.answer.kind == "raised"]
    raised.sort(key=lambda end: end.answer.time if end.answer else 0.0)
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
