"""All plans of a model as paths through a graph of states, so that costs add up along a path.

A stage is a layer, in the order of execution. The state before it holds all that later layers
depend on: for every live value its layout, the layouts in which it has been read, and whether its
gradient comes back as partial sums; and for every layer whose preferred layout an earlier one
depended on, what that may still be. An edge is a layer's choice, with its cost and that of the
conversions of the values that it is the last to read. Two plans in one state have the same
continuations, which makes the search exact.

The preferred layout of a later layer, and the form of its gradient, are assumed where they matter
and compared with what follows; a wrong assumption leads to no path.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import count
from typing import Protocol

import numpy as np
import numpy.typing as npt

from workbench.plan.graph.graph import Layer
from workbench.plan.placement.layer_plan import LayerPlan
from workbench.plan.placement.placement import Layout

Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
# The layouts in which a value has been read, and whether a gradient of partial sums comes back from
# each.
Readings = frozenset[tuple[Layout, bool]]
Cost = tuple[float, ...]


class Costs(Protocol):
    """The costs of layers and conversions; all are vectors of the same length."""

    def layer(
        self, layer: Layer, choice: LayerPlan | None, read: Layout, given: Layout
    ) -> Cost: ...

    def converted(self, layer: Layer, name: str, read: Layout) -> Cost: ...

    def value(self, name: str, source: Layout, readings: Readings, carried: bool) -> Cost: ...

    def alike(self, name: str) -> Hashable:
        """A key that is equal for layers with equal costs of every choice, and equal outputs."""


@dataclass(frozen=True)
class LiveValue:
    """A live value: one that has still to be read.

    Attributes:
        layout: the layout in which it was produced.
        carried: whether its gradient is assumed to come back as partial sums.
        readings: the layouts in which it has been read.
    """

    layout: Layout
    carried: bool = False
    readings: Readings = frozenset()


@dataclass(frozen=True)
class Stage:
    """The edges of one layer, or some of them.

    Attributes:
        states: the number of states before it.
        source: the index of the state before each edge, ascending [edges].
        target: the index of the state after each edge, in the next stage [edges].
        costs: the costs of each edge [edges, costs].
        choice: the index of each edge's choice among the layer's [edges].
        place: the index of each edge among all of the layer [edges].
    """

    states: int
    source: Integers
    target: Integers
    costs: Floats
    choice: Integers
    place: Integers

    def only(self, mine: Flags) -> "Stage":
        """Some of the edges, between the same states."""
        return Stage(
            self.states,
            self.source[mine],
            self.target[mine],
            self.costs[mine],
            self.choice[mine],
            self.place[mine],
        )

    @cached_property
    def first(self) -> Integers:
        """The first edge of each state, then the number of edges [states + 1]."""
        found: Integers = np.searchsorted(self.source, np.arange(self.states + 1))
        return found

    @cached_property
    def left(self) -> Integers:
        """The states that edges leave."""
        return np.flatnonzero(np.diff(self.first))

    @cached_property
    def starts(self) -> Integers:
        """The first edge of each state that edges leave."""
        return self.first[self.left]


@dataclass(frozen=True)
class Trellis:
    """All stages. The first begins with one state, the last leads to one.

    Attributes:
        layers: the layer of each stage.
        options: the choices of each layer that can be split.
        stages: the stage of each layer.
        at_costs: a function that gives its stages at other costs.
    """

    layers: tuple[Layer, ...]
    options: Mapping[str, tuple[LayerPlan, ...]]
    stages: tuple[Stage, ...]
    at_costs: Callable[[Sequence[Stage], Costs], tuple[Stage, ...]] = field(repr=False)

    def priced(self, costs: Costs) -> "Trellis":
        """The same paths at other costs, which must be equal for the same layers."""
        return replace(self, stages=self.at_costs(self.stages, costs))

    def only(self, choices: Mapping[str, LayerPlan]) -> "Trellis":
        """The paths on which layers have these choices.

        Args:
            choices: a choice of each of some layers, by name.
        """
        if not choices:
            return self

        def left(stages: Sequence[Stage]) -> tuple[Stage, ...]:
            found = list(stages)
            for index, layer in enumerate(self.layers):
                if layer.name in choices:
                    place = self.options[layer.name].index(choices[layer.name])
                    some = stages[index].only(stages[index].choice == place)
                    found[index] = replace(some, place=np.arange(len(some.source)))
            return tuple(found)

        def at_costs(_: Sequence[Stage], costs: Costs) -> tuple[Stage, ...]:
            return left(self.at_costs(self.stages, costs))

        return replace(self, stages=left(self.stages), at_costs=at_costs)

    def choices(self, path: Sequence[int]) -> dict[str, LayerPlan]:
        """The plan of a path, which is given as one edge for each stage."""
        found = {}
        for layer, stage, edge in zip(self.layers, self.stages, path, strict=True):
            if layer.name in self.options:
                found[layer.name] = self.options[layer.name][stage.choice[edge]]
        return found

    def path(self, choices: Mapping[str, LayerPlan]) -> list[int] | None:
        """The path of a plan; None: it has a choice that none of these paths has."""
        reached: dict[int, tuple[int, ...]] = {0: ()}
        for layer, stage in zip(self.layers, self.stages, strict=True):
            place = -1
            if layer.name in self.options:
                choice = kept(choices.get(layer.name, LayerPlan()))
                options = [kept(option) for option in self.options[layer.name]]
                if choice not in options:
                    return None
                place = options.index(choice)
            behind = {}
            for state, path in reached.items():
                first, end = np.searchsorted(stage.source, (state, state + 1))
                for edge in range(int(first), int(end)):
                    if stage.choice[edge] == place:
                        behind[int(stage.target[edge])] = (*path, edge)
            reached = behind
        return list(reached[0]) if reached else None


def kept(choice: LayerPlan) -> LayerPlan:
    """A choice without its recomputation."""
    return replace(choice, recompute=False)


class Weighted:
    """A trellis whose edges have one cost each.

    Args:
        trellis: the trellis of all plans.
        edges: the cost of each edge, for each stage [edges each].
    """

    def __init__(self, trellis: Trellis, edges: Sequence[Floats]) -> None:
        self.trellis, self.edges = trellis, edges
        self.to_go = self._to_go()

    @property
    def cheapest(self) -> float:
        """The least cost of all paths; infinite where there is none."""
        return float(self.to_go[0][0])

    def best(self) -> list[int]:
        """The edges of a path with the least cost."""
        state, path = 0, list[int]()
        for depth, costs in enumerate(self.edges):
            edges, targets = self._from(depth, state)
            best = int(np.argmin(costs[edges] + self.to_go[depth + 1][targets]))
            path.append(edges.start + best)
            state = int(targets[best])
        return path

    def in_order(self) -> Iterator[tuple[float, list[int]]]:
        """(cost, edges) of every path, the cheapest first.

        Every path follows another one up to some stage, leaves it there, and then continues as
        cheaply as possible; so each path that is returned leads to those that leave it.

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
        """The state that a path leads to."""
        return int(self.trellis.stages[len(path) - 1].target[path[-1]]) if path else 0

    def _from(self, depth: int, state: int) -> tuple[slice, Integers]:
        """(the edges that leave a state, the states that they lead to)."""
        stage = self.trellis.stages[depth]
        first, end = np.searchsorted(stage.source, (state, state + 1))
        return slice(int(first), int(end)), stage.target[first:end]

    def through(self) -> list[Floats]:
        """The least cost of a path through each edge, for each stage [edges each]."""
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
        """The least cost from each state to the end, for each stage [states each]."""
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
    """(names, sum of their costs) of every set but the empty one, the cheapest first.

    Args:
        costs: the cost of each name, not negative.
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
