"""Numbers as people read them; `units.js` says the same in the browser."""

import math


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
