"""Numbers as people read them; the widgets' `units.js` says the same in the browser."""

import math
import re

BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
"""Units of a bandwidth in text, per second, as `tc` reads them."""


def size(count: float) -> str:
    """Bytes with a binary unit and three digits: 812 B, 1.50 KiB, 133 MiB."""
    if not math.isfinite(count):
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 999.5:
            return f"{digits(count)} {unit}"
        count /= 1024
    return f"{digits(count)} TiB"


def milliseconds(seconds: float) -> str:
    """Three digits, in ms below one second: 8.25 ms, 1.20 s."""
    if not math.isfinite(seconds):
        return "–"
    return f"{digits(seconds)} s" if seconds >= 0.9995 else f"{digits(1000 * seconds)} ms"


def duration(seconds: float) -> str:
    """Minutes and seconds, with hours where there are any: 0:07, 12:00, 3:05:09."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def digits(value: float) -> str:
    """Three significant digits, without an exponent where there need not be one."""
    if not math.isfinite(value):
        return "–"
    magnitude = math.floor(math.log10(abs(value))) if value else 0
    if not -4 < magnitude < 7:
        return f"{value:.2e}"
    return f"{value:,.{max(0, 2 - magnitude)}f}" if value else "0"


def percent(share: float) -> str:
    """One decimal: 97.2 %."""
    return f"{100 * share:.1f} %" if math.isfinite(share) else "–"


def rate(bandwidth: float) -> str:
    """Bytes/s as bits: 10 Gbit/s."""
    bits = 8 * bandwidth
    for unit, scale in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= 0.9995 * scale:
            return f"{bits / scale:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"


def bandwidth_of(given: str | float) -> float:
    """Bytes/s of a number, which is just that, or of text such as "1gbit" or "2.5 Gbit/s"."""
    if not isinstance(given, str):
        return float(given)
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)(?:/s)?\s*", given.lower())
    if not found or found[2] not in BITS:
        raise ValueError(
            f"a bandwidth is a number of bytes/s, or text with one of {', '.join(BITS)} "
            f"(per second), as in '100mbit', got {given!r}"
        )
    return float(found[1]) * BITS[found[2]] / 8


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
