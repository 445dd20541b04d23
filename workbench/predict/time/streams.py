"""A step in time: a compute and a communication lane on every rank, and what they wait for.

A collective begins when the last rank of its group has arrived, and when the collectives that this
rank's communication lane began before are over. All ranks of the group end together. While a
collective runs beside it, the compute lane advances at

    (1 - busy) / slowdown       of its own speed

where `busy` is the share of the time in which the device works for the collective, and computation
or another collective meanwhile takes `slowdown` times as long.

Ranks are never equally fast: what takes t seconds takes each of them a little more or less, with

    variance = (unevenness t)^2 + jitter t

of which the first part lasts for a step and the second arises anew at every moment. A collective
waits for the last of k ranks, which lags behind the mean by the expected largest of k normal
values. So a step with one collective waits once for its slowest rank, and one with many waits many
times.

Sources: Petrini et al. 2003 (doi:10.1145/1048935.1050204) for noise that collectives amplify; Blom
1958 for the expected largest value.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from workbench.plan.machine.machine import Machine
from workbench.predict.time.duration import Seconds
from workbench.predict.time.events import (
    AwaitCollective,
    BlockingCollective,
    Call,
    Computation,
    Event,
    Grouping,
    StartedCollective,
)

# A rank expected more than so many standard deviations before the last is never the last.
_NEAR = 2.0


def largest(counts: Seconds) -> Seconds:
    """The expected largest of so many standard normal values, to within 5 %."""
    found: Seconds = ndtri((counts - 0.375) / (counts + 0.25))
    return np.where(counts < 2, 0.0, found)


@dataclass
class StragglerModel:
    """Tracks how long each rank has worked since it was last synchronised with its group.

    Args:
        ranks: the number of ranks.
        unevenness: the machine's standard deviation of ranks' times, relative to the mean, in a
            step.
        jitter_s: the machine's further variance of ranks' times, for each second of work [seconds].
    """

    ranks: int
    unevenness: float = 0.0
    jitter_s: float = 0.0
    _worked: Seconds = field(init=False)

    def __post_init__(self) -> None:
        self._worked = np.zeros(self.ranks)
        self._met: dict[bytes, Seconds] = {}
        self._all_met = np.zeros(self.ranks)

    @property
    def is_even(self) -> bool:
        """Whether no rank ever lags behind."""
        return self.unevenness == 0 and self.jitter_s == 0

    @classmethod
    def on(cls, machine: Machine, ranks: int) -> "StragglerModel":
        """The model of so many ranks of a machine."""
        return cls(ranks, machine.unevenness, machine.jitter_s)

    def work(self, seconds: Seconds) -> None:
        """Adds work of each rank, in seconds [ranks]."""
        if not self.is_even:
            self._worked = self._worked + seconds

    def behind(self, groups: Grouping, arrive: Seconds) -> Seconds:
        """Seconds by which the last rank of each rank's group arrives later than expected [ranks].

        Args:
            arrive: when each rank is expected to arrive, in seconds [ranks].
        """
        if self.is_even or groups.count < 2:
            return np.zeros(self.ranks)
        since = self._worked - np.maximum(self._met.get(groups.key, 0.0), self._all_met)
        spread = np.sqrt((self.unevenness * since) ** 2 + self.jitter_s * since)
        near = arrive >= groups.latest(arrive) - _NEAR * spread
        contenders = groups.share(near) * groups.count
        return groups.latest(spread * largest(contenders))

    def meet(self, groups: Grouping, who: NDArray[np.bool_] | None = None) -> None:
        """Notes that the ranks of each group are synchronised.

        Args:
            who: a mask of the ranks that are synchronised [ranks]; None: all.
        """
        if self.is_even:
            return
        before = self._met.get(groups.key, self._all_met)
        now = self._worked if who is None else np.where(who, self._worked, before)
        self._met[groups.key] = now
        if groups.is_one:
            self._all_met = now


_MOST_STEPS = 64
_SETTLED = 1e-9


@dataclass(frozen=True, slots=True)
class Overlap:
    """A collective on the communication lane of each rank.

    Attributes:
        begin: when it begins, in seconds [ranks]; on a rank that takes no part, its `end`.
        end: when it ends, in seconds [ranks].
        rate: the speed of the compute lane meanwhile, relative to its own, 0 to 1.
    """

    begin: Seconds
    end: Seconds
    rate: float


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """An event with its times.

    Attributes:
        arrive: when each rank came to it, in seconds [ranks].
        begin: when the collective began, in seconds [ranks]; for other events, `arrive`.
        end: when it was over, in seconds [ranks].
        beside: the collectives that ran beside a computation.
    """

    event: Event
    arrive: Seconds
    begin: Seconds
    end: Seconds
    beside: tuple[Overlap, ...] = ()


@dataclass
class Streams:
    """The compute and communication lanes of some ranks, from step to step.

    Args:
        ranks: the number of ranks.
        slowdown: the machine's factor by which overlapping work is slower.
        stragglers: the model of how far these ranks lag behind; None: all are equally fast.
    """

    ranks: int
    slowdown: float
    stragglers: StragglerModel | None = None
    compute: Seconds = field(init=False)
    communication: Seconds = field(init=False)

    def __post_init__(self) -> None:
        self.compute, self.communication = np.zeros(self.ranks), np.zeros(self.ranks)
        self._stragglers = self.stragglers or StragglerModel(self.ranks)
        self._beside: list[Overlap] = []
        self._steps: list[dict[int, tuple[Grouping, Seconds]]] = []  # what was started: its end

    def run(self, events: Iterable[Event]) -> list[TimedEvent]:
        """Runs one step."""
        self._steps.append({})
        return [self._happen(event) for event in events]

    def steady(self, events: Sequence[Event]) -> "Step":
        """Runs steps until each takes as long as the one before, and returns the last of them.

        A communication lane that falls behind a little more in every step, while no rank waits for
        it yet, is not steady.
        """
        step = self.step(events)
        for _ in range(0 if self._ends_together() else _MOST_STEPS):
            before, behind = step, self.communication
            step = self.step(events)
            sent = self.communication - behind
            same = np.allclose(step.seconds, before.seconds, rtol=_SETTLED, atol=0)
            if same and (sent <= step.seconds * (1 + _SETTLED)).all():
                break
        return step

    def _ends_together(self) -> bool:
        """Whether all ranks are equally far, and no collective is running: as at the start."""
        over = bool((self.communication <= self.compute).all())
        return over and self._stragglers.is_even and bool((self.compute == self.compute[0]).all())

    def step(self, events: Sequence[Event]) -> "Step":
        """Runs one step, with when it began and ended."""
        began = self.compute
        happened = self.run(events)
        return Step(tuple(happened), began, self.compute)

    def _happen(self, event: Event) -> TimedEvent:
        arrive = begin = self.compute
        match event:
            case Computation():
                self._forget()
                beside = tuple(self._beside)
                self.compute = advanced(arrive, event.ends[-1], beside)
                self._stragglers.work(event.ends[-1])
                return TimedEvent(event, arrive, arrive, self.compute, beside)
            case BlockingCollective(call):
                begin = _together(call, arrive + self._stragglers.behind(call.groups, arrive))
                self._stragglers.meet(call.groups, call.takes)
                self._forget()
                alone = advanced(begin, call.seconds, self._beside)
                self.compute = _together(call, alone)
            case StartedCollective(call, handle):
                last = arrive + self._stragglers.behind(call.groups, arrive)
                begin = _together(call, np.maximum(last, self.communication))
                end = begin + call.seconds
                if call.takes is not None:
                    end = np.where(call.takes, end, self.communication)
                    begin = np.where(call.takes, begin, self.communication)
                self.communication = end
                self._beside.append(Overlap(begin, end, (1 - call.busy) / self.slowdown))
                self._steps[-1][handle] = (call.groups, end)
                return TimedEvent(event, arrive, begin, end)
            case AwaitCollective(handle, _, late):
                started = self._steps[-1 - late] if late < len(self._steps) else {}
                if handle in started:
                    groups, end = started[handle]
                    self._join(groups, end)
        return TimedEvent(event, arrive, begin, self.compute)

    def _join(self, groups: Grouping, end: Seconds) -> None:
        """Waits for a collective; a group that even its last rank must wait in is synchronised."""
        behind = self._stragglers.behind(groups, self.compute)
        self._stragglers.meet(groups, end >= self.compute + behind)
        self.compute = np.maximum(self.compute, end)

    def _forget(self) -> None:
        """Forgets collectives that are over on all ranks."""
        if self._beside:
            now = self.compute
            self._beside = [one for one in self._beside if (one.end > now).any()]


@dataclass(frozen=True, slots=True)
class Step:
    """A step with its times.

    Attributes:
        began: when each rank began, in seconds [ranks].
        ended: when each rank ended, in seconds [ranks].
    """

    happened: tuple[TimedEvent, ...]
    began: Seconds
    ended: Seconds

    @property
    def seconds(self) -> Seconds:
        """Seconds from each rank's beginning to its end [ranks]."""
        return self.ended - self.began


def advanced(begin: Seconds, work: Seconds, beside: Sequence[Overlap]) -> Seconds:
    """When so many seconds of work are done, on each rank.

    Args:
        begin: when the work begins, in seconds [ranks].
        work: seconds of work, undisturbed [..., ranks].
        beside: the collectives that run meanwhile, one after another.
    """
    if not beside:
        return begin + work
    left, now = work, np.broadcast_to(begin, work.shape)
    for one in beside:
        free = np.minimum(np.maximum(one.begin - now, 0.0), left)
        now, left = now + free, left - free
        under_way = np.maximum(one.end - np.maximum(now, one.begin), 0.0)
        if one.rate == 0:
            now = np.where((left > 0) & (under_way > 0), one.end, now)
            continue
        done = np.minimum(left, under_way * one.rate)
        now, left = now + done / one.rate, left - done
    return now + left


def _together(call: Call, times: Seconds) -> Seconds:
    """The latest time in each rank's group [ranks]; ranks that take no part keep their own."""
    if call.takes is None:
        return call.groups.latest(times)
    latest = call.groups.latest(np.where(call.takes, times, -np.inf))
    return np.where(call.takes, latest, times)
