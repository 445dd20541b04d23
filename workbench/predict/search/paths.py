"""Cheapest paths through a trellis, and all paths in the order of their cost."""

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import count

import numpy as np

from workbench.predict.search.trellis import Floats, Trellis


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
        state, path = 0, []
        for stage, edges, behind in zip(
            self.trellis.stages, self.edges, self.to_go[1:], strict=True
        ):
            first, end = np.searchsorted(stage.source, (state, state + 1))
            costs = edges[first:end] + behind[stage.target[first:end]]
            path.append(int(first + np.argmin(costs)))
            state = int(stage.target[path[-1]])
        return path

    def in_order(self) -> Iterator[tuple[float, list[int]]]:
        """(cost, edges) of every path, the cheapest first.

        A* with the exact cost to go: a path is never left for one that turns out to be dearer.
        """
        ties = count()
        waiting: list[tuple[float, int, int, float, int, tuple[object, ...]]] = []
        heappush(waiting, (self.cheapest, next(ties), 0, 0.0, 0, ()))
        while waiting:
            total, _, depth, spent, state, path = heappop(waiting)
            if total == float("inf"):
                return
            if depth == len(self.edges):
                yield total, _unlinked(path)
                continue
            stage, edges, behind = (
                self.trellis.stages[depth],
                self.edges[depth],
                self.to_go[depth + 1],
            )
            first, end = np.searchsorted(stage.source, (state, state + 1))
            for edge in range(int(first), int(end)):
                after = int(stage.target[edge])
                now = spent + float(edges[edge])
                expected = now + float(behind[after])
                heappush(waiting, (expected, next(ties), depth + 1, now, after, (edge, path)))

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
        for stage, edges in zip(
            reversed(self.trellis.stages), reversed(self.edges), strict=True
        ):
            here = np.full(stage.states, np.inf)
            if len(edges):
                np.minimum.at(here, stage.source, edges + behind[stage.target])
            found.append(here)
            behind = here
        return found[::-1]


def _unlinked(path: tuple[object, ...]) -> list[int]:
    found: list[int] = []
    while path:
        edge, path = path  # type: ignore[assignment]
        found.append(edge)  # type: ignore[arg-type]
    return found[::-1]
