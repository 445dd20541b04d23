"""Lower bounds of predicted step times, and the plans that attain them.

With f, b, g, u the seconds of a plan's forward pass, backward pass, gradient sums and update, on
average over ranks, a step takes at least

    f + b + s g + u       sums hold up the compute lane of the same rank for s of their time
    f + g + u             sums begin when forward has ended, and follow each other

where a gather that could run beside a tail in rounds counts for s of its time, or not at all;
and so does any mean of the two, which is a sum over layers and conversions; so is memory. Where
plans must fit into a memory m, a price on memory gives a bound for all that do:

    time(plan) >= time(plan) + price (memory(plan) - m)        as memory(plan) <= m

and its least value over all plans is found layer by layer. The best price is where bounds of too
lean and too large plans meet. A layer whose memory is dearer than its forward pass is computed
again in backward.

Source: Lagrangian relaxation of the constrained shortest path, Handler and Zang 1980,
doi:10.1002/net.3230100403.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from workbench.plan.choice import LayerPlan
from workbench.predict.search.costs import (
    BACKWARD,
    FORWARD,
    GATHER,
    GRADIENTS,
    KEPT,
    LAYER,
    RESIDENT,
    UPDATE,
)
from workbench.predict.search.paths import Weighted
from workbench.predict.search.trellis import Floats, Stage, Trellis

_MOST_MEETINGS = 12


@dataclass(frozen=True)
class Terms:
    """What the bounds of a search have in common.

    Attributes:
        fixed: seconds that every plan takes: loading, and what a step costs besides.
        slowed: share of a gradient sum's time that its rank loses on the compute lane.
        apart: whether gradient sums begin only behind the forward pass.
        rounds: whether gathers may run beside a tail.
        recompute: for each layer, whether it may be computed again.
        parts: for each layer, in how many rounds it may run at most.
    """

    fixed: float
    slowed: float
    apart: bool
    rounds: bool
    recompute: tuple[bool, ...]
    parts: tuple[int, ...]


@dataclass(frozen=True)
class Found:
    """A plan that is cheapest at some price.

    Attributes:
        choices: of each layer that can be split.
        again: the layers to compute again.
        whole: f + b + s g + u, in seconds.
        beside: f + g + u.
        memory: bytes, at least.
    """

    choices: dict[str, LayerPlan]
    again: tuple[str, ...]
    whole: float
    beside: float
    memory: float

    def seconds(self, mix: float) -> float:
        """The mean of both bounds of its step time."""
        return (1 - mix) * self.whole + mix * self.beside

    @property
    def least_seconds(self) -> float:
        """The better one."""
        return max(self.whole, self.beside)


@dataclass(frozen=True)
class Priced:
    """All plans at one price.

    Attributes:
        mix: share of the second bound.
        price: seconds for each byte.
        paths: by cost, `fixed` not included.
        best: a cheapest plan.
    """

    mix: float
    price: float
    paths: Weighted
    best: Found

    def bound(self, cost: float, terms: Terms, limit: float | None) -> float:
        """What a plan of this cost, and all dearer ones, take at least if they fit."""
        return cost + terms.fixed - (0.0 if limit is None else self.price * limit)


class Relaxation:
    """Bounds on all plans of a trellis.

    Args:
        trellis: with the costs of `costs.py`.
        terms: of the bounds.
        limit: bytes; None: there is none.
    """

    def __init__(self, trellis: Trellis, terms: Terms, limit: float | None = None) -> None:
        self.trellis, self.terms, self.limit = trellis, terms, limit
        self._seen: dict[tuple[float, float], Priced] = {}

    def at(self, mix: float, price: float) -> Priced:
        """All plans at a price, and a mean of the two bounds."""
        known = self._seen.get((mix, price))
        if known is None:
            edges = [
                _seconds(stage, mix, self.terms) + self._of_memory(stage, index, mix, price)
                for index, stage in enumerate(self.trellis.stages)
            ]
            paths = Weighted(self.trellis, edges)
            known = Priced(mix, price, paths, self.found(paths.best(), mix, price))
            self._seen[mix, price] = known
        return known

    def leanest(self) -> Found:
        """The plan with the least memory."""
        edges = []
        for index, stage in enumerate(self.trellis.stages):
            kept = 0.0 if self.terms.recompute[index] else stage.costs[:, KEPT]
            memory = stage.costs[:, RESIDENT] + kept / self.terms.parts[index]
            edges.append(memory + 0.0)
        return self.found(Weighted(self.trellis, edges).best(), 0.0, np.inf)

    def bound(self, priced: Priced) -> float:
        """Seconds that every plan that fits takes at least, by one price."""
        return priced.bound(priced.paths.cheapest, self.terms, self.limit)

    def tightest(self) -> Priced:
        """The price and the mean with the greatest bound."""
        mixed = self._meet_mix()
        if self.limit is None or mixed.best.memory <= self.limit:
            return mixed
        return self._meet_price(mixed.mix)

    def seen(self) -> Iterator[Found]:
        """The cheapest plans at all prices so far."""
        for priced in self._seen.values():
            yield priced.best

    def found(self, path: list[int], mix: float, price: float) -> Found:
        """The plan of a path; what is dearer to keep than to compute again is not kept."""
        totals, memory, again = np.zeros(self.trellis.stages[0].costs.shape[1]), 0.0, []
        recomputed = 0.0
        for index, (stage, edge) in enumerate(zip(self.trellis.stages, path, strict=True)):
            costs = stage.costs[edge]
            totals = totals + costs
            kept = costs[KEPT] / self.terms.parts[index]
            if self._is_again(index, kept, costs[LAYER], mix, price):
                again.append(self.trellis.layers[index].name)
                recomputed += float(costs[LAYER])
                kept = 0.0
            memory += float(costs[RESIDENT] + kept)
        gather = totals[GATHER] * self.terms.rounds
        sides = totals[LAYER] + totals[FORWARD] - gather + totals[UPDATE] + self.terms.fixed
        beside_it = self.terms.slowed * (totals[GRADIENTS] + gather)
        whole = sides + totals[BACKWARD] + recomputed + beside_it
        beside = sides + totals[GRADIENTS] if self.terms.apart else 0.0
        choices = self.trellis.choices(path)
        return Found(choices, tuple(again), float(whole), float(beside), memory)

    def forward(self, path: list[int]) -> dict[str, float]:
        """Of the layers that may be computed again: their forward seconds."""
        found = {}
        for index, (stage, edge) in enumerate(zip(self.trellis.stages, path, strict=True)):
            if self.terms.recompute[index]:
                found[self.trellis.layers[index].name] = float(stage.costs[edge][LAYER])
        return found

    def _is_again(self, index: int, kept: float, layer: float, mix: float, price: float) -> bool:
        if not self.terms.recompute[index] or kept == 0:
            return False
        return bool(price == np.inf or (1 - mix) * layer < price * kept)

    def _of_memory(self, stage: Stage, index: int, mix: float, price: float) -> Floats:
        kept = price * stage.costs[:, KEPT] / self.terms.parts[index]
        if self.terms.recompute[index]:
            kept = np.minimum(kept, (1 - mix) * stage.costs[:, LAYER])
        priced: Floats = price * stage.costs[:, RESIDENT] + kept
        return priced

    def _meet_mix(self) -> Priced:
        """Where plans that are slow on one lane and on the other cost the same."""
        low = self.at(0.0, 0.0)
        if not self.terms.apart or low.best.whole >= low.best.beside:
            return low
        high = self.at(1.0, 0.0)
        if high.best.beside >= high.best.whole:
            return high
        for _ in range(_MOST_MEETINGS):
            one, other = low.best, high.best
            rise = (one.beside - one.whole) - (other.beside - other.whole)
            mix = (other.whole - one.whole) / rise if rise > 0 else low.mix
            middle = self.at(min(max(mix, low.mix), high.mix), 0.0)
            meeting = one.seconds(middle.mix)
            if middle.best.seconds(middle.mix) >= meeting * (1 - 1e-12):
                return middle
            slope = middle.best.beside - middle.best.whole
            low, high = (middle, high) if slope > 0 else (low, middle)
        return max((low, high), key=self.bound)

    def _meet_price(self, mix: float) -> Priced:
        """Where plans that fit and plans that do not cost the same."""
        assert self.limit is not None
        low = self.at(mix, 0.0)
        price = low.best.seconds(mix) / self.limit
        high = self.at(mix, price)
        for _ in range(40):
            if high.best.memory <= self.limit:
                break
            low, price = high, price * 8
            high = self.at(mix, price)
        for _ in range(_MOST_MEETINGS):
            one, other = low.best, high.best
            if high.best.memory > self.limit or one.memory <= other.memory:
                break
            price = (other.seconds(mix) - one.seconds(mix)) / (one.memory - other.memory)
            middle = self.at(mix, price)
            meeting = one.seconds(mix) + price * (one.memory - self.limit)
            if self.bound(middle) >= meeting * (1 - 1e-12):
                break
            low, high = (middle, high) if middle.best.memory > self.limit else (low, middle)
        return max(self._seen.values(), key=self.bound)


def _seconds(stage: Stage, mix: float, terms: Terms) -> Floats:
    costs, slowed = stage.costs, terms.slowed
    hidden = (1 - (1 - mix) * slowed) if terms.rounds else 0.0
    found: Floats = (
        costs[:, LAYER]
        + costs[:, FORWARD]
        - hidden * costs[:, GATHER]
        + costs[:, UPDATE]
        + (1 - mix) * costs[:, BACKWARD]
        + ((1 - mix) * slowed + mix) * costs[:, GRADIENTS]
    )
    return found
