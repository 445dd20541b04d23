"""What passes between a rank's training loop and whoever started it."""

from dataclasses import dataclass, field
from typing import Literal

Reason = Literal["finished", "stopped", "diverged"]


@dataclass
class Control:
    """What is asked of a rank from outside; read once a step, set from a signal handler."""

    stop_requested: bool = False


@dataclass(frozen=True)
class Outcome:
    """How training ended on one rank.

    Attributes:
        reason: "finished", "stopped" (as asked) or "diverged" (a loss that is no number).
        step: optimizer updates made in all.
        checkpoint: the directory of the newest checkpoint, or None.
        evaluation: "loss" and "accuracy" on the test split; empty where it was not evaluated.
        message: for "diverged": step and layer.
        traffic: for each (group, operation, layer, phase): calls, messages, bytes, seconds, rounds,
            additions.
        notes: on steps that were unlike others, for people.
        given: for each (operation, phase, rank): bytes that came from that rank in `steps_counted`.
        steps_counted: steps of this attempt.
    """

    reason: Reason
    step: int
    checkpoint: str | None
    evaluation: dict[str, float] = field(default_factory=dict)
    message: str = ""
    traffic: tuple[tuple[str, str, str, str, int, int, int, float, int, int], ...] = ()
    notes: tuple[str, ...] = ()
    given: tuple[tuple[str, str, int, int], ...] = ()
    steps_counted: int = 0
