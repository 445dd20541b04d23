"""A step in time on every rank: spans, and where the time goes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np

from workbench.plan.span import Lane, Span
from workbench.predict.time.duration import Seconds
from workbench.predict.time.events import Join, Meet, Start, Stretch
from workbench.predict.time.lanes import Happened, Step, advanced
from workbench.program.representatives import Representatives

# Where the compute lane's time goes; they add up to the step.
PARTS = ("load", "forward", "loss", "backward", "communication", "wait", "update", "step")
WORK = ("load", "forward", "loss", "backward", "update", "step")


@dataclass(frozen=True)
class Schedule:
    """One step, on all ranks of a world.

    Attributes:
        alike: the ranks that it was simulated for, and whom each of them stands for.
        step: the one that is shown.
        mean: steps of which the mean one consists, each with its share.
    """

    alike: Representatives
    step: Step
    mean: tuple[tuple[float, Step], ...]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.alike.world_size

    @cached_property
    def seconds(self) -> float:
        """From one step to the next, in the mean."""
        return float(np.sum([share * step.seconds for share, step in self.mean], axis=0).max())

    @cached_property
    def work(self) -> Seconds:
        """Seconds of the mean step in which each rank would be done alone, [world size]."""
        total = np.zeros(len(self.alike.ranks))
        for share, step in self.mean:
            for happened in step.happened:
                if isinstance(happened.event, Stretch):
                    total = total + share * happened.event.ends[-1]
        return total[self.alike.column]

    @cached_property
    def efficiency(self) -> float:
        """The share of all ranks' time that would be left without communication and waiting."""
        return float(self.work.mean() / self.seconds) if self.seconds else 1.0

    @cached_property
    def beside(self) -> Seconds:
        """Seconds of the mean step in which something travels beside computation, of each rank."""
        total = np.zeros(len(self.alike.ranks))
        for share, step in self.mean:
            for happened in step.happened:
                if isinstance(happened.event, Start):
                    total = total + share * (happened.end - happened.begin)
        return total[self.alike.column]

    @cached_property
    def parts(self) -> dict[str, Seconds]:
        """Seconds of the mean step for each of PARTS, [kept ranks]; they add up to it."""
        found = {part: [np.zeros((1, len(self.alike.ranks)))] for part in PARTS}
        for share, step in self.mean:
            for happened in step.happened:
                match happened.event:
                    case Stretch(tasks):
                        lengths = np.diff(_ends(happened), axis=0, prepend=happened.arrive[None])
                        whats = [task.what for task in tasks]
                        for what in dict.fromkeys(whats):
                            own = [index for index, one in enumerate(whats) if one == what]
                            found[what].append(share * lengths[own])
                    case Meet():
                        found["wait"].append(share * (happened.begin - happened.arrive)[None])
                        sent = share * (happened.end - happened.begin)
                        found["communication"].append(sent[None])
                    case Join():
                        found["wait"].append(share * (happened.end - happened.arrive)[None])
        return {part: np.cumsum(np.concatenate(own), axis=0)[-1] for part, own in found.items()}

    @cached_property
    def breakdowns(self) -> tuple[Mapping[str, float], ...]:
        """That of every rank; ranks that are alike share one."""
        found = [
            MappingProxyType({part: float(times[column]) for part, times in self.parts.items()})
            for column in range(len(self.alike.ranks))
        ]
        return tuple(found[column] for column in self.alike.column.tolist())

    def breakdown(self, rank: int) -> Mapping[str, float]:
        """Seconds of one rank's mean step for each of PARTS."""
        self._column(rank)
        return self.breakdowns[rank]

    def spans(self, rank: int) -> tuple[Span, ...]:
        """What one rank does in the step that is shown, in the order in which it begins."""
        return tuple(sorted(self._spans(rank, self._column(rank)), key=lambda s: s.start_s))

    def _column(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise IndexError(f"no rank {rank}: there are 0 to {self.world_size - 1}")
        return int(self.alike.column[rank])

    def _spans(self, rank: int, column: int) -> Iterator[Span]:
        origin, sent = self.step.began.min(), -np.inf
        for happened in self.step.happened:
            arrive, begin, end = (
                float(times[column] - origin)
                for times in (happened.arrive, happened.begin, happened.end)
            )
            match happened.event:
                case Stretch(tasks):
                    ends = _ends(happened)[:, column] - origin
                    for task, until in zip(tasks, ends.tolist(), strict=True):
                        if until > arrive:
                            yield Span(
                                rank, "compute", task.what, task.label, arrive, until - arrive
                            )
                        arrive = until
                case Meet(call) | Start(call):
                    if call.takes is not None and not call.takes[column]:
                        continue
                    beside = isinstance(happened.event, Start)
                    lane: Lane = "communication" if beside else "compute"
                    came = max(arrive, sent) if beside else arrive
                    sent = end if beside else sent
                    if begin > came:
                        yield Span(rank, lane, "wait", call.label, came, begin - came)
                    yield Span(
                        rank,
                        lane,
                        "collective",
                        call.label,
                        begin,
                        end - begin,
                        op=call.op,
                        phase=call.phase,
                        bytes=call.received(column, rank),
                    )
                case Join(_, label) if end > arrive:
                    yield Span(rank, "compute", "wait", label, arrive, end - arrive)


def _ends(happened: Happened) -> Seconds:
    """When each task of a stretch was done, [tasks, ranks]."""
    assert isinstance(happened.event, Stretch)
    return advanced(happened.arrive, happened.event.ends, happened.beside)
