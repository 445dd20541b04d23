"""Predictions for people: tables of text, and HTML that also reads well where no kernel runs."""

from collections.abc import Sequence
from html import escape

from workbench.predict.memory import Memory
from workbench.predict.timeline import CATEGORIES
from workbench.predict.traffic import Traffic

MIB = 2**20
_MEMORY = ("rank", "peak MiB", *(name.replace("_", " ") for name in CATEGORIES), "when")
_TRAFFIC = ("collective", "phase", "of", "calls", "messages", "kB received")
_LINES = 40


def as_text(title: str, memory: Memory, traffic: Traffic) -> str:
    """Both tables."""
    tables = (_lines(_MEMORY, _memory(memory)), _lines(_TRAFFIC, _traffic(traffic)))
    return "\n\n".join([title, *map("\n".join, tables), *_caution(memory)])


def as_html(title: str, memory: Memory, traffic: Traffic) -> str:
    """The same in HTML."""
    heading, _, rest = title.strip("<>").partition(": ")
    tables = (
        _table("Memory at the highest point, MiB", _MEMORY, _memory(memory)),
        _table("Received in a step, by the rank that receives most", _TRAFFIC, _traffic(traffic)),
    )
    notes = "".join(f"<p>{escape(note)}</p>" for note in _caution(memory))
    return f"<div><p><b>{escape(heading)}</b>: {escape(rest)}.</p>{''.join(tables)}{notes}</div>"


def _caution(memory: Memory) -> list[str]:
    """What a reader must know to judge the figures."""
    if not memory.guessed:
        return []
    more = f" and {len(memory.guessed) - 3} more" if len(memory.guessed) > 3 else ""
    named = ", ".join(memory.guessed[:3]) + more
    return [f"Too little, perhaps: what {named} keep for their backward pass is not known."]


def _memory(memory: Memory) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for rank in memory.ranks[:_LINES]:
        sizes = (rank.peak_bytes, *rank.categories.values())
        rows.append((str(rank.rank), *(f"{n / MIB:,.1f}" for n in sizes), str(rank.moment)))
    return _shortened(rows, len(memory.ranks), "ranks")


def _traffic(traffic: Traffic) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for one in traffic.collectives[:_LINES]:
        often = "" if one.every == 1 else f" every {one.every} steps"
        counts = (f"{max(one.calls):,}", f"{max(one.messages):,}", f"{max(one.bytes) / 1e3:,.1f}")
        rows.append((one.op, one.phase + often, one.layer, *counts))
    return _shortened(rows, len(traffic.collectives), "collectives")


def _shortened(rows: list[tuple[str, ...]], count: int, what: str) -> list[tuple[str, ...]]:
    if count > len(rows):
        rows.append((f"... {count - len(rows)} more {what}", *[""] * (len(rows[0]) - 1)))
    return rows


def _lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    every = [head, *rows]
    widths = [max(len(row[i]) for row in every) for i in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in every
    ]


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th style='text-align:left'>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td style='text-align:left'>{escape(c)}</td>" for c in row) + "</tr>"
        for row in rows
    )
    return (
        f"<table><caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )
