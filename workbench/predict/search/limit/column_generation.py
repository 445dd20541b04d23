"""The tightest bound under a memory limit, by column generation.

Over the known plans and all mixtures of them, the fastest mixture that fits is found as a linear
program. Its duals are prices on time and on the memory at each moment; the plan that is cheapest at
these prices joins the known ones, until none is cheaper than the mixture. At any prices, the cost
of the cheapest plan less the price of the limit is a bound on all that fit.

Source: Dantzig and Wolfe 1960, doi:10.1287/opre.8.1.101; for constrained shortest paths,
Handler and Zang 1980, doi:10.1002/net.3230100403; for prices between the last and the best ones,
Wentges 1997, doi:10.1111/1475-3995.00010.

Branch and price divides the plan space until the bounds are tight. Each part has a bound by column
generation. Where a part's best mixture is of plans that differ, it is divided by one of their
differences, the one with the most memory: a layer's choice, whether it is recomputed, whether it is
in the tail. The part with the least bound is next; the least bound of all remaining parts is one on
all plans that fit.

Source: branch and price, Barnhart et al. 1998, doi:10.1287/opre.46.3.316.

Why not one mixed-integer program of all plans: HiGHS, called by scipy's `milp`, found no plan for a
vision transformer within 14 s.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

import numpy as np
from scipy.optimize import linprog

from workbench.predict.search.limit.candidates import DECISIONS, Candidate, Prices, Rule
from workbench.predict.search.limit.memory_trellis import MemoryTrellis
from workbench.predict.search.space.trellis import Floats

_CLOSE = 1e-5
_CUTS = 8  # how often a mixture is held against the moments that are not in the program yet
_STEADY = 0.7  # share of the best prices so far in those that are tried
_DEAR = 100.0  # what a whole limit too much costs, in steps of the fastest plan


class ColumnGeneration:
    """The plans with given rounds, and a bound on all of them.

    Args:
        variant: the trellis of these plans.
        limit: the memory limit in bytes; None: the least memory is looked for.
        rules: the rules that the plans must keep.
        candidates: known plans, whether they keep the rules or not.
        prices: the first prices; None: memory costs nothing.

    Attributes:
        bound: the seconds that every plan that fits takes at least; for the least memory, bytes.
        candidates: the plans that have been found.
        prices: the last prices.
        shares: the share of each plan in the best mixture.
        done: whether the bound cannot improve any more.
    """

    def __init__(
        self,
        variant: MemoryTrellis,
        limit: float | None,
        rules: tuple[Rule, ...] = (),
        candidates: Sequence[Candidate] = (),
        prices: Prices | None = None,
    ) -> None:
        self.variant, self.limit, self.rules = variant, limit, rules
        self.bound, self.done = 0.0, False
        self.candidates: list[Candidate] = []
        self.shares: Floats = np.ones(1)
        self._rows: list[int] = []
        self._moments = len(variant.edges)
        self._seen: set[tuple[object, ...]] = set()
        self._best: Prices | None = None  # those of the bound
        for candidate in candidates:
            if all(rule.holds(candidate) for rule in rules):
                self._keep(candidate)
        self.prices = prices
        if prices is not None:
            self._price(prices)
        if self.candidates or self.done:
            return
        if limit is None:
            self._price(Prices(0.0, np.full(self._moments, 1 / self._moments), 0.0))
            return
        for mix in (0.0, 1.0) if variant.terms.apart else (0.0,):
            self._price(Prices(mix, np.zeros(self._moments)))

    def step(self) -> Candidate | None:
        """Looks for one more plan; None: no plan would improve the bound."""
        if self.done or not self.candidates:
            self.done = True
            return None
        mixture = self._mixture()
        if mixture is None:
            self.done = True
            return None
        self.shares, exact, value = mixture
        candidate = None
        for prices in self._near_best(exact):
            self.prices = prices
            candidate = self._price(prices)
            if self.bound >= value * (1 - _CLOSE):
                self.done = True
            if self.done or candidate is not None:
                return candidate
        self.done = True
        return None

    def _near_best(self, exact: Prices) -> Iterator[Prices]:
        """Prices to try in turn: between those of the best bound and the mixture's; then these.

        The mixture's prices alone jump between extremes while few plans are known.
        """
        if self._best is not None:
            yield self._best.towards(exact, 1 - _STEADY)
        yield exact

    def _price(self, prices: Prices) -> Candidate | None:
        """The cheapest plan at these prices; None: it is known."""
        cost, candidate = self.variant.cheapest(prices, self.rules)
        if candidate is None:
            self.bound, self.done = np.inf, True
            return None
        bound = cost + prices.total * (self.variant.resident - (self.limit or 0.0))
        bound += prices.time * self.variant.terms.fixed
        if bound > self.bound:
            self.bound, self._best = bound, prices
        return candidate if self._keep(candidate) else None

    def _keep(self, candidate: Candidate) -> bool:
        """Adds a plan; whether it is new."""
        key = (candidate.path, candidate.recomputed)
        new = key not in self._seen
        if new:
            self._seen.add(key)
            self.candidates.append(candidate)
            self._add(candidate.levels)
        return new

    def _add(self, levels: Floats) -> None:
        moment = int(levels.argmax())
        if moment not in self._rows:
            self._rows.append(moment)

    def _mixture(self) -> tuple[Floats, Prices, float] | None:
        """(the best mixture, the prices at which it is cheapest, its value); None: not solved."""
        levels = np.array([candidate.levels for candidate in self.candidates])
        for _ in range(_CUTS):
            solved = self._solved(levels)
            if solved is None:
                return None
            shares, prices, value, most = solved
            mixed = shares @ levels
            if mixed.max() <= most * (1 + 1e-9):
                break
            self._add(mixed)
        return shares, prices, value

    def _solved(self, levels: Floats) -> tuple[Floats, Prices, float, float] | None:
        """(shares of the plans, prices, value, bytes at most); None: numerically not solved."""
        count, rows = len(self.candidates), self._rows
        unit = max(float(levels.max()), 1.0)
        memory = np.zeros((len(rows), count + 2))
        memory[:, :count] = levels[:, rows].T / unit
        memory[:, count] = -1.0
        times = np.zeros((2, count + 2))
        times[0, :count] = [candidate.serial_s for candidate in self.candidates]
        times[1, :count] = [candidate.overlapped_s for candidate in self.candidates]
        times[:, count + 1] = -1.0
        one = np.zeros((1, count + 2))
        one[0, :count] = 1.0
        lean = self.limit is None
        limit = 0.0 if self.limit is None else self.limit / unit
        fastest = min(candidate.seconds for candidate in self.candidates)
        goal = np.zeros(count + 2)
        goal[count] = 1.0 if lean else _DEAR * fastest
        goal[count + 1] = 0.0 if lean else 1.0
        found = linprog(
            goal,
            A_ub=np.vstack([memory, times]),
            b_ub=np.array([limit] * len(rows) + [0.0, 0.0]),
            A_eq=one,
            b_eq=[1.0],
            method="highs",
        )
        if not found.success:
            return None
        duals = np.maximum(-found.ineqlin.marginals, 0.0)
        moments = np.zeros(self._moments)
        moments[rows] = duals[: len(rows)] / unit * (unit if lean else 1.0)
        mix = 0.0 if lean else float(duals[-1] / max(duals[-2:].sum(), 1e-300))
        value = float(found.fun) * (unit if lean else 1.0)
        most = float(found.x[count]) * unit + (self.limit or 0.0)
        prices = Prices(mix, moments, 0.0 if lean else 1.0)
        return found.x[:count], prices, value, most


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
    """The remaining parts of the plan space.

    Args:
        every: all plans, one trellis for each kind of rounds.
        limit: the memory limit, in bytes.
        seconds: a function that gives the seconds which a plan must be below to be of interest now.
        refine: a function that makes a finer trellis of the rest of a coarse one; None: all are
            kept.
        known: the attribute `found` of another search.

    Attributes:
        found: the plans that the first mixtures were made of, by the index in `every`.
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
        """The seconds that every plan that fits takes at least."""
        left = self._nodes[0].bound if self._nodes else np.inf
        return min(left, self._now, self._left)

    def plans(self) -> Iterator[Candidate]:
        """Plans as they are found, whether they fit or not; ends when no part is left."""
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
    """The greatest difference of a mixture's plans; for one plan, a decision that is open."""
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
