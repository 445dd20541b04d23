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

from workbench.predict.search.limit.candidates import WHATS, Load, Prices, Rule
from workbench.predict.search.limit.column_generation import Columns
from workbench.predict.search.limit.memory_trellis import Laden

_SOME = 1e-6  # a smaller share of a mixture is rounding


@dataclass(order=True)
class _Part:
    bound: float
    number: int
    laden: Laden = field(compare=False)
    rules: tuple[Rule, ...] = field(compare=False)
    loads: list[Load] = field(compare=False)
    prices: Prices | None = field(compare=False)


class Branching:
    """The parts that are left.

    Args:
        every: all plans, by the rounds that they run in.
        limit: bytes.
        seconds: that a plan must be below to be of interest, at the moment.
        finer: of too many plans, those that are left, looked at more closely; None: all are kept.
        known: `found` of another one.

    Attributes:
        found: the plans that the first mixtures were made of, by the place in `every`.
    """

    def __init__(
        self,
        every: Sequence[Laden],
        limit: float,
        seconds: Callable[[], float],
        finer: Callable[[Laden, Prices, float], Laden] | None = None,
        known: Mapping[int, list[Load]] | None = None,
    ) -> None:
        self.limit, self.seconds, self.finer = limit, seconds, finer
        self._numbers = count()
        self._parts: list[_Part] = []
        self._now = np.inf  # the bound of the part at work
        self._prices: Prices | None = None
        self._left = np.inf  # of the parts that are of no interest
        self.found = dict(known or {})
        for place, laden in enumerate(every):
            loads = self.found.get(place, [])
            heappush(self._parts, _Part(0.0, next(self._numbers), laden, (), loads, None))
        self._roots = len(self._parts)

    @property
    def bound(self) -> float:
        """Seconds that every plan takes at least that fits."""
        left = self._parts[0].bound if self._parts else np.inf
        return min(left, self._now, self._left)

    def plans(self) -> Iterator[Load]:
        """Plans as they are found, whether they fit or not; ends where all parts are settled."""
        while self._parts:
            part = heappop(self._parts)
            if part.bound >= self.seconds():
                self._left = min(self._left, part.bound)
                continue
            yield from self._worked(part)

    def _worked(self, part: _Part) -> Iterator[Load]:
        prices = part.prices or self._prices
        columns = Columns(part.laden, self.limit, part.rules, part.loads, prices)
        self._now = max(part.bound, columns.bound)
        yield from columns.loads
        while not columns.done and self._now < self.seconds():
            load = columns.step()
            self._now = max(part.bound, columns.bound)
            if load is not None:
                yield load
        bound, self._now = self._now, np.inf
        self._prices = columns.prices
        if part.number < self._roots:
            self.found[part.number] = columns.loads
        if bound >= self.seconds():
            self._left = min(self._left, bound)
            return
        if self.finer is not None and part.laden.rough and columns.prices is not None:
            self._left = min(self._left, self.seconds())  # of those that it leaves out
            left = self.finer(part.laden, columns.prices, self.limit)
            number = next(self._numbers)
            known = columns.loads, columns.prices
            heappush(self._parts, _Part(bound, number, left, part.rules, *known))
            return
        rule = _parting(columns)
        if rule is None:  # it is of one plan
            self._left = min(self._left, bound)
            return
        for kept in (True, False):
            rules = (*part.rules, Rule(rule.stage, rule.what, rule.value, kept))
            more = part.laden, rules, columns.loads, columns.prices
            heappush(self._parts, _Part(bound, next(self._numbers), *more))


def _parting(columns: Columns) -> Rule | None:
    """By what the plans of a mixture differ most; of one plan, by what is not decided yet."""
    mixed = [i for i, share in enumerate(columns.shares) if share > _SOME]
    shares = columns.shares[mixed]
    found: list[tuple[float, Rule]] = []
    for what in WHATS:
        spreads = columns.laden.spreads[what]
        values = np.array([getattr(columns.loads[i], f"{what}s") for i in mixed])
        alike = (values == values[0]).T @ shares
        parts = np.minimum(alike, 1 - alike)
        if len(mixed) == 1:
            parts = np.ones(len(spreads))
            decided = [rule.stage for rule in columns.rules if rule.what == what and rule.kept]
            parts[decided] = 0.0
        ranks = spreads * parts
        stage = int(ranks.argmax())
        if ranks[stage] > 0:
            found.append((float(ranks[stage]), Rule(stage, what, int(values[0, stage]), True)))
    return max(found, key=lambda one: one[0])[1] if found else None
