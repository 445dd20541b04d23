"""What one rank did in one step and when, as it was measured: values, and the files that hold them.

    stretches     load | fwd a | fwd b | loss | bwd b | bwd a |        update      one thread
    calls              |----- all_gather -----|   |---- all_reduce ----|           beside it
      blocked                 |.....|                          |.......|           in the thread
      helped                                       |.|   |.|

A stretch of the computation goes on from its beginning to its end, whatever collectives held up
its thread in between: `own_seconds` leaves that out.

Clocks of hosts differ, so that a rank knows no time but its own. It begins a step when its loop
does, and says how long before that it came out of the step before: out of the all-reduce of the
status, which ends at about the same moment on all ranks.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from workbench.plan.experiment.metrics import What
from workbench.plan.io.files import write_whole

Interval = tuple[float, float]
"""(beginning, end), seconds from the beginning of the step."""


@dataclass(frozen=True)
class Computed:
    """One thing that a rank computed."""

    what: What
    label: str
    during: Interval
    conversion: str = ""


@dataclass(frozen=True)
class Called:
    """One collective, as far as it lies in the step.

    Attributes:
        number: its place among the group's collectives; the same on all of its ranks.
        during: the interval from its beginning until its result was there.
        beside: whether the rank computes on meanwhile, until it waits for it.
        blocked: when the rank's thread waited in it.
        helped: when the thread advanced it, instead of what it was computing.
    """

    group: str
    number: int
    op: str
    layer: str
    phase: Literal["forward", "backward", "step"]
    bytes: int
    during: Interval
    beside: bool
    blocked: tuple[Interval, ...]
    helped: tuple[Interval, ...]


@dataclass(frozen=True)
class LayerSeconds:
    """What a layer computed, collectives left out."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class RankTrace:
    """What one rank did between two moments."""

    seconds: float
    stretches: tuple[Computed, ...]
    calls: tuple[Called, ...]

    @property
    def held_up(self) -> list[Interval]:
        """When the thread waited or worked for a collective: in order, and apart."""
        every = [interval for call in self.calls for interval in (*call.blocked, *call.helped)]
        return united(every)

    def own_seconds(self) -> list[float]:
        """Of each stretch, without what the thread did for collectives meanwhile."""
        held = self.held_up
        return [
            sum(end - begin for begin, end in without(stretch.during, held))
            for stretch in self.stretches
        ]

    def layer_seconds(self) -> dict[str, LayerSeconds]:
        """Of each layer, over all passes; conversions are no part of it."""
        sums: dict[str, dict[What, float]] = {}
        for stretch, own in zip(self.stretches, self.own_seconds(), strict=True):
            if stretch.what in ("forward", "backward") and not stretch.conversion:
                of_layer = sums.setdefault(stretch.label, {"forward": 0.0, "backward": 0.0})
                of_layer[stretch.what] += own
        return {
            label: LayerSeconds(of_layer["forward"], of_layer["backward"])
            for label, of_layer in sums.items()
        }


def united(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments in intervals that are in order, and apart."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def without(interval: Interval, held: list[Interval]) -> Iterator[Interval]:
    """What is left of an interval without others, which are in order and apart."""
    at, end = interval
    for begin, until in held:
        if until <= at:
            continue
        if begin >= end:
            break
        if begin > at:
            yield at, begin
        at = until
    if at < end:
        yield at, end


KEPT = 8
_FOLDER = "traces"
_NAME = re.compile(r"step-(\d+)\.rank-(\d+)\.json")


@dataclass(frozen=True)
class Sample:
    """One step of one rank."""

    step: int
    rank: int
    rows: tuple[tuple[int, ...], ...]
    since_s: float
    trace: RankTrace


_SAMPLE = TypeAdapter(Sample)


def write(directory: Path, sample: Sample) -> None:
    """Puts a sample into a run's directory, whole, and removes the rank's oldest beyond KEPT.

    Nobody waits for the disk, and a full one is no reason to lose the run.
    """
    path = trace_path(directory, sample.step, sample.rank)
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        write_whole(path, _SAMPLE.dump_json(sample), durable=False)
        mine = [step for step, ranks in ranks_by_step(directory).items() if sample.rank in ranks]
        for step in sorted(mine)[:-KEPT]:
            trace_path(directory, step, sample.rank).unlink(missing_ok=True)


def traced_steps(directory: Path, world_size: int) -> list[int]:
    """The steps that all ranks of a run have written, ascending."""
    every = set(range(world_size))
    return sorted(step for step, ranks in ranks_by_step(directory).items() if ranks >= every)


def read(directory: Path, step: int, world_size: int) -> tuple[Sample, ...]:
    """What each rank saw of a step.

    Raises:
        ValueError: a file is missing or damaged.
    """
    found = []
    for rank in range(world_size):
        path = trace_path(directory, step, rank)
        try:
            found.append(_SAMPLE.validate_json(path.read_bytes()))
        except (OSError, ValidationError) as error:
            raise ValueError(f"{path} is no trace of rank {rank}: {error}") from error
    return tuple(found)


def ranks_by_step(directory: Path) -> dict[int, set[int]]:
    """The ranks that have written each step."""
    found: dict[int, set[int]] = {}
    for path in (directory / _FOLDER).glob("step-*"):
        if match := _NAME.fullmatch(path.name):
            found.setdefault(int(match[1]), set()).add(int(match[2]))
    return found


def trace_path(directory: Path, step: int, rank: int) -> Path:
    return directory / _FOLDER / f"step-{step:08d}.rank-{rank}.json"
