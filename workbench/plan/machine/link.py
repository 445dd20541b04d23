"""A link between ranks: the time of collectives over it.

    seconds = rounds x latency + received / bandwidth + added x reduction

Source: the alpha-beta-gamma model of Pipe-SGD (arXiv:1811.03619, sec. 4), where alpha is the
latency, 1/beta the bandwidth and gamma the seconds for each byte that is added up.
"""

from bisect import bisect_right
from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from workbench.plan.units import bandwidth_of
from workbench.plan.value import MachineValue

INTO_NEW = "all_reduce into new memory"
BY_BACKEND = "all_reduce by the backend"
EXCHANGE = "exchange"
"""One piece that is exchanged with another rank through torch's communicator, also where ranks
share memory."""


Bandwidth = Annotated[
    float,
    BeforeValidator(lambda given: bandwidth_of(given) if isinstance(given, str) else given),
    Field(gt=0),
]


class Curve(MachineValue):
    """The measured times of one collective."""

    op: str
    """The collective's name in the recorder: "all_reduce", "all_gather", "reduce_scatter",
    "all_to_all". All-reduces are in place, by the algorithm that "auto" means for gradients; those
    of activations, whose sum needs new memory, are `INTO_NEW`, and torch's own `BY_BACKEND`. Other
    algorithms consist of `EXCHANGE`s; and parameter servers "broadcast"."""
    ranks: int = Field(ge=1)
    """The ranks that took part."""
    points: tuple[tuple[float, float], ...] = Field(min_length=1)
    """(bytes that a rank receives, the mean over ranks, seconds), in ascending order of bytes."""

    @model_validator(mode="after")
    def _ascends(self) -> Self:
        if any(left >= right for (left, _), (right, _) in pairwise(self.points)):
            raise ValueError(f"points must be in ascending order of bytes, got {self.points}")
        return self

    def seconds(self, received: float) -> float:
        """Seconds by linear interpolation; outside the points, on the line of the nearest two."""
        points = self.points
        if len(points) == 1:
            return points[0][1]
        place = bisect_right(points, (received, float("inf")))
        place = min(max(place, 1), len(points) - 1)
        (left, before), (right, behind) = points[place - 1], points[place]
        slope = (behind - before) / (right - left)
        floor = min(seconds for _, seconds in points) / 2
        return max(before + slope * (received - left), floor)


class Link(MachineValue):
    """The connection of a group of ranks."""

    name: str
    """What it is called, for people."""
    latency_s: float = Field(ge=0)
    """Seconds of latency of one exchange between two ranks (alpha)."""
    bandwidth: Bandwidth
    """Bytes per second that one rank receives (1 / beta); or text such as "10gbit"."""
    reduction_s_per_byte: float = Field(default=0.0, ge=0)
    """Seconds for each byte that a rank adds up (gamma)."""
    busy: float = Field(default=0.0, ge=0, le=1)
    """The share of a collective's time in which its device computes nothing else."""
    curves: tuple[Curve, ...] = ()
    """The measured collectives; the model above is used for those that were not measured."""
    source: str = ""
    """The origin of the figures."""

    def seconds(self, op: str, ranks: int, received: float, rounds: int, added: float) -> float:
        """Seconds of one collective on one rank.

        Args:
            op: the collective's name in the recorder, such as "all_gather".
            ranks: the number of ranks in the group.
            received: the bytes that the rank receives.
            rounds: the number of successive exchanges.
            added: the bytes that the rank adds to others.
        """
        curve = self._curve.get((op, ranks))
        if curve is not None:
            return curve.seconds(received)
        return self._modelled(received, rounds, added)

    def exchanges(self, ranks: int, received: float, rounds: int, added: float) -> float:
        """Seconds of an algorithm whose rounds go through torch's communicator; see `seconds`."""
        if not self.has_measured(EXCHANGE, ranks):
            return self._modelled(received, rounds, added)
        each = self.seconds(EXCHANGE, ranks, received / rounds, 1, 0)
        return rounds * each + added * self.reduction_s_per_byte

    def has_measured(self, op: str, ranks: int) -> bool:
        """Whether a collective was measured in groups of so many ranks."""
        return (op, ranks) in self._curve

    def _modelled(self, received: float, rounds: int, added: float) -> float:
        moving = received / self.bandwidth + added * self.reduction_s_per_byte
        return rounds * self.latency_s + moving

    @cached_property
    def _curve(self) -> Mapping[tuple[str, int], Curve]:
        return {(curve.op, curve.ranks): curve for curve in self.curves}
