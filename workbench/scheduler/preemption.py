"""Engines for jobs that wait, freed by others: by those that can do with fewer, and lesser ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from workbench.scheduler.backfill import Placed, WaitingJob, choose, engines_of
from workbench.scheduler.jobs import length, order
from workbench.store.record import JobRecord

WORTH_S = 10.0  # a change of ranks, or a checkpoint, is made for no less than that


@dataclass
class Reallocation:
    """The engines that running jobs shall free and get.

    Attributes:
        shrink: the engines that each job keeps that is to go on with fewer.
        grow: the engines of each job that is to go on with more.
        preempt: the job for which each pre-empted one leaves a checkpoint and its engines.
        donors: the jobs that free engines for each job that waits.
    """

    shrink: dict[int, int] = field(default_factory=dict)
    grow: dict[int, int] = field(default_factory=dict)
    preempt: dict[int, int] = field(default_factory=dict)
    donors: dict[int, tuple[int, ...]] = field(default_factory=dict)


def reallocate(
    placed: Placed, jobs: Mapping[int, JobRecord], running: Sequence[JobRecord], now: float
) -> Reallocation:
    """Has running jobs give engines to the first ones that wait, where that is enough for them.

    Elastic jobs of no higher priority shrink first. Then jobs of lower priority, that would also
    be behind in the queue, are pre-empted: so no two jobs ever pre-empt each other in turn.

    Args:
        placed: the jobs that start, and those that wait with a reservation.
        jobs: the jobs by number.
        running: the jobs that hold engines.
        now: the time, in seconds since the epoch.
    """
    changes = Reallocation()
    free = placed.free
    leaving = engines_of(place for job in running if job.state == "stopping" for place in job.held)
    for reservation in placed.reservations:
        waiting, job = reservation.job, jobs[reservation.job.id]
        coming = (free | leaving) & waiting.eligible
        missing = waiting.need - coming.bit_count()
        if missing > 0 and reservation.time - now > WORTH_S:
            given = _given(waiting, job, missing, running, changes, now)
            for donor, kept in given.items():
                if kept:
                    changes.shrink[donor] = kept
                else:
                    changes.preempt[donor] = job.id
            changes.donors[job.id] = tuple(given)
        free, leaving = free & ~waiting.eligible, leaving & ~waiting.eligible
    return changes


def _given(
    waiting: WaitingJob,
    job: JobRecord,
    missing: int,
    running: Sequence[JobRecord],
    changes: Reallocation,
    now: float,
) -> dict[int, int]:
    """Returns what each job keeps that frees engines; {} where all would not be enough."""
    given: dict[int, int] = {}
    freed: dict[int, int] = {}

    def take(other: JobRecord, kept: int) -> None:
        given[other.id] = kept
        freed[other.id] = (engines_of(other.held) & ~kept & waiting.eligible).bit_count()

    able = [
        other
        for other in running
        if other.state == "running"
        and other.kind == "train"
        and other.id not in (changes.shrink | changes.preempt)
        and engines_of(other.held) & waiting.eligible
    ]
    able.sort(key=lambda other: (other.priority, -order(other, now)[0]))
    for other in able:
        if (wanted := missing - sum(freed.values())) > 0 and other.priority <= job.priority:
            held = engines_of(other.held)
            smaller = [size for size in other.sizes if size < len(other.held)]
            enough = [size for size in smaller if len(other.held) - size >= wanted]
            if smaller:
                take(other, choose(held, max(enough, default=smaller[0]), [~waiting.eligible]))
    for other in able:
        behind = other.priority < job.priority and order(other, now) > order(job, now)
        if missing > sum(freed.values()) and behind and other.preemptible:
            take(other, 0)
    if missing > sum(freed.values()):
        return {}
    for each in list(given):  # those that came first may not be needed any more
        if sum(freed.values()) - freed[each] >= missing:
            del given[each], freed[each]
    return given


def grow(
    changes: Reallocation,
    free: int,
    running: Sequence[JobRecord],
    eligible: Mapping[int, int],
    now: float,
) -> None:
    """Has elastic jobs take engines that are of no use to others.

    Args:
        changes: the changes so far, to which this adds.
        free: the set of engines that nobody who waits could have.
        running: the jobs that hold engines.
        eligible: the set of engines that each job may have.
        now: the time, in seconds since the epoch.
    """
    for other in sorted(running, key=lambda other: order(other, now)):
        held, free_for = len(other.held), free & eligible[other.id]
        larger = [n for n in other.sizes if held < n <= held + free_for.bit_count()]
        is_worth_it = length(other, held, now) > WORTH_S
        if larger and is_worth_it and other.state == "running" and other.id not in changes.shrink:
            more = choose(free_for, larger[-1] - held)
            changes.grow[other.id] = engines_of(other.held) | more
            free &= ~more
