"""Where a collective's time goes on one rank: phases that follow each other without a gap."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

PhaseName = Literal["copy", "encode", "send", "wait", "reduce", "decode"]
PHASES: tuple[PhaseName, ...] = get_args(PhaseName)
"""In the order in which a round goes through them:

    copy      values move within this rank, or out of memory that others filled
    encode    values become a codec's bytes
    send      messages are started, or written into memory that is shared
    wait      for other ranks and their messages, or while the caller computes
    reduce    what came is added up; of coded values, while they are decoded
    decode    a codec's bytes become values
"""


@dataclass(frozen=True, slots=True)
class Phase:
    """One stretch of a collective.

    Attributes:
        name: what is done.
        round: how many rounds of messages have been started; 0 before the first.
        start_s: seconds from the collective's beginning.
        seconds: how long.
        bytes: of a "send", what this rank sends; of a "wait", what it is to receive.
    """

    name: PhaseName
    round: int
    start_s: float
    seconds: float
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class CollectiveTrace:
    """The phases of one collective on one rank.

    Attributes:
        rank: the global one.
        group: its name in the record, like `op` and `layer`.
        op: "all_reduce".
        layer: the label.
        call: its number in the group: the same on all ranks.
        seconds: from its beginning to its end.
        phases: they fill all of it.
    """

    rank: int
    group: str
    op: str
    layer: str
    call: int
    seconds: float
    phases: tuple[Phase, ...]

    def seconds_of(self, names: Sequence[PhaseName]) -> float:
        """How long phases of these names take together."""
        return sum(phase.seconds for phase in self.phases if phase.name in names)
