"""Moments of a rank's time: of its host's clock, or of its GPU's stream."""

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Takes moments now, and says later when they were."""

    def now(self) -> Any:
        """This moment."""
        ...

    def seconds(self, earlier: Any, later: Any) -> float:
        """From one moment to another; waits until both are over."""
        ...


class HostClock:
    """Of a rank that computes on the CPU."""

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, earlier: float, later: float) -> float:
        return later - earlier


class StreamClock:
    """Of a rank that computes on a GPU, whose work ends long after the host has asked for it.

    A moment is an event in the stream that is current when it is taken. Nothing is waited for
    until somebody asks for seconds, so that what overlaps still does. A stream that waits for a
    collective does so between two events: that is how long the computation was blocked.
    """

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        earlier.synchronize()
        later.synchronize()
        return float(earlier.elapsed_time(later)) / 1e3


def clock_of(device: torch.device) -> Clock:
    """The clock of what runs on a device."""
    return StreamClock() if device.type == "cuda" else HostClock()
