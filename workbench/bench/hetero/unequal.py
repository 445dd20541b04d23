"""Plans of unequal parts, drawn at random for each model: exactness must not depend on them."""

import random

from workbench.plan.graph import Graph
from workbench.plan.placement.rules import SPLITTABLE
from workbench.plan.plan import Plan

WORLD = 4
_MOST = 9


def plans(graph: Graph) -> dict[str, Plan]:
    """Plans by label: filters with random shares, with none on a rank, by layer, beside rows."""
    rng = random.Random(graph.source.name)
    whole = Plan.filters(graph, WORLD, _drawn(rng, WORLD))
    none = Plan.filters(graph, WORLD, _drawn(rng, WORLD, zero=True), grain=1)
    layers = [layer.name for layer in graph.layers if layer.kind in SPLITTABLE]
    each = {name: _drawn(rng, WORLD, zero=index % 3 == 0) for index, name in enumerate(layers)}
    by_layer = Plan.filters(graph, WORLD, each, grain=1)
    groups = Plan.filters(graph, WORLD, _drawn(rng, 2), group_size=2)
    hybrid = Plan.hybrid(graph, WORLD)
    return {
        "filters": whole,
        "filters, none on a rank": none,
        "filters by layer, rows": by_layer.with_rows(_drawn(rng, WORLD, zero=True)),
        "filters 2 x 2, rows": groups.with_rows(_drawn(rng, WORLD, zero=True)),
        "hybrid, rows": hybrid.with_rows(_drawn(rng, WORLD, zero=True)),
    }


def _drawn(rng: random.Random, ranks: int, *, zero: bool = False) -> tuple[int, ...]:
    """Random shares, one of which is zero if `zero`."""
    shares = [rng.randint(1, _MOST) for _ in range(ranks)]
    if zero:
        shares[rng.randrange(ranks)] = 0
    return tuple(shares)
