"""Plans and bounds under a memory limit: the plan space is parted until the bounds are tight.

Each part of all plans has a bound by column generation. Where a part's best mixture is of plans
that differ, it is parted by one thing in which they do, the one with the most memory in it: what
a layer chooses, whether it is computed again, whether it is in the tail. The part with the least
bound is next; the least bound of all parts that are left is one on all plans that fit.

Source: branch and price, Barnhart et al. 1998, doi:10.1287/opre.46.3.316.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

import numpy as np

from workbench.predict.search.limit.candidates import DECISIONS, Candidate, Prices, Rule
from workbench.predict.search.limit.column_generation import ColumnGeneration
from workbench.predict.search.limit.memory_trellis import MemoryTrellis

_SOME = 1e-6  # a smaller share of a mixture is rounding


@dataclass(order=True)
class _Node:
    bound: float
    number: int
    variant: MemoryTrellis = field(compare=False)
    rules: tuple[Rule, ...] = field(compare=False)
    candidates: list[Candidate] = field(compare=False)
    prices: Prices | None = field(compare=False)


class BranchAndBound:
    """The parts that are left.

    Args:
        every: all plans, by the rounds that they run in.
        limit: bytes.
        seconds: gives the seconds that a plan must be below to be of interest, at the moment.
        refine: makes a finer trellis of what is left of a coarse one; None: all are kept.
        known: `found` of another one.

    Attributes:
        found: the plans that the first mixtures were made of, by the place in `every`.
    """

    def __init__(
        self,
        every: Sequence[MemoryTrellis],
        limit: float,
        seconds: Callable[[], float],
        refine: Callable[[MemoryTrellis, Prices, float], MemoryTrellis] | None = None,
        known: Mapping[int, list[Candidate]] | None = None,
    ) -> None:
        self.limit, self.seconds, self.refine = limit, seconds, refine
        self._numbers = count()
        self._nodes: list[_Node] = []
        self._now = np.inf  # the bound of the part at work
        self._prices: Prices | None = None
        self._left = np.inf  # of the parts that are of no interest
        self.found = dict(known or {})
        for place, variant in enumerate(every):
            candidates = self.found.get(place, [])
            heappush(self._nodes, _Node(0.0, next(self._numbers), variant, (), candidates, None))
        self._roots = len(self._nodes)

    @property
    def bound(self) -> float:
        """Seconds that every plan takes at least that fits."""
        left = self._nodes[0].bound if self._nodes else np.inf
        return min(left, self._now, self._left)

    def plans(self) -> Iterator[Candidate]:
        """Plans as they are found, whether they fit or not; ends where all parts are settled."""
        while self._nodes:
            node = heappop(self._nodes)
            if node.bound >= self.seconds():
                self._left = min(self._left, node.bound)
                continue
            yield from self._worked(node)

    def _worked(self, node: _Node) -> Iterator[Candidate]:
        prices = node.prices or self._prices
        columns = ColumnGeneration(node.variant, self.limit, node.rules, node.candidates, prices)
        self._now = max(node.bound, columns.bound)
        yield from columns.candidates
        while not columns.done and self._now < self.seconds():
            candidate = columns.step()
            self._now = max(node.bound, columns.bound)
            if candidate is not None:
                yield candidate
        bound, self._now = self._now, np.inf
        self._prices = columns.prices
        if node.number < self._roots:
            self.found[node.number] = columns.candidates
        if bound >= self.seconds():
            self._left = min(self._left, bound)
            return
        if self.refine is not None and node.variant.coarse and columns.prices is not None:
            self._left = min(self._left, self.seconds())  # of those that it leaves out
            left = self.refine(node.variant, columns.prices, self.limit)
            number = next(self._numbers)
            known = columns.candidates, columns.prices
            heappush(self._nodes, _Node(bound, number, left, node.rules, *known))
            return
        rule = _branching_rule(columns)
        if rule is None:  # it is of one plan
            self._left = min(self._left, bound)
            return
        for kept in (True, False):
            rules = (*node.rules, Rule(rule.stage, rule.what, rule.value, kept))
            more = node.variant, rules, columns.candidates, columns.prices
            heappush(self._nodes, _Node(bound, next(self._numbers), *more))


def _branching_rule(columns: ColumnGeneration) -> Rule | None:
    """By what the plans of a mixture differ most; of one plan, by what is not decided yet."""
    mixed = [i for i, share in enumerate(columns.shares) if share > _SOME]
    shares = columns.shares[mixed]
    found: list[tuple[float, Rule]] = []
    for what in DECISIONS:
        spreads = columns.variant.spreads[what]
        values = np.array([getattr(columns.candidates[i], f"{what}s") for i in mixed])
        alike = (values == values[0]).T @ shares
        split = np.minimum(alike, 1 - alike)
        if len(mixed) == 1:
            split = np.ones(len(spreads))
            decided = [rule.stage for rule in columns.rules if rule.what == what and rule.kept]
            split[decided] = 0.0
        ranks = spreads * split
        stage = int(ranks.argmax())
        if ranks[stage] > 0:
            found.append((float(ranks[stage]), Rule(stage, what, int(values[0, stage]), True)))
    return max(found, key=lambda one: one[0])[1] if found else None
