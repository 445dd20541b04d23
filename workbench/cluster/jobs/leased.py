"""Calls under a lease: they have no engines of their own, but some of the lease's, in turn."""

from collections.abc import Sequence

from workbench.cluster.jobs.record import ACTIVE, JobRecord


def leased(
    queued: Sequence[JobRecord], jobs: Sequence[JobRecord]
) -> tuple[dict[int, tuple[int, ...]], dict[int, str]]:
    """Which calls under leases start now.

    Args:
        queued: jobs that wait, the first to be served first; others than such calls are skipped.
        jobs: all that have not ended.

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
