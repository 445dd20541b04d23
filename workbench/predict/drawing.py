"""A step in time as a picture: two lanes for each rank, readable in light and dark."""

from collections.abc import Mapping, Sequence
from html import escape

from workbench.plan.span import LANES, Span
from workbench.predict.time.schedule import Schedule

# Of middling lightness, so that they stand out from white as from black.
COLOURS = {
    "load": "#8c8c8c",
    "forward": "#3f8fd2",
    "loss": "#7a6fd0",
    "backward": "#d9822b",
    "collective": "#2e9e6b",
    "wait": "#c94f4f",
    "update": "#a86cc1",
    "step": "#8c8c8c",
}
_MOST_RANKS = 8
_NO_GAP = 0.3  # of the picture's width unit: nobody sees it
_WIDTH, _LEFT, _LANE, _GAP = 760, 64, 12, 6
_TEXT = "fill='currentColor' font-size='11' font-family='sans-serif'"


def svg(schedule: Schedule) -> str:
    """The step of the first ranks that differ."""
    spans = {f"rank {rank:,}": schedule.spans(rank) for rank in shown_ranks(schedule)}
    return picture(spans, "Predicted step")


def picture(spans: Mapping[str, Sequence[Span]], title: str) -> str:
    """Two lanes for each of some lists of spans, on one scale.

    Args:
        spans: in order, by what stands before the lanes.
        title: what is seen, for those who do not see it.
    """
    end = max((span.end_s for own in spans.values() for span in own), default=0.0)
    scale = (_WIDTH - _LEFT) / end if end > 0 else 0.0
    lanes = [lane for lane in LANES if any(s.lane == lane for own in spans.values() for s in own)]
    height = len(lanes) * _LANE + _GAP
    parts = []
    for row, (name, own) in enumerate(spans.items()):
        top = row * height
        parts.append(f"<text x='0' y='{top + 10}' {_TEXT}>{escape(name)}</text>")
        for index, lane in enumerate(lanes):
            mine = [span for span in own if span.lane == lane]
            parts += _lane(mine, top + index * _LANE, scale)
    bottom = len(spans) * height
    parts.append(f"<text x='{_LEFT}' y='{bottom + 12}' {_TEXT}>0</text>")
    parts.append(
        f"<text x='{_WIDTH}' y='{bottom + 12}' text-anchor='end' {_TEXT}>{end * 1e3:,.3g} ms</text>"
    )
    found = {span.what for own in spans.values() for span in own}
    parts += _legend([what for what in COLOURS if what in found], bottom + 30)
    label = f"{title}: compute lane above, communication lane below, of each rank"
    return (
        f"<svg viewBox='0 0 {_WIDTH} {bottom + 36}' width='{_WIDTH}' role='img' "
        f"aria-label='{escape(label)}' style='max-width:100%'>{''.join(parts)}</svg>"
    )


def shown_ranks(schedule: Schedule, most: int = _MOST_RANKS) -> tuple[int, ...]:
    """The first ranks; of a large world, of those that stand for the others."""
    if schedule.world_size <= most:
        return tuple(range(schedule.world_size))
    return tuple(schedule.alike.ranks[:most].tolist())


def _lane(spans: Sequence[Span], top: int, scale: float) -> list[str]:
    """Spans of one kind that follow each other at once are one rectangle."""
    runs: list[list[Span]] = []
    for span in spans:
        last = runs[-1][-1] if runs else None
        gap = 0.0 if last is None else (span.start_s - last.end_s) * scale
        if last is not None and last.what == span.what and gap <= _NO_GAP:
            runs[-1].append(span)
        else:
            runs.append([span])
    return [_rectangle(run, top, scale) for run in runs]


def _rectangle(run: Sequence[Span], top: int, scale: float) -> str:
    first, last = run[0], run[-1]
    length = last.end_s - first.start_s
    labels = first.label if len(run) == 1 else f"{first.label} to {last.label}"
    title = f"{first.what} {first.op} {labels}: {length * 1e3:.4g} ms"
    return (
        f"<rect x='{_LEFT + first.start_s * scale:.2f}' y='{top}' "
        f"width='{max(length * scale, 0.4):.2f}' height='{_LANE - 1}' "
        f"fill='{COLOURS[first.what]}'><title>{escape(title)}</title></rect>"
    )


def _legend(kinds: Sequence[str], y: int) -> list[str]:
    parts: list[str] = []
    x = _LEFT
    for what in kinds:
        parts.append(f"<rect x='{x}' y='{y - 9}' width='10' height='10' fill='{COLOURS[what]}'/>")
        parts.append(f"<text x='{x + 14}' y='{y}' {_TEXT}>{what}</text>")
        x += 84
    return parts
