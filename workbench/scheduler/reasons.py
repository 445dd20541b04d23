"""Why jobs start, wait or are changed, as people want to be told."""

from collections.abc import Collection, Mapping, Sequence

from workbench.scheduler.backfill import Placed, WaitingJob, engines_of, indices_of
from workbench.scheduler.jobs import number, requirements
from workbench.scheduler.preemption import Preemption
from workbench.store.record import JobRecord


def of_starts(
    places: Mapping[int, Collection[int]], waiting: Sequence[WaitingJob], placed: Placed
) -> dict[int, str]:
    """Returns why each job starts: its turn has come, or it fits in before one that waits."""
    before: dict[int, int | None] = {}
    first = None
    for each in waiting:  # in order
        if first is None and each.id not in places:
            first = each.id
        before[each.id] = first
    found = {}
    for job, own in places.items():
        text = f"starts on engine{'s' * (len(own) != 1)} {', '.join(map(str, own))}"
        if (earlier := before.get(job)) is not None:
            text += f"; job {earlier}, which waits for more, is not delayed by it"
        found[job] = text
    return found


def of_waiting(
    waiting: Sequence[WaitingJob],
    jobs: Mapping[int, JobRecord],
    placed: Placed,
    changes: Preemption,
    common: int,
    free: int,
) -> dict[int, str]:
    """Returns for what each job waits.

    Args:
        waiting: the jobs that wait, the first to be served first.
        placed: the jobs that start, and the reservations of the first ones that wait.
        common: the set of engines that a job without requirements may have.
    """
    reserved = {each.job.id: each for each in placed.reservations}
    holders = [job for job in jobs.values() if job.held and job.lease is None]
    first, found = next(iter(reserved), None), {}
    for each in waiting:
        parts = [_missing(each, jobs[each.id], common, free, holders)]
        after = reserved[each.id].after if each.id in reserved else None
        if donors := changes.donors.get(each.id):
            parts.append(f"{_jobs(donors)} make{'s' * (len(donors) == 1)} room for it")
        elif after is not None:
            parts.append(f"starts when {_end_of(after)}")
        elif first not in (None, each.id):
            parts.append(f"job {first} comes first")
        found[each.id] = "; ".join(parts)
    return found


def of_preempted(changes: Preemption, jobs: Mapping[int, JobRecord]) -> dict[int, str]:
    """Returns why each running job is pre-empted."""
    return {
        job: f"leaves a checkpoint for job {other}, of priority {jobs[other].priority}"
        for job, other in changes.preempt.items()
    }


def _missing(
    each: WaitingJob, job: JobRecord, common: int, free: int, holders: Sequence[JobRecord]
) -> str:
    """Returns 'waits for 2 engines with cuda; 1 is free', 'waits for engine 2, which job 4 has'."""
    taken = each.eligible & ~free
    if job.places is None or not taken:
        count = (free & each.eligible).bit_count()
        shown = f"{count} {'is' if count == 1 else 'are'} free" if count else "none is free"
        such = requirements(job) if common & ~each.eligible else ""  # else every engine is such
        return f"waits for {number(each.need)}{such}; {shown}"
    having = [other.id for other in holders if engines_of(other.held) & taken]
    places = ", ".join(map(str, indices_of(taken)))
    text = f"waits for engine{'s' * (taken.bit_count() != 1)} {places}"
    return text + (f", which {_jobs(having)} ha{'s' if len(having) == 1 else 've'}" * bool(having))


def _end_of(job: int) -> str:
    return f"job {job} ends" if job else "engines were replaced"


def _jobs(ids: Sequence[int]) -> str:
    return f"job{'s' * (len(ids) > 1)} {', '.join(map(str, ids))}"
