"""The link between an emulated host and the switch."""

import re
from dataclasses import dataclass

UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}  # as tc reads them
LEAST_BURST_BYTES = 2048  # a packet that is larger than the bucket would never pass
LEAST_RATE = 1e3


def rate(bandwidth: str | float) -> float:
    """Bits per second of "1gbit", "2.5 Mbit", or a number that is just that.

    Raises:
        ValueError: another unit, or less than 1 kbit/s.
    """
    if isinstance(bandwidth, str):
        found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)\s*", bandwidth.lower())
        if not found or found[2] not in UNITS:
            raise ValueError(
                f"a bandwidth is a number with one of {', '.join(UNITS)} (per second), as in "
                f"'100mbit', got {bandwidth!r}"
            )
        bits = float(found[1]) * UNITS[found[2]]
    else:
        bits = float(bandwidth)
    if not LEAST_RATE <= bits < float("inf"):
        raise ValueError(f"a bandwidth is at least 1 kbit per second, got {bandwidth!r}")
    return bits


@dataclass(frozen=True)
class Link:
    """A token bucket each way: what leaves a host, and what reaches it.

    Attributes:
        bits_per_s: the rate, every header of a packet included.
        burst_bytes: passes at once after a pause.
        latency_s: how long a packet waits for its turn at most; one that came later is dropped,
            as in a switch whose buffer is full.

    Raises:
        ValueError: a rate, a burst or a latency that no link can have.
    """

    bits_per_s: float
    burst_bytes: int
    latency_s: float

    def __post_init__(self) -> None:
        if self.burst_bytes < LEAST_BURST_BYTES:
            raise ValueError(
                f"a burst is at least {LEAST_BURST_BYTES} bytes, got {self.burst_bytes}"
            )
        if not 0 < self.latency_s < float("inf"):
            raise ValueError(f"a latency is a positive number of seconds, got {self.latency_s}")

    @classmethod
    def of(cls, bandwidth: str | float, burst: int | None, latency: float) -> "Link":
        """A link; without a burst of its own, with that of one millisecond, but 16 KiB at least."""
        bits = rate(bandwidth)
        return cls(bits, max(16 << 10, int(bits / 8e3)) if burst is None else burst, latency)

    def __str__(self) -> str:
        unit = next(name for name, size in reversed(UNITS.items()) if self.bits_per_s >= size)
        return f"{self.bits_per_s / UNITS[unit]:g}{unit}"
