"""Which of the jobs that wait goes first."""

from workbench.store.record import JobRecord

LEVEL_S = 6 * 3600.0  # a job waits for so long to rise by one level of priority
# Long jobs go before shorter ones of the same priority that came this much before them, in their
# own lengths, so that they do not run alone at last; the gaps that they leave are for the others.
HEAD_START = 2.0
LONGEST_S = 2 * 3600.0  # what is longer has no more of it: it is worth less than a level


def rank(priority: int, since: float, seconds: float | None) -> float:
    """The place of a job in the queue; least goes first.

    It does not depend on the time, because all that wait rise alike. So no job waits for ever
    behind others: those that come later than levels and head start allow go behind it.

    Args:
        priority: higher goes first.
        since: when it was submitted, later by the time for which it ran already.
        seconds: predicted length; None or infinite: as of a short job.
    """
    length = min(seconds, LONGEST_S) if seconds is not None and seconds < float("inf") else 0.0
    return since - priority * LEVEL_S - HEAD_START * length


def order(job: JobRecord, now: float) -> tuple[float, int]:
    """By `rank`; of two that are alike, the one that was submitted first.

    A job that runs is where it would be if it were queued again now: its time with engines is no
    time of waiting.
    """
    ran_s = job.ran_s + (0.0 if job.began_at is None else max(0.0, now - job.began_at))
    return rank(job.priority, job.submitted_at + ran_s, job.seconds), job.id
