"""Comparisons for people: tables of text, and HTML with both timelines above each other."""

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from workbench.predict.drawing import picture
from workbench.predict.tables import html_table, shortened, text_table

if TYPE_CHECKING:
    from workbench.predict.compare import Comparison, Pair

MIB = 2**20
_LINES = 40
_DRAWN_RANKS = 4
_THREE = ("predicted", "measured", "error")
_RANKS = (
    "rank",
    *(f"{what} {which}" for what in ("step ms", "peak MiB", "kB received") for which in _THREE),
)
_PARTS = ("what", "predicted ms", "measured ms", "difference ms", "error")
_OF_RANKS = "Every rank: its step, its memory, what it receives"
_OF_PARTS = "Every part of a step, in the mean over ranks; the furthest off first"


def as_text(comparison: "Comparison") -> str:
    """Both tables."""
    tables = (text_table(_RANKS, _ranks(comparison)), text_table(_PARTS, _parts(comparison)))
    return "\n\n".join([repr(comparison), *map("\n".join, tables), _note(comparison)])


def as_html(comparison: "Comparison") -> str:
    """The same in HTML, below the predicted and the measured step of each rank."""
    heading, _, rest = repr(comparison).strip("<>").partition(": ")
    line, schedule = comparison.timeline, comparison.prediction.timeline
    spans = {}
    for rank in range(line.world_size)[:_DRAWN_RANKS]:
        spans[f"{rank} predicted"] = schedule.spans(rank)
        spans[f"{rank} measured"] = line.spans(rank)
    return (
        f"<div><p><b>{escape(heading)}</b>: {escape(rest)}</p>"
        f"{picture(spans, 'Predicted above measured step, rank by rank')}"
        f"{html_table(_OF_RANKS, _RANKS, _ranks(comparison))}"
        f"{html_table(_OF_PARTS, _PARTS, _parts(comparison))}"
        f"<p>{escape(_note(comparison))}</p></div>"
    )


def _note(comparison: "Comparison") -> str:
    steps = [line.step for line in comparison.measurement.timelines]
    some = ", ".join(map(str, steps[:5])) + (", ..." if len(steps) > 5 else "")
    return f"Parts of a step, and bytes: as traced in {len(steps)} steps ({some}), their median."


def _ranks(comparison: "Comparison") -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for row in comparison.ranks[:_LINES]:
        cells = (*_three(row.step_s, 1e3), *_three(row.peak_bytes, 1 / MIB))
        rows.append((str(row.rank), *cells, *_three(row.received_bytes, 1e-3)))
    return shortened(rows, len(comparison.ranks), "ranks")


def _parts(comparison: "Comparison") -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for part, pair in list(comparison.parts.items())[:_LINES]:
        predicted, measured, error = _three(pair, 1e3)
        rows.append((str(part), predicted, measured, f"{pair.difference * 1e3:+,.3f}", error))
    return shortened(rows, len(comparison.parts), "parts")


def _three(pair: "Pair", scale: float) -> Iterable[str]:
    return (
        f"{pair.predicted * scale:,.3f}",
        f"{pair.measured * scale:,.3f}",
        f"{pair.error:+.1%}" if pair.measured else "-",
    )
