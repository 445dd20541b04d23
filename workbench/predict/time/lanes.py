"""A step in time: two lanes on every rank, and what they wait for.

A collective begins when the last rank of its group has come to it (`lagging.py` says how far it is
behind), and when those that this rank's communication lane has begun before are over. All of the
group end together. While one is under way beside it, the compute lane advances at

    (1 - busy) / slowdown       of its own speed

for `busy` of the time the device works for the collective, and what it computes meanwhile, or
what else it communicates, takes `slowdown` times as long.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from workbench.predict.time.duration import Seconds
from workbench.predict.time.events import Call, Event, Grouping, Join, Meet, Start, Stretch
from workbench.predict.time.lagging import Lagging

_MOST_STEPS = 64
_SETTLED = 1e-9


@dataclass(frozen=True, slots=True)
class Beside:
    """A collective on the communication lane of each rank.

    Attributes:
        begin: seconds; where a rank takes no part, its `end`.
        end: seconds.
        rate: at which the compute lane advances meanwhile.
    """

    begin: Seconds
    end: Seconds
    rate: float


@dataclass(frozen=True, slots=True)
class Happened:
    """An event in time.

    Attributes:
        event: it.
        arrive: when each rank came to it.
        begin: when a collective began; else as `arrive`.
        end: when it was over.
        beside: of a stretch: what was under way.
    """

    event: Event
    arrive: Seconds
    begin: Seconds
    end: Seconds
    beside: tuple[Beside, ...] = ()


@dataclass
class Lanes:
    """The lanes of some ranks, from step to step.

    Args:
        ranks: their number.
        slowdown: of the machine.
        lagging: of these ranks; None: all are equally fast.
    """

    ranks: int
    slowdown: float
    lagging: Lagging | None = None
    compute: Seconds = field(init=False)
    communication: Seconds = field(init=False)

    def __post_init__(self) -> None:
        self.compute, self.communication = np.zeros(self.ranks), np.zeros(self.ranks)
        self._lagging = self.lagging or Lagging(self.ranks)
        self._beside: list[Beside] = []
        self._steps: list[dict[int, tuple[Grouping, Seconds]]] = []  # what was started: its end

    def run(self, events: Iterable[Event]) -> list[Happened]:
        """One step."""
        self._steps.append({})
        return [self._happen(event) for event in events]

    def steady(self, events: Sequence[Event]) -> "Step":
        """Steps until each takes as long as the one before; gives the last of them.

        A communication lane that falls behind a little more in every step, while nobody waits
        for it yet, is no such state.
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
        """Whether all ranks are as far, as certainly, and nothing is under way: as at first."""
        over = bool((self.communication <= self.compute).all())
        return over and self._lagging.is_even and bool((self.compute == self.compute[0]).all())

    def step(self, events: Sequence[Event]) -> "Step":
        """One step, with when it began and ended."""
        began = self.compute
        happened = self.run(events)
        return Step(tuple(happened), began, self.compute)

    def _happen(self, event: Event) -> Happened:
        arrive = begin = self.compute
        match event:
            case Stretch():
                self._forget()
                beside = tuple(self._beside)
                self.compute = advanced(arrive, event.ends[-1], beside)
                self._lagging.work(event.ends[-1])
                return Happened(event, arrive, arrive, self.compute, beside)
            case Meet(call):
                begin = _together(call, arrive + self._lagging.behind(call.groups, arrive))
                self._lagging.meet(call.groups, call.takes)
                self._forget()
                alone = advanced(begin, call.seconds, self._beside)
                self.compute = _together(call, alone)
            case Start(call, handle):
                last = arrive + self._lagging.behind(call.groups, arrive)
                begin = _together(call, np.maximum(last, self.communication))
                end = begin + call.seconds
                if call.takes is not None:
                    end = np.where(call.takes, end, self.communication)
                    begin = np.where(call.takes, begin, self.communication)
                self.communication = end
                self._beside.append(Beside(begin, end, (1 - call.busy) / self.slowdown))
                self._steps[-1][handle] = (call.groups, end)
                return Happened(event, arrive, begin, end)
            case Join(handle, _, late):
                started = self._steps[-1 - late] if late < len(self._steps) else {}
                if handle in started:
                    groups, end = started[handle]
                    self._join(groups, end)
        return Happened(event, arrive, begin, self.compute)

    def _join(self, groups: Grouping, end: Seconds) -> None:
        """Waits; where even the last of a group would have to, all of it go on together."""
        behind = self._lagging.behind(groups, self.compute)
        self._lagging.meet(groups, end >= self.compute + behind)
        self.compute = np.maximum(self.compute, end)

    def _forget(self) -> None:
        """What is over on all ranks is beside nothing any more."""
        if self._beside:
            now = self.compute
            self._beside = [one for one in self._beside if (one.end > now).any()]


@dataclass(frozen=True, slots=True)
class Step:
    """A step in time.

    Attributes:
        happened: its events.
        began: of each rank.
        ended: of each rank.
    """

    happened: tuple[Happened, ...]
    began: Seconds
    ended: Seconds

    @property
    def seconds(self) -> Seconds:
        """From each rank's beginning to its end."""
        return self.ended - self.began


def advanced(begin: Seconds, work: Seconds, beside: Sequence[Beside]) -> Seconds:
    """When so many seconds of work are done, of each rank.

    Args:
        begin: when they begin, [ranks].
        work: [..., ranks].
        beside: collectives that are under way meanwhile, one after another.
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
    """The latest time in each rank's group; of ranks that take no part, their own."""
    if call.takes is None:
        return call.groups.latest(times)
    latest = call.groups.latest(np.where(call.takes, times, -np.inf))
    return np.where(call.takes, latest, times)
