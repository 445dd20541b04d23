"""Which of the jobs that wait goes first."""

from workbench.cluster.jobs.record import JobRecord

LEVEL_S = 600.0  # a job waits for so long to rise by one level of priority
HEAD_START = 2.0  # times its length: that long jobs have, so that they do not run alone at last
LONGEST_S = 86_400.0


def rank(priority: int, submitted_at: float, seconds: float | None) -> float:
    """The place of a job in the queue; least goes first.

    It does not depend on the time, because all that wait rise alike. So no job waits for ever
    behind others: those that come later than the head start, and the levels, allow go behind it.

    Args:
        priority: higher goes first.
        submitted_at: in seconds.
        seconds: predicted length; None or infinite: as of a short job.
    """
    length = min(seconds, LONGEST_S) if seconds is not None and seconds < float("inf") else 0.0
    return submitted_at - priority * LEVEL_S - HEAD_START * length


def order(job: JobRecord) -> tuple[float, int]:
    """By `rank`; of two that are alike, the one that was submitted first."""
    return rank(job.priority, job.submitted_at, job.seconds), job.id
