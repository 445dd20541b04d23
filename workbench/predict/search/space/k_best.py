"""Cheapest paths through a trellis; all paths, and all sets, in the order of their cost."""

from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count

import numpy as np

from workbench.predict.search.space.trellis import Floats, Integers, Trellis


class Weighted:
    """A trellis whose edges have one cost each.

    Args:
        trellis: all plans.
        edges: for each stage, the cost of each of its edges.
    """

    def __init__(self, trellis: Trellis, edges: Sequence[Floats]) -> None:
        self.trellis, self.edges = trellis, edges
        self.to_go = self._to_go()

    @property
    def cheapest(self) -> float:
        """Of all paths; infinite where there is none."""
        return float(self.to_go[0][0])

    def best(self) -> list[int]:
        """The edges of a cheapest path."""
        state, path = 0, list[int]()
        for depth, costs in enumerate(self.edges):
            edges, targets = self._from(depth, state)
            best = int(np.argmin(costs[edges] + self.to_go[depth + 1][targets]))
            path.append(edges.start + best)
            state = int(targets[best])
        return path

    def in_order(self) -> Iterator[tuple[float, list[int]]]:
        """(cost, edges) of every path, the cheapest first.

        Every path is another one up to some stage, leaves it there, and then goes on as cheaply
        as can be; so each that is given leads to those that leave it.

        Source: Hoffman and Pavley 1959, doi:10.1145/320998.321004.
        """
        ties = count()
        # (cost, a number, what it has cost up to the stage where it leaves, edges up to there)
        waiting: list[tuple[float, int, float, list[int]]] = []
        heappush(waiting, (self.cheapest, next(ties), 0.0, []))
        while waiting and waiting[0][0] < float("inf"):
            total, _, spent, path = heappop(waiting)
            path = list(path)
            state = self._state(path)
            for depth in range(len(path), len(self.edges)):
                edges, targets = self._from(depth, state)
                costs = spent + self.edges[depth][edges] + self.to_go[depth + 1][targets]
                best = int(np.argmin(costs))
                for other, cost in enumerate(costs.tolist()):
                    if other != best:
                        edge = edges.start + other
                        after = spent + float(self.edges[depth][edge])
                        heappush(waiting, (cost, next(ties), after, [*path, edge]))
                path.append(edges.start + best)
                spent += float(self.edges[depth][path[-1]])
                state = int(targets[best])
            yield total, path

    def _state(self, path: Sequence[int]) -> int:
        """Where a path leads."""
        return int(self.trellis.stages[len(path) - 1].target[path[-1]]) if path else 0

    def _from(self, depth: int, state: int) -> tuple[slice, Integers]:
        """(edges that leave a state, where they lead)."""
        stage = self.trellis.stages[depth]
        first, end = np.searchsorted(stage.source, (state, state + 1))
        return slice(int(first), int(end)), stage.target[first:end]

    def through(self) -> list[Floats]:
        """For each stage and edge, the least cost of a path that goes through it."""
        spent: Floats = np.zeros(1)
        found = []
        for stage, edges, behind in zip(
            self.trellis.stages, self.edges, self.to_go[1:], strict=True
        ):
            here = spent[stage.source] + edges
            found.append(here + behind[stage.target])
            spent = np.full(len(behind), np.inf)
            np.minimum.at(spent, stage.target, here)
        return found

    def _to_go(self) -> list[Floats]:
        """For each stage and state, the least cost from there to the end."""
        behind: Floats = np.zeros(1)
        found = [behind]
        for stage, edges in zip(reversed(self.trellis.stages), reversed(self.edges), strict=True):
            here = np.full(stage.states, np.inf)
            if len(edges):
                here[stage.left] = np.minimum.reduceat(edges + behind[stage.target], stage.starts)
            found.append(here)
            behind = here
        return found[::-1]


def cheapest_sums(costs: Mapping[str, float]) -> Iterator[tuple[tuple[str, ...], float]]:
    """(things, sum of their costs) of every set but the empty one, the cheapest first.

    Args:
        costs: the cost of each thing, not negative.
    """
    names = sorted(costs, key=lambda name: costs[name])
    if not names:
        return
    waiting: list[tuple[float, tuple[int, ...]]] = [(costs[names[0]], (0,))]
    while waiting:
        total, chosen = heappop(waiting)
        yield tuple(names[index] for index in chosen), total
        *rest, last = chosen
        if last + 1 < len(names):
            more = costs[names[last + 1]]
            heappush(waiting, (total + more, (*chosen, last + 1)))
            heappush(waiting, (total - costs[names[last]] + more, (*rest, last + 1)))
