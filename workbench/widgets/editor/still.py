"""An editor as a still picture with tables: what is left of it where no kernel runs."""

from collections.abc import Mapping
from typing import Any

from workbench.plan.display import svg
from workbench.plan.display.panels import FAINT, INK, RULE
from workbench.plan.graph.graph import Layer
from workbench.plan.io.html import Markup, element, folded, shortened, table
from workbench.plan.io.units import digits, milliseconds, size
from workbench.plan.io.units import shortened as shortened_name
from workbench.plan.placement.rules import SPLITTABLE
from workbench.plan.plans.plan import Plan
from workbench.plan.plans.table import color_of
from workbench.widgets.editor.rows import MOST_RANKS, Columns, runs


def devices_svg(plan: Plan) -> Markup:
    """One lane for each rank: what it holds of every run of layers, wide as their parameters."""
    width, lane, left, gap, found = 860, 22, 64, 5, runs(plan)
    shown = min(plan.world_size, MOST_RANKS)
    total = max(sum(run.parameters for run in found), 1)
    height = shown * (lane + gap) + 40
    parts = [svg.ground()]
    for rank in range(shown):
        y, x = 4 + rank * (lane + gap), float(left)
        parts.append(svg.text(left - 6, y + 0.68 * lane, f"rank {rank}", "end", fill=INK))
        for run in found:
            span = (width - left - 6) * run.parameters / total
            tall = lane * run.held[rank] / run.parameters
            wide = max(span - 1, 0.6)
            parts.append(svg.rect(x, y, wide, lane, fill=RULE))
            parts.append(svg.rect(x, y + lane - tall, wide, tall, fill=color_of(run.scheme)))
            x += span
    y = shown * (lane + gap) + 10
    if plan.world_size > shown:
        more = f"and {plan.world_size - shown:,} more ranks"
        parts.append(svg.text(left, y + 4, more, fill=FAINT))
    colors = {run.scheme: color_of(run.scheme) for run in found}.items()
    parts += svg.legend(colors, left, y + 19, 96, fill=FAINT)
    return svg.document(parts, width, height, font_size=11)


MOST_ROWS = 80
_HEAD = (
    "layer", "kind", "shape", "parameters", "scheme", "group", "pieces", "arrives by",
    "recompute", "memory", "time", "received",
)  # fmt: skip


def html(plan: Plan, columns: Columns, values: Mapping[str, Any]) -> Markup:
    """The picture of devices and the tables, in HTML that untrusted notebooks show too."""
    predicted = values["predicted"]
    title = f"Plan of {plan.graph.source.name} on {plan.world_size:,} ranks"
    parts = [element("p", element("b", title), f". {_totals(predicted)}")]
    if values["complaint"]:
        parts.append(element("p", f"No prediction: {values['complaint']}"))
    parts.append(svg.image(devices_svg(plan), f"{title}: what each rank holds"))
    if predicted is not None:
        parts.append(_ranks(predicted, plan.world_size))
    rows = [
        _row(layer, {name: column[index] for name, column in columns.items()})
        for index, layer in enumerate(plan.graph.layers)
        if layer.parameters or columns["arrives"][index] or columns["segment"][index]
    ]
    layers = table(_HEAD, shortened(rows[:MOST_ROWS], len(rows), "layers"), "Layers")
    return element("div", *parts, folded("Layers", layers, is_open=True))


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


def _ranks(predicted: Mapping[str, Any], world_size: int) -> Markup:
    rows: list[tuple[str, ...]] = []
    for rank in predicted["ranks"][:MOST_RANKS]:
        limit = rank["limit"]
        over = "" if limit is None or rank["peak"] <= limit else "over"
        of = "unknown" if limit is None else size(limit)
        rows.append((str(rank["rank"]), size(rank["peak"]), of, over, rank["when"]))
    head = ("rank", "peak", "of", "budget", "when")
    return table(head, shortened(rows, world_size, "ranks"), "Memory")


def _row(layer: Layer, cell: Mapping[str, Any]) -> tuple[str, ...]:
    split = layer.kind in SPLITTABLE or cell["group"] > 1
    received = cell.get("moved", 0) + cell.get("summed", 0)
    seconds = cell.get("work_s", 0) + cell.get("exchange_s", 0)
    return (
        shortened_name(layer.name, 60),
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
