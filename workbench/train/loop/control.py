"""What passes between a rank's training loop and whoever started it."""

from dataclasses import dataclass


@dataclass
class Control:
    """Wishes of the outside, read once a step; set from a signal handler."""

    stop_requested: bool = False
