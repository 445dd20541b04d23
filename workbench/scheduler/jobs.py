"""What one job asks of the scheduler: its place in the queue, the engines that fit, its length."""

from collections.abc import Sequence
from math import inf

from workbench.plan.io.units import size
from workbench.scheduler.backfill import engines_of
from workbench.store.record import EngineRecord, JobRecord, Request

LEVEL_S = 6 * 3600.0  # a job waits for so long to rise by one level of priority
# Long jobs go before shorter ones of the same priority that came this much before them, in their
# own lengths, so that they do not run alone at last; the gaps that they leave are for the others.
HEAD_START = 2.0
LONGEST_S = 2 * 3600.0  # what is longer has no more of it: it is worth less than a level


def eligible(request: Request, engines: Sequence[EngineRecord]) -> int:
    """Returns the set of engines that a job may have, in whatever state they are now.

    The assistant is for jobs that name its place.
    """
    return engines_of(
        each.index
        for each in engines
        if _meets(request, each)
        and (not each.is_assistant if request.places is None else each.index in request.places)
    )


def refusal(request: Request, engines: Sequence[EngineRecord]) -> str | None:
    """Returns why a job can never run on these engines, and what would fit; None where it can.

    Engines that died count: others take their places.
    """
    need, possible = request.engines, eligible(request, engines).bit_count()
    if possible >= need:
        return None
    wanted = f"{request.name!r} needs {number(need)}{requirements(request)}"
    common = [each for each in engines if not each.is_assistant]
    if request.places is not None:
        known = {each.index: each for each in engines}
        wrong = [place for place in request.places if place not in known]
        if wrong:
            there = ", ".join(map(str, known))
            return f"{wanted}, at places {request.places}: there is no {wrong}, but {there}"
        short = [place for place in request.places if not _meets(request, known[place])]
        return f"{wanted}, at places {request.places}, and {short} are not such; others would fit"
    if possible:
        return f"{wanted}, and {possible} of {len(common)} are such: at most {possible} would fit"
    if not requirements(request):
        return f"{wanted}, and this cluster has none"
    kinds = sorted({each.kind for each in common})
    largest = max((each.memory_bytes for each in common), default=0)
    return (
        f"{wanted}, and none is such: there are {number(len(common))} of {' and '.join(kinds)}, "
        f"of which the largest has {size(largest)}"
    )


def requirements(request: Request) -> str:
    """Returns what is asked of each engine, ' with cuda and 16 GiB', or ''."""
    memory = size(request.memory_bytes) if request.memory_bytes else ""
    said = " and ".join(filter(None, [request.device or "", memory]))
    return f" with {said}" if said else ""


def number(engines: int) -> str:
    """Returns '1 engine', '2 engines'."""
    return f"{engines} engine{'s' * (engines != 1)}"


def length(job: JobRecord, now: float) -> float:
    """Returns the predicted seconds until a job ends; infinite if unknown.

    Progress is counted in steps, so that no change of the clock matters; of a call, by the clock.
    """
    if job.seconds is None:
        return inf
    if job.steps:
        return job.seconds * max(0.0, 1 - job.step / job.steps)
    return job.seconds if job.began_at is None else max(0.0, job.seconds - (now - job.began_at))


def _meets(request: Request, engine: EngineRecord) -> bool:
    return (request.device in (None, engine.kind)) and (
        request.memory_bytes is None or request.memory_bytes <= engine.memory_bytes
    )


def rank(priority: int, since: float, seconds: float | None) -> float:
    """Returns the place of a job in the queue; least goes first.

    It does not depend on the time, because all that wait rise alike. So no job waits for ever
    behind others: those that come later than levels and head start allow go behind it.

    Args:
        priority: the priority; higher goes first.
        since: when it was submitted [seconds], later by the time for which it ran already.
        seconds: the predicted length; None or infinite counts as a short job's.
    """
    length = min(seconds, LONGEST_S) if seconds is not None and seconds < float("inf") else 0.0
    return since - priority * LEVEL_S - HEAD_START * length


def order(job: JobRecord, now: float) -> tuple[float, int]:
    """Returns the key by which jobs go: `rank`, then the order in which they were submitted.

    A job that runs is where it would be if it were queued again now: its time with engines is no
    time of waiting.
    """
    ran_s = job.ran_s + (0.0 if job.began_at is None else max(0.0, now - job.began_at))
    return rank(job.priority, job.submitted_at + ran_s, job.seconds), job.id
