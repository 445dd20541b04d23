"""Spans as a trace file for chrome://tracing and Perfetto: a process for each rank, with lanes.

Source: the Trace Event Format of Chromium's tracing (complete events "X", metadata events "M"),
which ui.perfetto.dev reads as well.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from workbench.plan.span import LANES, Span

MICRO = 1e6


def trace_of(spans: Iterable[Span]) -> dict[str, Any]:
    """The trace, as what JSON can say; times in microseconds."""
    events: list[dict[str, Any]] = []
    ranks: dict[int, None] = {}
    for span in spans:
        ranks.setdefault(span.rank)
        events.append(_event(span))
    named = [event for rank in ranks for event in _names(rank)]
    return {"displayTimeUnit": "ms", "traceEvents": named + events}


def save_trace(spans: Iterable[Span], path: str | Path) -> None:
    """Writes the trace to a file."""
    Path(path).write_text(json.dumps(trace_of(spans)))


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
