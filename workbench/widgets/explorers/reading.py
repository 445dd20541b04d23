"""Numbers of explorers as people read them."""

import math


def rate(bandwidth: float) -> str:
    """Bytes/s as bits: 10 Gbit/s."""
    bits = 8 * bandwidth
    for unit, scale in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= 0.9995 * scale:
            return f"{bits / scale:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"


def brief_seconds(seconds: float) -> str:
    """A mark of an axis: 100 us, 20 ms, 5 s."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * scale:
            long = seconds >= 999.5 * scale
            return f"{seconds / scale:,.0f} {unit}" if long else f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0"


def count(value: float) -> str:
    """A whole number, in thousands where it is long: 4,096, 64k."""
    if value >= 10_000 and value % 1024 == 0:
        return f"{value / 1024:,.0f}k"
    return f"{value:,.0f}"


def times(value: float) -> str:
    """A factor with two digits behind the point."""
    return f"{value:.2f}×" if math.isfinite(value) else "–"


def shortened(name: str, most: int = 40) -> str:
    """A name with its middle left out where it is long."""
    return name if len(name) <= most else f"{name[: most // 2]}…{name[1 - most // 2 :]}"
