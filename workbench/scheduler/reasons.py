"""Why jobs start, wait or are changed, as people want to be told."""

from collections.abc import Collection, Mapping, Sequence

from workbench.scheduler.backfill import Placed, Waiting, engines_of, indices_of
from workbench.scheduler.preemption import Room
from workbench.scheduler.requirements import number, wish
from workbench.store.record import JobRecord


def of_starts(
    places: Mapping[int, Collection[int]], waiting: Sequence[Waiting], placed: Placed
) -> dict[int, str]:
    """For each job that starts: its turn has come, or it fits in before one that waits."""
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
    waiting: Sequence[Waiting],
    jobs: Mapping[int, JobRecord],
    placed: Placed,
    room: Room,
    common: int,
    free: int,
    starts: Mapping[int, float],
    now: float,
) -> dict[int, str]:
    """For each job that waits: for what, and until when.

    Args:
        waiting: jobs, the first to be served first.
        jobs: by number.
        placed: with the reservations of the first ones.
        room: what others do for them.
        common: engines that a job without any wish may have.
        free: engines in no use.
        starts: when they are expected to start.
        now: the time.
    """
    reserved = {each.job.id: each for each in placed.reservations}
    holders = [job for job in jobs.values() if job.held and job.lease is None]
    first, found = next(iter(reserved), None), {}
    for each in waiting:
        parts = [_missing(each, jobs[each.id], common, free, holders)]
        after = reserved[each.id].after if each.id in reserved else None
        if each.id in starts:
            parts.append(f"expected in {span(starts[each.id] - now)}")
        if givers := room.givers.get(each.id):
            parts.append(f"{_jobs(givers)} make{'s' * (len(givers) == 1)} room for it")
        elif after is not None and each.id in starts:
            parts[-1] += f", when {_end_of(after)}"
        elif after is not None:
            parts.append(f"starts when {_end_of(after)}")
        elif first not in (None, each.id):
            parts.append(f"job {first} comes first")
        found[each.id] = "; ".join(parts)
    return found


def of_changes(room: Room, jobs: Mapping[int, JobRecord]) -> dict[int, str]:
    """For each running job that is to change: why."""
    served = {giver: job for job, givers in room.givers.items() for giver in givers}
    return (
        {
            job: f"goes on with {number(kept.bit_count())}, so that job {served[job]} can start"
            for job, kept in room.shrink.items()
        }
        | {
            job: f"goes on with {number(own.bit_count())}: nobody waits for more"
            for job, own in room.grow.items()
        }
        | {
            job: f"leaves a checkpoint for job {other}, of priority {jobs[other].priority}"
            for job, other in room.preempt.items()
        }
    )


def span(seconds: float) -> str:
    """'a moment', '40 s', '3 min', '2.5 h': coarse, so that it does not change all the time."""
    if seconds < 5:
        return "a moment"
    if seconds < 90:
        return f"{10 * max(1, round(seconds / 10))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _missing(
    each: Waiting, job: JobRecord, common: int, free: int, holders: Sequence[JobRecord]
) -> str:
    """'waits for 2 engines with cuda; 1 is free', 'waits for engine 2, which job 4 has'."""
    taken = each.eligible & ~free
    if job.places is None or not taken:
        count = (free & each.eligible).bit_count()
        shown = f"{count} {'is' if count == 1 else 'are'} free" if count else "none is free"
        such = wish(job) if common & ~each.eligible else ""  # else every engine is such
        return f"waits for {number(each.need)}{such}; {shown}"
    having = [other.id for other in holders if engines_of(other.held) & taken]
    places = ", ".join(map(str, indices_of(taken)))
    text = f"waits for engine{'s' * (taken.bit_count() != 1)} {places}"
    return text + (f", which {_jobs(having)} ha{'s' if len(having) == 1 else 've'}" * bool(having))


def _end_of(job: int) -> str:
    return f"job {job} ends" if job else "engines were replaced"


def _jobs(ids: Sequence[int]) -> str:
    return f"job{'s' * (len(ids) > 1)} {', '.join(map(str, ids))}"
