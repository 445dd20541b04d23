"""What a job asks of engines, which of them meet it, and what would fit where none do."""

from collections.abc import Sequence
from math import inf

from workbench.scheduler.backfill import engines_of
from workbench.store.record import EngineRecord, JobRecord, Request


def eligible(request: Request, engines: Sequence[EngineRecord]) -> int:
    """The set of engines that a job may have, in whatever state they are now.

    The assistant is for jobs that name its place.
    """
    return engines_of(
        each.index
        for each in engines
        if _meets(request, each)
        and (not each.is_assistant if request.places is None else each.index in request.places)
    )


def refusal(request: Request, engines: Sequence[EngineRecord]) -> str | None:
    """Why a job can never run on these engines, and what would fit; None where it can.

    Engines that died count: others take their places.
    """
    need, possible = request.sizes[0], eligible(request, engines).bit_count()
    if possible >= need:
        return None
    wanted = f"{request.name!r} needs {number(need)}{wish(request)}"
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
    if not wish(request):
        return f"{wanted}, and this cluster has none"
    kinds = sorted({each.kind for each in common})
    largest = max((each.memory_bytes for each in common), default=0)
    return (
        f"{wanted}, and none is such: there are {number(len(common))} of {' and '.join(kinds)}, "
        f"of which the largest has {_size(largest)}"
    )


def wish(request: Request) -> str:
    """What is asked of each engine, ' with cuda and 16 GiB', or ''."""
    memory = _size(request.memory_bytes) if request.memory_bytes else ""
    said = " and ".join(filter(None, [request.device or "", memory]))
    return f" with {said}" if said else ""


def number(engines: int) -> str:
    """'1 engine', '2 engines'."""
    return f"{engines} engine{'s' * (engines != 1)}"


def length(job: JobRecord, ranks: int, now: float) -> float:
    """Predicted seconds until a job ends, with so many ranks; infinite where nobody knows.

    The work is that of `engines` ranks, shared equally by those that there are. What is done is
    known by its steps, so that no change of the clock matters; of a call, by the clock.
    """
    if job.seconds is None:
        return inf
    whole = job.seconds * job.engines / ranks
    if job.steps:
        return whole * max(0.0, 1 - job.step / job.steps)
    return whole if job.began_at is None else max(0.0, whole - (now - job.began_at))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.3g} MiB"


def _meets(request: Request, engine: EngineRecord) -> bool:
    return (request.device in (None, engine.kind)) and (
        request.memory_bytes is None or request.memory_bytes <= engine.memory_bytes
    )
