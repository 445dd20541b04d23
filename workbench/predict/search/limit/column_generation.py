"""The tightest bound under a memory limit, by column generation.

Of some plans that are known, and all mixtures of them, the fastest mixture that fits is found as
a linear program. Its duals are prices on time and on the memory at each moment; the plan that is
cheapest at these prices joins the known ones, until none is cheaper than the mixture. At any
prices, what the cheapest plan costs less the price of the limit is a bound on all that fit.

Source: Dantzig and Wolfe 1960, doi:10.1287/opre.8.1.101; for constrained shortest paths,
Handler and Zang 1980, doi:10.1002/net.3230100403; for prices between the last and the best ones,
Wentges 1997, doi:10.1111/1475-3995.00010.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from scipy.optimize import linprog

from workbench.predict.search.limit.candidates import Candidate, Prices, Rule
from workbench.predict.search.limit.memory_trellis import MemoryTrellis
from workbench.predict.search.space.trellis import Floats

_CLOSE = 1e-5
_CUTS = 8  # how often a mixture is held against the moments that are not in the program yet
_STEADY = 0.7  # share of the best prices so far in those that are tried
_DEAR = 100.0  # what a whole limit too much costs, in steps of the fastest plan


class ColumnGeneration:
    """Plans in so many rounds, and a bound on all of them.

    Args:
        variant: all of them.
        limit: bytes; None: what is looked for is the least memory.
        rules: what the plans must keep to.
        candidates: plans that are known, whether they keep them or not.
        prices: the first prices; None: memory costs nothing.

    Attributes:
        bound: seconds that every plan that fits takes at least; of the least memory: bytes.
        candidates: the plans that have been found.
        prices: the last ones.
        shares: share of each plan in the best mixture.
        done: whether the bound cannot become better.
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
        """Looks for one more plan; None: there is none that would tell more."""
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

        The mixture's alone jump from one end to the other while few plans are known.
        """
        if self._best is not None:
            yield self._best.towards(exact, 1 - _STEADY)
        yield exact

    def _price(self, prices: Prices) -> Candidate | None:
        """The cheapest plan; None: it is known."""
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
        """Adds a plan, if it is new."""
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
        """(shares of the plans, prices, value, bytes at most); None: numbers are in the way."""
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
