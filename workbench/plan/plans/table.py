"""Plans as a text table, and as HTML that also reads well without a kernel."""

from typing import TYPE_CHECKING, Protocol

from workbench.plan.display import svg
from workbench.plan.graph.graph import Layer
from workbench.plan.io.html import Markup, element, frame_of, lines, table, text_table
from workbench.plan.placement.flow import Flow, heads_of
from workbench.plan.placement.layer_plan import LayerPlan
from workbench.plan.placement.placement import Replicate
from workbench.plan.placement.presets import explained
from workbench.plan.placement.rules import SPLITTABLE, is_by_tokens
from workbench.plan.plans.toml import PlanFields

if TYPE_CHECKING:
    import pandas

# Okabe and Ito's palette: told apart by every kind of color vision.
COLORS = {
    "replicate": "#999999",
    "shard_out": "#0072b2",
    "shard_in": "#56b4e9",
    "shard_heads": "#009e73",
    "duplicate": "#e69f00",
}
OWN_COLOR = "#cc79a7"
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


_COLUMNS = (*(name for name in _HEAD if name != "per rank"), "least_held", "most_held")


class ShownPlan(PlanFields, Protocol):
    """The parts of a `Plan` that are shown: its choices, and what follows from them."""

    @property
    def flow(self) -> Flow: ...

    @property
    def is_at_hand(self) -> bool: ...

    @property
    def segments(self) -> tuple[tuple[str, ...], ...]: ...

    def parameters_of(self, rank: int) -> int: ...


def headline(plan: ShownPlan) -> str:
    """The plan in one line."""
    split = [
        f"{name}={choice.name}/{choice.group_size}"
        for name, choice in plan.layers.items()
        if choice.scheme != "replicate"
    ]
    shown = ", ".join(split[:4]) + (f", ... {len(split) - 4} more" if len(split) > 4 else "")
    return (
        f"<Plan {plan.graph.source.name} on {plan.world_size} ranks: "
        f"{shown or 'data parallel'}{rounds_of(plan)}{rows_of(plan)}{tokens_of(plan)}"
        f"{recomputed_of(plan)}>"
    )


def as_text(plan: ShownPlan) -> str:
    """One line for each layer with parameters or recomputed, each rank's totals, the reasons."""
    if not plan.is_at_hand:
        return "\n".join([headline(plan), _absent(plan)])
    lines = text_table(_HEAD, [_row(plan, layer) for layer in _shown(plan)])
    return "\n".join([headline(plan), *lines, _totals(plan), *explained(plan.graph, plan.layers)])


def as_frame(plan: ShownPlan) -> "pandas.DataFrame":
    """A line for each layer with parameters or recomputed; what ranks hold is in elements."""
    rows = []
    for layer in _shown(plan):
        said = dict(zip(_HEAD, _row(plan, layer), strict=True))
        held = [_held(plan, layer, rank) for rank in range(plan.world_size)]
        numbers = {
            "group": int(said["group"]),
            "parameters": layer.parameters,
            "least_held": min(held),
            "most_held": max(held),
        }
        rows.append(said | numbers)
    return frame_of(rows, _COLUMNS)


def as_html(plan: ShownPlan) -> Markup:
    """The same table in HTML, under a picture of what each rank holds."""
    if not plan.is_at_hand:
        return element("div", element("p", headline(plan)), element("p", _absent(plan)))
    rows = (_row(plan, layer) for layer in _shown(plan))
    reasons = explained(plan.graph, plan.layers)
    label = f"parameters that each of {plan.world_size} ranks holds"
    told = (
        f" on {plan.world_size} ranks{rounds_of(plan)}{rows_of(plan)}{tokens_of(plan)}"
        f"{recomputed_of(plan)}. {_totals(plan)}"
    )
    return element(
        "div",
        element("p", element("b", plan.graph.source.name), told),
        svg.image(pieces_svg(plan), label),
        table(_HEAD, rows),
        *([element("p", lines(reasons))] if reasons else []),
    )


def _absent(plan: ShownPlan) -> str:
    names = {choice.name for choice in plan.layers.values() if not choice.is_at_hand}
    return (
        f"What each rank holds is not known here: {', '.join(sorted(names))} was an object of the "
        "process that made the plan, or is named in a text, which was read without trust=True: "
        "give it again with plan.with_layer(..., scheme=...)"
    )


def rows_of(plan: ShownPlan) -> str:
    """The rows in a plan's headline; empty where all ranks have the same."""
    shares = plan.row_shares
    return "" if shares is None else f", rows {':'.join(f'{share:g}' for share in shares)}"


def tokens_of(plan: ShownPlan) -> str:
    """The tokens in a plan's headline, and how many layers see some; empty where rows are own."""
    shares = plan.shard_tokens
    if not shares:
        return ""
    each = "" if isinstance(shares, bool) else f" {':'.join(f'{share:g}' for share in shares)}"
    if not plan.is_at_hand:
        return f", tokens{each} divided"
    inputs, layers = plan.flow.inputs, plan.graph.layers
    count = sum(is_by_tokens(inputs[one.name], one.input_shape) for one in layers)
    return f", tokens{each} of {count} layer{'s' * (count != 1)} divided"


def rounds_of(plan: ShownPlan) -> str:
    """The rounds in a plan's headline; empty where the tail runs at once."""
    return "" if plan.rounds == "BK" else f", in rounds {plan.rounds}"


def recomputed_of(plan: ShownPlan) -> str:
    """The recomputation in a plan's headline; empty where no layer is recomputed."""
    count = sum(choice.recompute for choice in plan.layers.values())
    return f", {count} layer{'s' * (count > 1)} recomputed" if count else ""


def pieces_svg(plan: ShownPlan, width: int = 860, lane: int = 24) -> str:
    """One lane for each rank: its piece of every layer, as wide as the layer has parameters."""
    left, gap = 64, 5
    layers = [layer for layer in plan.graph.layers if layer.parameters]
    total = max(plan.graph.parameters, 1)
    height = plan.world_size * (lane + gap) + 24
    parts = []
    for rank in range(plan.world_size):
        top = rank * (lane + gap)
        parts.append(svg.text(left - 6, top + 0.68 * lane, f"rank {rank}", "end", fill="#888"))
        x = float(left)
        for layer in layers:
            span = (width - left - 6) * layer.parameters / total
            held = _held(plan, layer, rank)
            tall = lane * held / layer.parameters
            scheme = plan.layers.get(layer.name, LayerPlan()).name
            wide, said = max(span - 1, 0.6), f"{layer.name}: {held:,} of {layer.parameters:,}"
            parts.append(svg.rect(x, top, wide, lane, fill="#8882"))
            parts.append(svg.rect(x, top + lane - tall, wide, tall, said, fill=color_of(scheme)))
            x += span
    own = {choice.name: OWN_COLOR for choice in plan.layers.values() if choice.is_own}
    parts += svg.legend((COLORS | own).items(), left, height - 5, 92, fill="#888")
    return svg.document(parts, width, height, font_family="sans-serif", font_size=11)


def color_of(scheme: str) -> str:
    """The color of a scheme, by its name: of all own ones, the same."""
    return COLORS.get(scheme, OWN_COLOR)


def _shown(plan: ShownPlan) -> list[Layer]:
    segments = {name for segment in plan.segments for name in segment}
    return [layer for layer in plan.graph.layers if layer.parameters or layer.name in segments]


def _row(plan: ShownPlan, layer: Layer) -> tuple[str, ...]:
    choice = plan.layers.get(layer.name, LayerPlan())
    read = plan.flow.inputs[layer.name]
    held = [_held(plan, layer, rank) for rank in range(plan.world_size)]
    pieces = ""
    if layer.weights:
        weight = plan.flow.weights[layer.weights[0].name].placement
        pieces = "whole" if isinstance(weight, Replicate) else "/".join(map(str, weight.sizes))
    if (heads := heads_of(layer, choice)) is not None:
        pieces = f"{'/'.join(map(str, heads))} heads"
    edges = plan.flow.edges
    steps = [step.name for producer in layer.inputs for step in edges[producer, layer.name]]
    numbers = (index for index, names in enumerate(plan.segments, 1) if layer.name in names)
    splits = layer.kind in SPLITTABLE or choice.group_size > 1
    per_rank = f"{held[0]:,}" if len(set(held)) == 1 else f"{min(held):,}-{max(held):,}"
    return (
        layer.name,
        layer.kind,
        choice.name if splits else "follows",
        str(choice.group_size if splits else read.group_size),
        pieces,
        f"{layer.parameters:,}",
        per_rank,
        ", ".join(steps),
        "".join(f"segment {number}" for number in numbers),
    )


def _held(plan: ShownPlan, layer: Layer, rank: int) -> int:
    weights = plan.flow.weights
    return sum(weights[w.name].piece_numel(rank) for w in layer.weights if w.trainable)


def _totals(plan: ShownPlan) -> str:
    whole = max(plan.graph.parameters, 1)
    held = [plan.parameters_of(rank) for rank in range(plan.world_size)]
    if len(set(held)) == 1:
        return f"Each rank holds {held[0]:,} of {whole:,} parameters ({held[0] / whole:.1%})."
    per_rank = ", ".join(f"{n:,}" for n in held)
    return f"The ranks hold {per_rank} of {whole:,} parameters (at most {max(held) / whole:.1%})."
