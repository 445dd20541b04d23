"""Tables of a cluster as they were last, without scripts: for where no kernel runs."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any

from workbench.predict.tables import html_table
from workbench.widgets.units import size

_MOST = 60  # letters of a name or reason
View = Mapping[str, Any]


def jobs_html(view: View) -> str:
    """A page of jobs."""
    head = ("job", "name", "state", "engines", "priority", "steps", "", "")
    rows = [
        (
            str(row["id"]),
            _brief(row["name"]),
            row["state"],
            row["engines"],
            str(row["priority"]),
            f"{row['step']:,} of {row['steps']:,}",
            f"{row['when']} {_clock(row['at'])}".strip(),
            _brief(row["reason"]),
        )
        for row in view["rows"]
    ]
    told = ", ".join(f"{count} {state}" for state, count in view["counts"].items()) or "no jobs"
    return _whole(view, f"Jobs of cluster {view['cluster']}: {told}", head, rows)


def engines_html(view: View) -> str:
    """The engines."""
    head = ("engine", "device", "state", "job", "processor", "memory")
    rows = [
        (
            row["label"],
            _brief(row["device"]),
            row["state"],
            _brief(row["job"]),
            f"{100 * row['cpu_share']:.0f} %",
            f"{size(row['used_bytes'])} of {size(row['memory_bytes'])}",
        )
        for row in view["rows"]
    ]
    return _whole(view, f"Cluster {view['cluster']}: {view['said']}", head, rows)


def _whole(view: View, title: str, head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    gone = f"<p>{escape(view['gone'])}</p>" if view["gone"] else ""
    table = html_table("", head, rows) if rows else ""
    return f"<div><p><b>{escape(title)}</b></p>{gone}{table}</div>"


def _brief(text: str) -> str:
    line = text.partition("\n")[0]
    return line if len(line) <= _MOST else f"{line[: _MOST - 1]}…"


def _clock(at: float | None) -> str:
    return "" if at is None else datetime.fromtimestamp(at).strftime("%H:%M:%S")
