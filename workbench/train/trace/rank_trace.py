"""What one rank did in one step and when, as it was measured: values only.

    stretches     load | fwd a | fwd b | loss | bwd b | bwd a |        update      one thread
    calls              |----- all_gather -----|   |---- all_reduce ----|           beside it
      blocked                 |.....|                          |.......|           in the thread
      helped                                       |.|   |.|

A stretch of the computation goes on from its beginning to its end, whatever collectives held up
its thread in between: `own_seconds` leaves that out.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from workbench.plan.experiment.metrics import What

Interval = tuple[float, float]
"""(beginning, end), seconds from the beginning of the step."""


@dataclass(frozen=True)
class Computed:
    """One thing that a rank computed.

    Attributes:
        what: "load", "forward", "loss", "backward" or "update".
        label: the layer; of a conversion, the layer that it was made for.
        during: the interval in which it was computed.
        conversion: its name; empty for a layer.
    """

    what: What
    label: str
    during: Interval
    conversion: str = ""


@dataclass(frozen=True)
class Called:
    """One collective, as far as it lies in the step.

    Attributes:
        group: its name in the record.
        number: its place among the group's collectives; the same on all of its ranks.
        op: the collective, as in the record; so are `layer` and `phase`.
        bytes: the bytes that were received.
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
    """What one rank did between two moments.

    Attributes:
        seconds: the seconds from the first to the last moment.
        stretches: the stretches, in their order; none overlaps another.
        calls: the collectives, in the order in which they began.
    """

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
