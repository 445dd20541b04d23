"""Jobs of lower priority that leave a checkpoint and their engines to jobs that wait."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from workbench.scheduler.backfill import Placed, WaitingJob, engines_of
from workbench.scheduler.jobs import order
from workbench.store.record import JobRecord

WORTH_S = 10.0  # what is free that soon is not worth a checkpoint


@dataclass
class Preemption:
    """Who makes room for whom.

    Attributes:
        preempt: the job for which each pre-empted one leaves a checkpoint and its engines.
    """

    preempt: dict[int, int] = field(default_factory=dict)
    donors: dict[int, tuple[int, ...]] = field(default_factory=dict)


def preempt(
    placed: Placed, jobs: Mapping[int, JobRecord], running: Sequence[JobRecord], now: float
) -> Preemption:
    """Has running jobs give engines to the first ones that wait, where that is enough for them.

    Pre-empted are jobs of lower priority that would also be behind in the queue: so no two jobs
    ever pre-empt each other in turn.

    Args:
        placed: the jobs that start, and those that wait with a reservation.
        now: the time, in seconds since the epoch.
    """
    result = Preemption()
    free = placed.free
    leaving = engines_of(place for job in running if job.state == "stopping" for place in job.held)
    for reservation in placed.reservations:
        waiting, job = reservation.job, jobs[reservation.job.id]
        missing = waiting.need - ((free | leaving) & waiting.eligible).bit_count()
        if missing > 0 and reservation.time - now > WORTH_S:
            able = [other for other in running if other.id not in result.preempt]
            donors = _donors(waiting, job, missing, able, now)
            result.preempt |= dict.fromkeys(donors, job.id)
            result.donors[job.id] = tuple(donors)
        free, leaving = free & ~waiting.eligible, leaving & ~waiting.eligible
    return result


def _donors(
    waiting: WaitingJob, job: JobRecord, missing: int, running: Sequence[JobRecord], now: float
) -> list[int]:
    """Returns the jobs that make room; none where all would not be enough."""
    freed: dict[int, int] = {}
    for other in sorted(running, key=lambda other: (other.priority, -order(other, now)[0])):
        is_lesser = other.priority < job.priority and order(other, now) > order(job, now)
        engines = engines_of(other.held) & waiting.eligible
        if other.state != "running" or other.kind != "train" or not other.preemptible:
            continue
        if missing > sum(freed.values()) and is_lesser and engines:
            freed[other.id] = engines.bit_count()
    if missing > sum(freed.values()):
        return []
    for each in list(freed):  # those that came first may not be needed any more
        if sum(freed.values()) - freed[each] >= missing:
            del freed[each]
    return list(freed)
