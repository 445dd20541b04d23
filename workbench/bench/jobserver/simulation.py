"""A queue that is simulated with the scheduler and a virtual clock, against a lower bound."""

import heapq
import random
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from workbench.scheduler.backfill import EngineRelease, WaitingJob, place
from workbench.scheduler.jobs import rank


@dataclass(frozen=True, slots=True)
class Load:
    """A job of a simulation.

    Attributes:
        arrival: the time of its submission, in seconds.
        engines: the number of engines that it needs.
        seconds: the seconds that it takes.
        predicted: the seconds that the scheduler predicts for it.
    """

    arrival: float
    engines: int
    seconds: float
    predicted: float


@dataclass(frozen=True)
class Simulated:
    """The result of a simulation.

    Attributes:
        makespan: the seconds from the first arrival until all jobs have ended.
        bound: the lower bound of the makespan, in seconds, for any schedule.
        starts: the time at which each job began, in the order of the loads.
    """

    makespan: float
    bound: float
    starts: tuple[float, ...]

    @property
    def efficiency(self) -> float:
        """Engine-seconds of the bound over those of the schedule; at most 1.

        The optimal schedule itself is not known, and may be worse than the bound.
        """
        return self.bound / self.makespan


def simulate(loads: Sequence[Load], num_engines: int) -> Simulated:
    """Simulates jobs of one priority with `place`, in `rank`'s order, on equal engines.

    Raises:
        ValueError: there is no job, or one that never fits.
    """
    if not loads or max(load.engines for load in loads) > num_engines:
        raise ValueError(f"loads of 1 to {num_engines} engines are needed")
    arrivals = sorted(range(len(loads)), key=lambda each: loads[each].arrival)
    everything = (1 << num_engines) - 1
    free, queue = everything, list[WaitingJob]()
    ends: list[EngineRelease] = []  # as predicted
    running: list[tuple[float, EngineRelease]] = []  # a heap, by when they do end
    starts, now, next_arrival = [0.0] * len(loads), 0.0, 0

    def in_order(job: WaitingJob) -> tuple[float, int]:
        return rank(0, loads[job.id - 1].arrival, job.seconds), job.id

    while running or next_arrival < len(arrivals):
        coming = loads[arrivals[next_arrival]].arrival if next_arrival < len(arrivals) else None
        now = running[0][0] if coming is None or (running and running[0][0] <= coming) else coming
        while running and running[0][0] <= now:
            _, end = heapq.heappop(running)
            del ends[bisect_left(ends, end)]
            free |= end.engines
        while next_arrival < len(arrivals) and loads[arrivals[next_arrival]].arrival <= now:
            number = arrivals[next_arrival]
            load = loads[number]
            job = WaitingJob(number + 1, everything, load.engines, load.predicted)
            insort(queue, job, key=in_order)
            next_arrival += 1
        placed = place(queue, free, ends, now)
        free = placed.free
        for job, engines in placed.starts:
            starts[job.id - 1] = now
            end = EngineRelease(now + job.seconds, job.id, engines)
            insort(ends, end)
            heapq.heappush(running, (now + loads[job.id - 1].seconds, end))
        if placed.starts:
            begun = {job.id for job, _ in placed.starts}
            queue = [job for job in queue if job.id not in begun]
    return Simulated(now - loads[arrivals[0]].arrival, bound(loads, num_engines), tuple(starts))


def bound(loads: Sequence[Load], num_engines: int) -> float:
    """The lower bound of any schedule's makespan, in seconds.

    It is the greatest of: for each job, its arrival and its duration; for each arrival, the work
    that is submitted from then on, on all engines at once; and for each k, a k-th of the seconds of
    jobs of which no more than k fit at once.
    """
    loads = sorted(loads, key=lambda load: load.arrival)
    first = loads[0].arrival
    best, work = 0.0, 0.0
    for load in reversed(loads):
        work += load.engines * load.seconds
        begun = load.arrival - first
        best = max(best, begun + load.seconds, begun + work / num_engines)
    largest_first = sorted(loads, key=_minus_engines)
    sums = [0.0, *accumulate(load.seconds for load in largest_first)]
    for k in range(1, num_engines + 1):
        too_large = bisect_left(largest_first, -(num_engines // (k + 1)), key=_minus_engines)
        best = max(best, sums[too_large] / k)
    return best


def _minus_engines(load: Load) -> int:
    return -load.engines


def mixed(num_jobs: int, num_engines: int, *, seed: int = 0) -> list[Load]:
    """A queue of many users in one day: powers of two and some odd sizes, minutes to hours.

    Seconds are log-normal around ten minutes, and predicted to within a third either way. All
    arrive while the engines have at most half of the work behind them, so there is always a queue.
    """
    rng = random.Random(seed)
    most = max(1, num_engines // 8)
    sizes = [2**power for power in range(most.bit_length())] + [3, 5, 6, 12]
    shapes = [
        (rng.choice([n for n in sizes if n <= most]), min(rng.lognormvariate(6.4, 1.0), 7200.0))
        for _ in range(num_jobs)
    ]
    span = sum(engines * seconds for engines, seconds in shapes) / num_engines / 2
    return [
        Load(rng.uniform(0.0, span), engines, seconds, seconds * rng.uniform(2 / 3, 4 / 3))
        for engines, seconds in shapes
    ]
