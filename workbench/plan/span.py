"""A stretch of a rank's time: what predicted and measured timelines are made of."""

from dataclasses import dataclass
from typing import Literal, get_args

Lane = Literal["compute", "communication"]
What = Literal["load", "forward", "loss", "backward", "collective", "wait", "update", "step"]
LANES: tuple[str, ...] = get_args(Lane)
KINDS: tuple[str, ...] = get_args(What)


@dataclass(frozen=True, slots=True)
class Span:
    """What one rank does in one of its lanes for a while.

    Spans of a lane do not overlap, except that a "step" holds all the others.

    Attributes:
        rank: whose time.
        lane: "compute", or "communication" of the thread or stream beside it.
        what: kind of work; "wait" is for other ranks, or for the other lane.
        label: the layer, conversion or bucket that it belongs to.
        start_s: seconds from the step's beginning.
        seconds: how long.
        op: of a collective, as the recorder names it: "all_reduce", "all_gather", ...
        phase: of a collective: "forward", "backward", "average", ...
        bytes: that a collective brings to this rank.
    """

    rank: int
    lane: Lane
    what: What
    label: str
    start_s: float
    seconds: float
    op: str = ""
    phase: str = ""
    bytes: int = 0

    @property
    def end_s(self) -> float:
        """Seconds from the step's beginning to its end."""
        return self.start_s + self.seconds
