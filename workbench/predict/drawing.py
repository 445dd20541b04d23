"""A timeline as an SVG picture, and as a trace file for chrome://tracing and Perfetto.

Source: the Trace Event Format of Chromium's tracing (complete events "X", metadata events "M"),
which ui.perfetto.dev reads as well.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.plan.display import svg
from workbench.plan.experiment.metrics import LANES, Span
from workbench.plan.io.files import save_text
from workbench.plan.io.html import Markup, frame_of

if TYPE_CHECKING:
    import pandas

# Of middling lightness, so that they stand out from white as from black.
COLORS = {
    "load": "#8c8c8c",
    "forward": "#3f8fd2",
    "loss": "#7a6fd0",
    "backward": "#d9822b",
    "collective": "#2e9e6b",
    "wait": "#c94f4f",
    "update": "#a86cc1",
    "step": "#8c8c8c",
}

_NO_GAP = 0.3  # of the picture's width unit: invisible

_WIDTH, _LEFT, _LANE, _GAP = 760, 64, 12, 6

_INK = "currentColor"


def picture(spans: Mapping[str, Sequence[Span]], title: str) -> Markup:
    """Two lanes of spans for each name, on one time scale.

    Args:
        spans: the spans of each row in order, by the label before its lanes.
        title: the picture's description for screen readers.
    """
    end = max((span.end_s for own in spans.values() for span in own), default=0.0)
    scale = (_WIDTH - _LEFT) / end if end > 0 else 0.0
    lanes = [lane for lane in LANES if any(s.lane == lane for own in spans.values() for s in own)]
    height = len(lanes) * _LANE + _GAP
    parts = []
    for row, (name, own) in enumerate(spans.items()):
        top = row * height
        parts.append(svg.text(0, top + 10, name, fill=_INK))
        for index, lane in enumerate(lanes):
            mine = [span for span in own if span.lane == lane]
            parts += _lane(mine, top + index * _LANE, scale)
    bottom = len(spans) * height
    parts.append(svg.text(_LEFT, bottom + 12, "0", fill=_INK))
    parts.append(svg.text(_WIDTH, bottom + 12, f"{end * 1e3:,.3g} ms", "end", fill=_INK))
    found = {span.what for own in spans.values() for span in own}
    colors = [(what, color) for what, color in COLORS.items() if what in found]
    parts += svg.legend(colors, _LEFT, bottom + 30, 84, fill=_INK)
    return svg.document(
        parts,
        _WIDTH,
        bottom + 36,
        font_family="sans-serif",
        font_size=11,
        role="img",
        aria_label=f"{title}: compute lane above, communication lane below, of each rank",
        style="max-width:100%;height:auto",
    )


def _lane(spans: Sequence[Span], top: int, scale: float) -> list[Markup]:
    """Rectangles of spans; adjacent spans of one kind are one rectangle."""
    runs: list[list[Span]] = []
    for span in spans:
        last = runs[-1][-1] if runs else None
        gap = 0.0 if last is None else (span.start_s - last.end_s) * scale
        if last is not None and last.what == span.what and gap <= _NO_GAP:
            runs[-1].append(span)
        else:
            runs.append([span])
    return [_rectangle(run, top, scale) for run in runs]


def _rectangle(run: Sequence[Span], top: int, scale: float) -> Markup:
    first, last = run[0], run[-1]
    length = last.end_s - first.start_s
    labels = first.label if len(run) == 1 else f"{first.label} to {last.label}"
    title = f"{first.what} {first.op} {labels}: {length * 1e3:.4g} ms"
    x, width = _LEFT + first.start_s * scale, max(length * scale, 0.4)
    return svg.rect(x, top, width, _LANE - 1, title, fill=COLORS[first.what])


MICRO = 1e6


def trace_of(spans: Iterable[Span]) -> dict[str, Any]:
    """The trace, as JSON-serialisable values; times in microseconds."""
    events: list[dict[str, Any]] = []
    ranks: dict[int, None] = {}
    for span in spans:
        ranks.setdefault(span.rank)
        events.append(_event(span))
    named = [event for rank in ranks for event in _names(rank)]
    return {"displayTimeUnit": "ms", "traceEvents": named + events}


def save_trace(spans: Iterable[Span], path: str | Path) -> None:
    """Writes the trace to a file.

    Raises:
        OSError: the file cannot be written.
    """
    save_text(Path(path), json.dumps(trace_of(spans)))


def spans_frame(spans: Iterable[Span]) -> "pandas.DataFrame":
    """One line for each span, in seconds and bytes."""
    return frame_of((asdict(span) for span in spans), [f.name for f in fields(Span)])


def _event(span: Span) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if span.op:
        facts = {"op": span.op, "phase": span.phase, "bytes": span.bytes}
    return {
        "name": f"{span.op} {span.label}".strip(),
        "cat": span.what,
        "ph": "X",
        "ts": span.start_s * MICRO,
        "dur": span.seconds * MICRO,
        "pid": span.rank,
        "tid": LANES.index(span.lane),
        "args": {"what": span.what, **facts},
    }


def _names(rank: int) -> list[dict[str, Any]]:
    def named(what: str, lane: int, name: str) -> dict[str, Any]:
        return {"name": what, "ph": "M", "pid": rank, "tid": lane, "args": {"name": name}}

    lanes = [named("thread_name", lane, name) for lane, name in enumerate(LANES)]
    return [named("process_name", 0, f"rank {rank}"), *lanes]
