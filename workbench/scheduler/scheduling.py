"""Which job gets which engines now, and why the others wait.

A call under a lease has no engines of its own, but some of the lease's, in turn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from workbench.scheduler import reasons
from workbench.scheduler.backfill import (
    EngineRelease,
    WaitingJob,
    engines_of,
    indices_of,
    place,
)
from workbench.scheduler.jobs import eligible, length, order, refusal
from workbench.scheduler.preemption import preempt
from workbench.store.record import ACTIVE, EngineRecord, JobRecord

Places = tuple[int, ...]

REPLACED_S = 5.0  # until an engine that died, or starts, is there
LEAVING_S = 2.0  # until a job that was asked to stop has


@dataclass(frozen=True)
class Decisions:
    """What is to be done now.

    Attributes:
        starts: (job, the engine of each of its ranks), to be claimed in this order.
        preempt: the jobs that are to leave a checkpoint and be queued again.
        reasons: why each queued job starts or waits, and why each other one is pre-empted.
    """

    starts: tuple[tuple[int, Places], ...]
    preempt: tuple[int, ...]
    reasons: Mapping[int, str]


def schedule(jobs: Sequence[JobRecord], engines: Sequence[EngineRecord], now: float) -> Decisions:
    """Gives the engines that are free to jobs that wait.

    Jobs go by priority, which rises while they wait (`order`), each with all of its engines at
    once, shorter ones in gaps that they fit in (`backfill`). Where a job still waits, lesser ones
    are pre-empted for it (`preemption`).

    Args:
        jobs: the jobs that have not ended, those that hold engines too.
        now: the time, in seconds since the epoch.
    """
    by_id = {job.id: job for job in jobs}
    running = [job for job in jobs if job.held and job.lease is None]
    queued = sorted((job for job in jobs if job.state == "queued"), key=lambda job: order(job, now))
    eligibles = _eligibles(queued, engines)
    free = engines_of(each.index for each in engines if each.state == "idle" and each.job is None)
    free &= ~engines_of(place for job in running for place in job.held)
    ends = _ends(running, engines, now)
    waiting, refused = [], {}
    for job in queued:
        possible = eligibles[job.id]
        if job.lease is None and possible.bit_count() < job.engines:
            refused[job.id] = refusal(job, engines) or ""
        elif job.lease is None:
            waiting.append(WaitingJob(job.id, possible, job.engines, length(job, now)))
    placed = place(waiting, free, ends, now, _preference(engines))
    started = {each.id for each, _ in placed.starts}
    blocked = [each for each in waiting if each.id not in started]
    preempted = preempt(placed, by_id, running, now)
    under_leases, unused_leases = leased(queued, jobs)
    common = engines_of(each.index for each in engines if not each.is_assistant)
    places = {each.id: indices_of(own) for each, own in placed.starts} | under_leases
    said = (
        reasons.of_starts(places, waiting, placed)
        | reasons.of_waiting(blocked, by_id, placed, preempted, common, placed.free)
        | reasons.of_preempted(preempted, by_id)
    )
    return Decisions(
        starts=tuple(places.items()),
        preempt=tuple(preempted.preempt),
        reasons=said | refused | unused_leases,
    )


def _eligibles(jobs: Sequence[JobRecord], engines: Sequence[EngineRecord]) -> dict[int, int]:
    """Returns for each job the engines that it may have; equal sets are one object."""
    sets: dict[object, int] = {}
    found = {}
    for job in jobs:
        asked = job.places, job.device, job.memory_bytes
        if asked not in sets:
            sets[asked] = eligible(job, engines)
        found[job.id] = sets[asked]
    return found


def _ends(
    running: Sequence[JobRecord], engines: Sequence[EngineRecord], now: float
) -> list[EngineRelease]:
    """Returns when engines that are in use, or not there, are expected to be free.

    A job of unknown length is believed to go on for as long as it has.
    """
    ends = []
    for job in running:
        left = LEAVING_S if job.state == "stopping" else length(job, now)
        if left == inf:
            left = LEAVING_S if job.began_at is None else max(LEAVING_S, now - job.began_at)
        ends.append(EngineRelease(now + left, job.id, engines_of(job.held)))
    held = engines_of(place for job in running for place in job.held)
    missing = engines_of(each.index for each in engines if each.state in ("dead", "starting"))
    if missing & ~held:
        ends.append(EngineRelease(now + REPLACED_S, 0, missing & ~held))
    return sorted(ends)


def _preference(engines: Sequence[EngineRecord]) -> tuple[int, ...]:
    """Returns sets of engines, those of little use to others first: without GPU, less memory."""
    kinds: dict[tuple[bool, int], list[int]] = {}
    for each in engines:
        kinds.setdefault((each.kind == "cuda", each.memory_bytes), []).append(each.index)
    return tuple(engines_of(kinds[kind]) for kind in sorted(kinds)) if len(kinds) > 1 else ()


def leased(
    queued: Sequence[JobRecord], jobs: Sequence[JobRecord]
) -> tuple[dict[int, tuple[int, ...]], dict[int, str]]:
    """Decides which calls under leases start now.

    Args:
        queued: the jobs that wait, the first to be served first; others than such calls are
            skipped.

    Returns:
        (for each that starts, its places; for each that waits, why).
    """
    leases = {job.id: job for job in jobs if job.kind == "lease" and job.held}
    users = {
        (job.lease, place): job.id
        for job in jobs
        if job.lease is not None and job.state in ACTIVE
        for place in job.held
    }
    starts: dict[int, tuple[int, ...]] = {}
    reasons: dict[int, str] = {}
    for job in queued:
        if job.lease is None:
            continue
        if (lease := leases.get(job.lease)) is None:
            reasons[job.id] = f"waits for the engines of lease {job.lease}"
            continue
        free = [place for place in lease.held if (lease.id, place) not in users]
        places = job.places or tuple(free[: job.engines])
        if foreign := sorted(set(places) - set(lease.held)):
            reasons[job.id] = f"lease {lease.id} has engines {lease.held}, and not {foreign}"
        elif len(places) < job.engines or not set(places) <= set(free):
            others = sorted({users[key] for key in users if key[0] == lease.id})
            reasons[job.id] = (
                f"waits for engines of lease {lease.id} that job {', '.join(map(str, others))} uses"
                if others
                else f"lease {lease.id} has {len(lease.held)} engines, and not {job.engines}"
            )
        else:
            starts[job.id] = places
            users |= {(lease.id, place): job.id for place in places}
    return starts, reasons
