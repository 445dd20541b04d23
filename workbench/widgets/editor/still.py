"""An editor as a still picture with tables: what is left of it where no kernel runs."""

from collections.abc import Mapping
from html import escape
from typing import Any

from workbench.plan.graph import Layer
from workbench.plan.plan import Plan
from workbench.plan.rules import SPLITTABLE
from workbench.predict.tables import html_table, shortened
from workbench.widgets.charts import image
from workbench.widgets.editor.picture import svg
from workbench.widgets.editor.rows import Columns
from workbench.widgets.units import digits, milliseconds, size

MOST_ROWS = 80
MOST_RANKS = 16
_HEAD = (
    "layer", "kind", "shape", "parameters", "scheme", "group", "pieces", "arrives by",
    "recompute", "memory", "time", "received",
)  # fmt: skip


def html(plan: Plan, columns: Columns, values: Mapping[str, Any]) -> str:
    """The picture of devices and the tables, in HTML that untrusted notebooks show too."""
    predicted = values["predicted"]
    title = f"Plan of {plan.graph.source.name} on {plan.world_size:,} ranks"
    parts = [f"<p><b>{escape(title)}</b>. {escape(_totals(predicted))}</p>"]
    if values["complaint"]:
        parts.append(f"<p>No prediction: {escape(values['complaint'])}</p>")
    parts.append(image(svg(plan), f"{title}: what each rank holds"))
    if predicted is not None:
        parts.append(_ranks(predicted, plan.world_size))
    rows = [
        _row(layer, {name: column[index] for name, column in columns.items()})
        for index, layer in enumerate(plan.graph.layers)
        if layer.parameters or columns["arrives"][index] or columns["segment"][index]
    ]
    table = html_table("Layers", _HEAD, shortened(rows[:MOST_ROWS], len(rows), "layers"))
    return f"<div>{''.join(parts)}<details open><summary>Layers</summary>{table}</details></div>"


def _totals(predicted: Mapping[str, Any] | None) -> str:
    if predicted is None:
        return "Not predicted yet."
    totals = predicted["totals"]
    text = (
        f"At most {size(totals['peak_bytes'])} per rank; {size(totals['received_bytes'])} received "
        "per step"
    )
    if totals["step_s"] is None:
        return f"{text}."
    return (
        f"{text}; {milliseconds(totals['step_s'])} per step, "
        f"{digits(totals['samples_per_s'])} samples/s."
    )


def _ranks(predicted: Mapping[str, Any], world_size: int) -> str:
    rows: list[tuple[str, ...]] = []
    for rank in predicted["ranks"][:MOST_RANKS]:
        limit = rank["limit"]
        over = "" if limit is None or rank["peak"] <= limit else "over"
        of = "unknown" if limit is None else size(limit)
        rows.append((str(rank["rank"]), size(rank["peak"]), of, over, rank["when"]))
    head = ("rank", "peak", "of", "budget", "when")
    return html_table("Memory", head, shortened(rows, world_size, "ranks"))


def _row(layer: Layer, cell: Mapping[str, Any]) -> tuple[str, ...]:
    split = layer.kind in SPLITTABLE
    received = cell.get("moved", 0) + cell.get("summed", 0)
    seconds = cell.get("work_s", 0) + cell.get("exchange_s", 0)
    return (
        _short(layer.name),
        layer.kind,
        "×".join(map(str, layer.output_shape)),
        f"{layer.parameters:,}",
        cell["scheme"] if split else "follows",
        str(cell["group"]) if split else "",
        cell["pieces"],
        "; ".join(cell["arrives"]),
        f"segment {cell['segment']}" if cell["segment"] else "",
        size(cell["memory"]) if "memory" in cell else "",
        milliseconds(seconds) if seconds else "",
        size(received) if received else "",
    )


def _short(name: str, most: int = 60) -> str:
    return name if len(name) <= most else f"{name[: most // 2]}…{name[1 - most // 2 :]}"
