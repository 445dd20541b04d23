"""Gangs on engines, in the order of the queue, and shorter ones in the gaps before them.

EASY backfilling (Lifka, "The ANL/IBM SP scheduling system", 1995): jobs start in order until one
does not fit. For that one a time is reserved at which enough engines will be free, and those
behind it start now if that delays it in no way: they end before, or use engines that it leaves.
Here jobs may ask for different engines, so there is a reservation for each kind of request.

Sets of engines are whole numbers, one bit for each: 1,024 engines are compared in one operation.
"""

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

DEPTH = 1000  # waiting jobs that are looked at


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """A job that wants engines.

    Attributes:
        seconds: the predicted seconds with so many engines; infinite where nobody knows.
    """

    id: int
    eligible: int
    need: int
    seconds: float


@dataclass(frozen=True, slots=True, order=True)
class EngineRelease:
    """Engines that are expected to become free.

    Attributes:
        time: when they become free, in seconds.
        job: the number of the job that has them until then; 0: none, they are being replaced.
    """

    time: float
    job: int
    engines: int = field(compare=False)


@dataclass(slots=True)
class Reservation:
    """The time at which a job that waits can start.

    Attributes:
        time: when enough engines are free, if none of them is taken for longer.
        after: the job that ends then, as in `EngineRelease.job`; None: none that is known of.
    """

    job: WaitingJob
    time: float
    engines: int
    spare: int
    after: int | None

    def permits(self, engines: int, until: float) -> bool:
        """Returns whether these engines can be taken until then."""
        return until <= self.time or (engines & self.engines).bit_count() <= self.spare

    def takeable(self, possible: int) -> int:
        """Returns how many of the engines that are possible can be taken for ever."""
        return self.spare + (possible & ~self.engines).bit_count()

    def take(self, engines: int, until: float) -> None:
        """Notes that they were."""
        if until > self.time:
            self.spare -= (engines & self.engines).bit_count()
            self.engines &= ~engines


@dataclass(frozen=True, slots=True)
class Placed:
    """What can start now.

    Attributes:
        starts: the jobs that start, each with its set of engines.
    """

    starts: list[tuple[WaitingJob, int]]
    reservations: list[Reservation]
    free: int


def place(
    queue: Iterable[WaitingJob],
    free: int,
    ends: Sequence[EngineRelease],
    now: float,
    preference: Sequence[int] = (),
    depth: int = DEPTH,
) -> Placed:
    """Decides which jobs start now, and on which engines.

    Args:
        queue: the jobs that wait, the first to be served first.
        ends: the engines in use, by the time when they become free.
        now: the time, in seconds.
        preference: the sets of engines in the order in which they are to be used; none for no
            preference.
        depth: the number of jobs of the queue that are looked at.
    """
    ends, starts = list(ends), []
    reservations: list[Reservation] = []
    waited_for = reserved = 0  # engines that a job with a reservation asks for, and will have
    eligible = None  # what the next four are for: neighbours in a queue mostly ask for the same
    possible = count = 0
    limits: list[tuple[float, int]] = []
    is_waited_for = False
    for job in islice(queue, depth):
        if job.eligible is not eligible:
            eligible, possible = job.eligible, free & job.eligible
            count = possible.bit_count()
            limits = [(each.time, each.takeable(possible)) for each in reservations]
            is_waited_for = not eligible & ~waited_for
        if job.need > count:
            if not is_waited_for:
                reservations.append(reserve(job, free, ends, now))
                waited_for |= job.eligible
                reserved |= reservations[-1].engines
                eligible = None
            continue
        until = now + job.seconds
        for time, most in limits:
            if until > time and job.need > most:
                break
        else:
            engines = choose(possible, job.need, (possible & ~reserved,), preference)
            if not all(each.permits(engines, until) for each in reservations):
                continue
            for each in reservations:
                each.take(engines, until)
            starts.append((job, engines))
            free &= ~engines
            eligible = None
            insort(ends, EngineRelease(until, job.id, engines))
        if not free and waited_for:
            break
    return Placed(starts, reservations, free)


def reserve(job: WaitingJob, free: int, ends: Sequence[EngineRelease], now: float) -> Reservation:
    """Returns when enough engines are free for a job, as far as is known."""
    engines, time, after = free & job.eligible, now, None
    for end in ends:
        if engines.bit_count() >= job.need:
            break
        if end.engines & job.eligible:
            engines |= end.engines & job.eligible
            time, after = max(end.time, now), end.job
    spare = engines.bit_count() - job.need
    if spare < 0:
        return Reservation(job, float("inf"), engines, 0, None)
    return Reservation(job, time, engines, spare, after)


def choose(possible: int, count: int, *preferences: Sequence[int]) -> int:
    """Returns `count` of the engines, by preferences of which the first counts most.

    Args:
        possible: the set to choose from, of at least `count` engines.
        preferences: the preferences: each a sequence of sets, in the order in which they are to be
            used.
    """
    if not preferences:
        chosen = 0
        for bit in islice(_bits(possible), count):
            chosen |= bit
        return chosen
    chosen, rest = 0, possible
    for among in (*preferences[0], possible):
        some = rest & among
        if wanted := min(count - chosen.bit_count(), some.bit_count()):
            chosen |= some if wanted == some.bit_count() else choose(some, wanted, *preferences[1:])
            rest &= ~some
    return chosen


def engines_of(indices: Iterable[int]) -> int:
    """Returns a set of engines as one number."""
    engines = 0
    for index in indices:
        engines |= 1 << index
    return engines


def indices_of(engines: int) -> tuple[int, ...]:
    """Returns the engines in a set, in rising order."""
    return tuple(bit.bit_length() - 1 for bit in _bits(engines))


def _bits(engines: int) -> Iterator[int]:
    while engines:
        bit = engines & -engines
        yield bit
        engines ^= bit
