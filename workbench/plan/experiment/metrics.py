"""The timings and metrics of a run: spans, phases of a collective, and columns of metrics."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Lane = Literal["compute", "communication"]

What = Literal["load", "forward", "loss", "backward", "collective", "wait", "update", "step"]

LANES: tuple[str, ...] = get_args(Lane)

KINDS: tuple[str, ...] = get_args(What)


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of one rank in one of its lanes.

    The spans of a lane do not overlap.

    Attributes:
        rank: the rank's number in the world.
        lane: the lane: "compute", or "communication" of the thread or stream beside it.
        what: the kind of work; "wait" is for other ranks, or for the other lane, and "step" is the
            fixed cost of a step.
        label: the layer, conversion or bucket that it belongs to.
        start_s: the seconds from the step's beginning to the span's.
        seconds: the seconds that it lasts.
        op: the recorder's name of a collective: "all_reduce", "all_gather", ...; else "".
        phase: the phase of a collective: "forward", "backward" or "step"; else "".
        bytes: the bytes that this rank receives in a collective.
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


PhaseName = Literal["copy", "encode", "send", "wait", "reduce", "decode"]

PHASES: tuple[PhaseName, ...] = get_args(PhaseName)
"""The phases of a round, in order:

    copy      values move within this rank, or out of memory that others filled
    encode    values become a codec's bytes
    send      messages are started, or written into memory that is shared
    wait      for other ranks and their messages, or while the caller computes
    reduce    what came is added up; of coded values, while they are decoded
    decode    a codec's bytes become values
"""


@dataclass(frozen=True, slots=True)
class Phase:
    """One interval of a collective.

    Attributes:
        name: the name of the phase, out of `PHASES`.
        round: the number of rounds of messages that have been started; 0 before the first.
        start_s: the seconds from the collective's beginning to the phase's.
        seconds: the seconds that it lasts.
        bytes: the bytes that this rank sends in a "send", or is to receive in a "wait".
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
        rank: the rank's number in the world.
        group: the group's name in the record, like `op` and `layer`.
        op: the recorder's name of the collective, "all_reduce".
        layer: the label that it was called with.
        call: the number of the call in the group, equal on all ranks.
        seconds: the seconds from its beginning to its end.
        phases: the phases, which fill all of it.
    """

    rank: int
    group: str
    op: str
    layer: str
    call: int
    seconds: float
    phases: tuple[Phase, ...]

    def seconds_of(self, names: Sequence[PhaseName]) -> float:
        """The seconds of all phases with these names."""
        return sum((phase.seconds for phase in self.phases if phase.name in names), 0.0)


Row = dict[str, float]

COLUMNS = (
    "step",  # optimizer updates before this one
    "rank",
    "time",  # seconds since the epoch, at the end of the step
    "loss",  # mean over the step's global batch
    "samples_per_s",  # of the whole world
    "compute_s",  # the step's seconds outside collectives
    "communication_s",  # blocked in collectives, as long as the rank that waited least
    "wait_s",  # blocked for longer than that: for slower ranks
    "received_bytes",  # that collectives of the step brought to this rank
    "tensor_bytes",  # live tensors at the end of the step
    "weight_bytes",  # of them, weights and the model's buffers
    "optimizer_bytes",  # of them, the optimizer's state; what is left are gradients
    "staging_bytes",  # memory beside tensors through which collectives communicate
    "peak_bytes",  # highest since the last row, shared memory included; first: and the start-up
    "rss_bytes",  # resident memory of the process
    "gpu_bytes",  # allocated on this rank's GPU; 0 without one
    "accuracy",  # on the test split; NaN where it was not evaluated after this step
)
