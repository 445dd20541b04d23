"""Devices and what each of them holds, with shares to scale: a picture without scripts."""

import math
from dataclasses import dataclass
from html import escape

from workbench.plan.choice import LayerPlan
from workbench.plan.graph import Layer
from workbench.plan.placement import Replicate
from workbench.plan.plan import Plan
from workbench.plan.rules import SPLITTABLE
from workbench.plan.show import COLOURS
from workbench.plan.weights import WeightPlacement
from workbench.widgets.charts import FAINT, FONT, INK, RULE

MOST_RANKS = 16  # that are drawn
_WHOLE = LayerPlan()
_Alike = tuple[str, int, tuple[float, ...] | None]  # scheme, size of groups, shares


@dataclass(frozen=True)
class Run:
    """Layers next to each other that are split alike: one piece of the picture of devices.

    Attributes:
        first: name of the first one.
        last: of the last one.
        scheme: of those that can be split; norms between them count with them.
        group: size of the groups that they lie over.
        parameters: of all of them.
        held: by each rank that is shown.
    """

    first: str
    last: str
    scheme: str
    group: int
    parameters: int
    held: tuple[int, ...]


def runs(plan: Plan, most_ranks: int = MOST_RANKS) -> tuple[Run, ...]:
    """What ranks 0, 1, ... hold, in the model's order."""
    found: list[tuple[_Alike, list[Layer], list[tuple[int, ...]]]] = []
    weights = plan.flow.weights
    ranks = range(min(plan.world_size, most_ranks))
    for layer in plan.graph.layers:
        if not layer.parameters:
            continue
        choice = plan.layers.get(layer.name, _WHOLE)
        placed = [weights[w.name] for w in layer.weights if w.trainable]
        split = any(not isinstance(one.placement, Replicate) for one in placed)
        group = max(one.group_size for one in placed)
        held = _held(placed, ranks) if split else (layer.parameters,) * len(ranks)
        alike = (choice.scheme, group, choice.shares)
        # Norms are a few parameters, and lie as what they follow.
        if not found or (alike != found[-1][0] and layer.kind in SPLITTABLE):
            found.append((alike, [], []))
        _, layers, pieces = found[-1]
        layers.append(layer)
        pieces.append(held)
    return tuple(_run(*each) for each in found)


def _run(alike: _Alike, layers: list[Layer], pieces: list[tuple[int, ...]]) -> Run:
    scheme, group, _ = alike
    held = tuple(map(sum, zip(*pieces, strict=True)))
    parameters = sum(layer.parameters for layer in layers)
    return Run(layers[0].name, layers[-1].name, scheme, group, parameters, held)


def _held(placed: list[WeightPlacement], ranks: range) -> tuple[int, ...]:
    """Elements on each rank; ranks at one position of their groups hold the same."""
    size = math.lcm(*(one.group_size for one in placed))
    first = [sum(one.piece_numel(rank) for one in placed) for rank in ranks[:size]]
    return tuple(first[rank % size] for rank in ranks)


def svg(plan: Plan, *, width: int = 860, lane: int = 22) -> str:
    """One lane for each rank: what it holds of every run of layers, wide as their parameters."""
    left, gap, found = 64, 5, runs(plan)
    shown = min(plan.world_size, MOST_RANKS)
    total = max(sum(run.parameters for run in found), 1)
    height = shown * (lane + gap) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="{FONT}" font-size="11">'
        '<rect width="100%" height="100%" fill="#fff"/>'
    ]
    for rank in range(shown):
        y, x = 4 + rank * (lane + gap), float(left)
        parts.append(_text(left - 6, y + 0.68 * lane, f"rank {rank}", INK, "end"))
        for run in found:
            span = (width - left - 6) * run.parameters / total
            tall = lane * run.held[rank] / run.parameters
            wide = max(span - 1, 0.6)
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{lane}" fill="{RULE}"/>'
                f'<rect x="{x:.1f}" y="{y + lane - tall:.1f}" width="{wide:.1f}" '
                f'height="{tall:.1f}" fill="{COLOURS[run.scheme]}"/>'
            )
            x += span
    y, x = shown * (lane + gap) + 10, float(left)
    if plan.world_size > shown:
        parts.append(_text(left, y + 4, f"and {plan.world_size - shown:,} more ranks", FAINT))
    for scheme in dict.fromkeys(run.scheme for run in found):
        fill = COLOURS[scheme]
        parts.append(f'<rect x="{x:.0f}" y="{y + 10}" width="10" height="10" fill="{fill}"/>')
        parts.append(_text(x + 14, y + 19, scheme, FAINT))
        x += 96
    return "".join(parts) + "</svg>"


def _text(x: float, y: float, text: str, colour: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">'
        f"{escape(text)}</text>"
    )
