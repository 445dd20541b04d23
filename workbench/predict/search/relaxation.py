"""Lower bounds of predicted step times, and the plans that attain them.

With f, b, g, u the seconds of a plan's forward pass, backward pass, gradient reduction and update,
on average over ranks, a step takes at least

    f + b + s g + u       sums hold up the compute lane of the same rank for s of their time
    f + g + u             sums begin when forward has ended, and follow each other

and so does any mean of the two, which is a sum over layers and conversions. Memory is left to
`memory_limit.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from workbench.plan.placement.layer_plan import LayerPlan
from workbench.predict.search.costs import (
    BACKWARD,
    FORWARD,
    GRADIENTS,
    LAYER,
    UPDATE,
)
from workbench.predict.search.trellis import Floats, Stage, Trellis, Weighted

_MOST_MEETINGS = 12


@dataclass(frozen=True)
class Terms:
    """The terms that all bounds of a search have in common.

    Attributes:
        fixed: the seconds that every plan takes: loading, and the fixed cost of a step.
        slowed: the share of a gradient reduction's time that its rank loses on the compute lane.
        apart: whether gradient reductions begin only after the forward pass.
    """

    fixed: float
    slowed: float
    apart: bool


@dataclass(frozen=True)
class RelaxedPlan:
    """A plan that is cheapest at some mean of the two bounds.

    Attributes:
        serial_s: the first bound, f + b + s g + u, in seconds.
        overlapped_s: the second bound, f + g + u, in seconds.
    """

    choices: dict[str, LayerPlan]
    serial_s: float
    overlapped_s: float

    def seconds(self, mix: float) -> float:
        """The mean of both bounds of its step time, in seconds."""
        return (1 - mix) * self.serial_s + mix * self.overlapped_s

    @property
    def least_seconds(self) -> float:
        """The greater of both bounds, in seconds."""
        return max(self.serial_s, self.overlapped_s)


@dataclass(frozen=True)
class Priced:
    """All plans, priced at one mean of the two bounds.

    Attributes:
        mix: the share of the second bound.
        paths: all paths by cost in seconds, without the fixed seconds.
        best: a plan with the least cost.
    """

    mix: float
    paths: Weighted
    best: RelaxedPlan


class Relaxation:
    """The lower bounds of all plans of a trellis."""

    def __init__(self, trellis: Trellis, terms: Terms) -> None:
        self.trellis, self.terms = trellis, terms
        self._seen: dict[float, Priced] = {}
        self._distinct = list({id(stage): stage for stage in trellis.stages}.values())

    def at(self, mix: float) -> Priced:
        """All plans, priced at a mean of the two bounds."""
        known = self._seen.get(mix)
        if known is None:
            alike = {id(s): seconds_of(s, mix, self.terms) for s in self._distinct}
            edges = [alike[id(stage)] for stage in self.trellis.stages]
            paths = Weighted(self.trellis, edges)
            known = self._seen[mix] = Priced(mix, paths, self.found(paths.best()))
        return known

    def bound(self, priced: Priced) -> float:
        """The seconds that every plan takes at least."""
        return priced.paths.cheapest + self.terms.fixed

    def seen(self) -> Iterator[RelaxedPlan]:
        """The cheapest plans at all means so far."""
        for priced in self._seen.values():
            yield priced.best

    def found(self, path: list[int]) -> RelaxedPlan:
        """The plan of a path."""
        stages = zip(self.trellis.stages, path, strict=True)
        totals = np.sum([stage.costs[edge] for stage, edge in stages], axis=0)
        sides = totals[LAYER] + totals[FORWARD] + totals[UPDATE] + self.terms.fixed
        whole = sides + totals[BACKWARD] + self.terms.slowed * totals[GRADIENTS]
        beside = sides + totals[GRADIENTS] if self.terms.apart else 0.0
        return RelaxedPlan(self.trellis.choices(path), float(whole), float(beside))

    def forward(self, path: list[int], able: Sequence[bool]) -> dict[str, float]:
        """The forward seconds of the layers that may be recomputed."""
        stages = zip(self.trellis.layers, self.trellis.stages, path, able, strict=True)
        return {layer.name: float(s.costs[edge][LAYER]) for layer, s, edge, may in stages if may}

    def tightest(self) -> Priced:
        """All plans at the mean with the greatest bound, where both bounds are equal."""
        low = self.at(0.0)
        if not self.terms.apart or low.best.serial_s >= low.best.overlapped_s:
            return low
        high = self.at(1.0)
        if high.best.overlapped_s >= high.best.serial_s:
            return high
        for _ in range(_MOST_MEETINGS):
            one, other = low.best, high.best
            rise = (one.overlapped_s - one.serial_s) - (other.overlapped_s - other.serial_s)
            mix = (other.serial_s - one.serial_s) / rise if rise > 0 else low.mix
            middle = self.at(min(max(mix, low.mix), high.mix))
            topology = one.seconds(middle.mix)
            if middle.best.seconds(middle.mix) >= topology * (1 - 1e-12):
                return middle
            slope = middle.best.overlapped_s - middle.best.serial_s
            low, high = (middle, high) if slope > 0 else (low, middle)
        return max((low, high), key=self.bound)


def seconds_of(stage: Stage, mix: float, terms: Terms) -> Floats:
    """The mean of both bounds of each edge's time [edges]."""
    costs, slowed = stage.costs, terms.slowed
    found: Floats = (
        costs[:, LAYER]
        + costs[:, FORWARD]
        + costs[:, UPDATE]
        + (1 - mix) * costs[:, BACKWARD]
        + ((1 - mix) * slowed + mix) * costs[:, GRADIENTS]
    )
    return found
