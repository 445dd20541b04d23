"""Plans for people: a text table, and HTML that also reads well where no kernel runs."""

import base64
from html import escape
from typing import TYPE_CHECKING

from workbench.plan.choice import LayerPlan
from workbench.plan.explain import explained
from workbench.plan.graph import Graph, Layer
from workbench.plan.placement import Replicate
from workbench.plan.rules import SPLITTABLE
from workbench.plan.weights import heads_of

if TYPE_CHECKING:
    from workbench.plan.plan import Plan

# Okabe and Ito's palette: told apart by every kind of colour vision.
COLOURS = {
    "replicate": "#999999",
    "shard_out": "#0072b2",
    "shard_in": "#56b4e9",
    "shard_heads": "#009e73",
    "duplicate": "#e69f00",
}
_HEAD = (
    "layer",
    "kind",
    "scheme",
    "group",
    "pieces",
    "parameters",
    "per rank",
    "arrives by",
    "recompute",
)


def headline(plan: "Plan") -> str:
    """The plan in one line."""
    split = [
        f"{name}={choice.scheme}/{choice.group_size}"
        for name, choice in plan.layers.items()
        if choice.scheme != "replicate"
    ]
    shown = ", ".join(split[:4]) + (f", ... {len(split) - 4} more" if len(split) > 4 else "")
    return (
        f"<Plan {plan.graph.source.name} on {plan.world_size} ranks: "
        f"{shown or 'data parallel'}{rounds_of(plan)}{rows_of(plan)}{recomputed_of(plan)}>"
    )


def as_text(plan: "Plan") -> str:
    """One line for each layer with parameters or recomputed, each rank's totals, the reasons."""
    rows = [_HEAD, *(_row(plan, layer) for layer in _shown(plan))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([headline(plan), *lines, _totals(plan), *explained(plan)])


def as_html(plan: "Plan") -> str:
    """The same table in HTML, under a picture of what each rank holds."""
    head = "".join(f"<th style='text-align:left'>{name}</th>" for name in _HEAD)
    body = "".join(
        "<tr>" + "".join(f"<td style='text-align:left'>{escape(c)}</td>" for c in row) + "</tr>"
        for row in (_row(plan, layer) for layer in _shown(plan))
    )
    picture = base64.b64encode(pieces_svg(plan).encode()).decode()
    reasons = "<br>".join(map(escape, explained(plan)))
    label = escape(f"parameters that each of {plan.world_size} ranks holds")
    return (
        f"<div><p><b>{escape(plan.graph.source.name)}</b> on {plan.world_size} ranks"
        f"{escape(rounds_of(plan))}{rows_of(plan)}{recomputed_of(plan)}. "
        f"{escape(_totals(plan))}</p>"
        f'<img alt="{label}" src="data:image/svg+xml;base64,{picture}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        + (f"<p>{reasons}</p>" if reasons else "")
        + "</div>"
    )


def rows_of(plan: "Plan") -> str:
    """What a plan's line says of its rows: nothing where all ranks have the same."""
    shares = plan.row_shares
    return "" if shares is None else f", rows {':'.join(f'{share:g}' for share in shares)}"


def rounds_of(plan: "Plan") -> str:
    """What a plan's line says of its rounds: nothing where the tail runs at once."""
    return "" if plan.rounds == "BK" else f", in rounds {plan.rounds}"


def recomputed_of(plan: "Plan") -> str:
    """What a plan's line says of recomputation: nothing where all is kept for backward."""
    count = sum(choice.recompute for choice in plan.layers.values())
    return f", {count} layer{'s' * (count > 1)} recomputed" if count else ""


def pieces_svg(plan: "Plan", width: int = 860, lane: int = 24) -> str:
    """One lane for each rank: its piece of every layer, as wide as the layer has parameters."""
    left, gap = 64, 5
    layers = [layer for layer in plan.graph.layers if layer.parameters]
    total = max(plan.graph.parameters, 1)
    height = plan.world_size * (lane + gap) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">'
    ]
    for rank in range(plan.world_size):
        top = rank * (lane + gap)
        parts.append(
            f'<text x="{left - 6}" y="{top + lane * 0.68:.0f}" text-anchor="end" fill="#888">'
            f"rank {rank}</text>"
        )
        x = float(left)
        for layer in layers:
            span = (width - left - 6) * layer.parameters / total
            held = _held(plan, layer, rank)
            tall = lane * held / layer.parameters
            scheme = plan.layers.get(layer.name, LayerPlan()).scheme
            parts.append(
                f'<rect x="{x:.1f}" y="{top}" width="{max(span - 1, 0.6):.1f}" height="{lane}" '
                f'fill="#8882"/><rect x="{x:.1f}" y="{top + lane - tall:.1f}" '
                f'width="{max(span - 1, 0.6):.1f}" height="{tall:.1f}" fill="{COLOURS[scheme]}">'
                f"<title>{escape(layer.name)}: {held:,} of {layer.parameters:,}</title></rect>"
            )
            x += span
    x = float(left)
    for scheme, colour in COLOURS.items():
        parts.append(
            f'<rect x="{x:.0f}" y="{height - 14}" width="10" height="10" fill="{colour}"/>'
            f'<text x="{x + 14:.0f}" y="{height - 5}" fill="#888">{scheme}</text>'
        )
        x += 92
    return "".join(parts) + "</svg>"


def graph_html(graph: Graph) -> str:
    """The layers that hold parameters, as a table."""
    head = "".join(
        f"<th style='text-align:left'>{name}</th>"
        for name in ("layer", "kind", "input", "output", "parameters", "MFLOP", "activation KB")
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td style='text-align:left'>{escape(cell)}</td>"
            for cell in (
                layer.name,
                layer.kind,
                "x".join(map(str, layer.input_shape)),
                "x".join(map(str, layer.output_shape)),
                f"{layer.parameters:,}",
                f"{layer.flops / 1e6:,.2f}",
                f"{layer.activation_bytes / 1e3:,.1f}",
            )
        )
        + "</tr>"
        for layer in graph.layers
        if layer.parameters
    )
    more = f" FLOPs of {', '.join(graph.uncounted)} are not known." if graph.uncounted else ""
    return (
        f"<div><p><b>{escape(graph.source.name)}</b>: {graph.parameters:,} parameters, "
        f"{graph.flops / 1e6:,.0f} MFLOP for one sample of "
        f"{'x'.join(map(str, graph.input_shape))} (forward).{escape(more)}</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _shown(plan: "Plan") -> list[Layer]:
    segments = {name for segment in plan.segments for name in segment}
    return [layer for layer in plan.graph.layers if layer.parameters or layer.name in segments]


def _row(plan: "Plan", layer: Layer) -> tuple[str, ...]:
    choice = plan.layers.get(layer.name, LayerPlan())
    read = plan.flow.inputs[layer.name]
    held = [_held(plan, layer, rank) for rank in range(plan.world_size)]
    pieces = ""
    if layer.weights:
        weight = plan.flow.weights[layer.weights[0].name].placement
        pieces = "whole" if isinstance(weight, Replicate) else "/".join(map(str, weight.sizes))
    if choice.scheme == "shard_heads":
        pieces = f"{'/'.join(map(str, heads_of(layer, choice)))} heads"
    edges = plan.flow.edges
    steps = [step.name for producer in layer.inputs for step in edges[producer, layer.name]]
    numbers = (index for index, names in enumerate(plan.segments, 1) if layer.name in names)
    per_rank = f"{held[0]:,}" if len(set(held)) == 1 else f"{min(held):,}-{max(held):,}"
    return (
        layer.name,
        layer.kind,
        choice.scheme if layer.kind in SPLITTABLE else "follows",
        str(choice.group_size if layer.kind in SPLITTABLE else read.group_size),
        pieces,
        f"{layer.parameters:,}",
        per_rank,
        ", ".join(steps),
        "".join(f"segment {number}" for number in numbers),
    )


def _held(plan: "Plan", layer: Layer, rank: int) -> int:
    weights = plan.flow.weights
    return sum(weights[w.name].piece_numel(rank) for w in layer.weights if w.trainable)


def _totals(plan: "Plan") -> str:
    whole = plan.graph.parameters
    held = [plan.parameters_of(rank) for rank in range(plan.world_size)]
    if len(set(held)) == 1:
        return f"Each rank holds {held[0]:,} of {whole:,} parameters ({held[0] / whole:.1%})."
    per_rank = ", ".join(f"{n:,}" for n in held)
    return f"The ranks hold {per_rank} of {whole:,} parameters (at most {max(held) / whole:.1%})."
