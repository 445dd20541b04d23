"""All plans of a model as the paths through a graph of states, so that costs add up along a path.

A stage is a layer, in the order of execution. The state before it says all that what follows can
depend on: of every value that has still to be read, where it lies, who has read it in what layout
so far, and whether its gradient will come back as partial sums; and of every layer whose
preferred layout an earlier one depended on, what that may still be. An edge is a layer's choice,
with its cost and that of the conversions of the values that it is the last to read. Two plans that
agree on a state can be continued alike, and that is what makes the search exact.

What is decided behind a layer, the preferred layout and the form of its gradient, is assumed where
it matters and compared with what follows; a wrong assumption leads to no path.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from workbench.plan.choice import LayerPlan
from workbench.plan.graph import Layer
from workbench.plan.layout import Layout

Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
# In which layouts a value has been read, and whether a gradient of summands comes back from there.
Readings = frozenset[tuple[Layout, bool]]
Cost = tuple[float, ...]


class Costs(Protocol):
    """What layers and conversions cost; all costs are vectors of the same length."""

    def layer(
        self, layer: Layer, choice: LayerPlan | None, read: Layout, given: Layout
    ) -> Cost: ...

    def converted(self, layer: Layer, name: str, read: Layout) -> Cost: ...

    def value(self, name: str, source: Layout, readings: Readings, carried: bool) -> Cost: ...

    def alike(self, name: str) -> Hashable:
        """Equal for layers that cost the same in every choice, and so do their outputs."""


@dataclass(frozen=True)
class LiveValue:
    """A value that has still to be read.

    Attributes:
        layout: where it lies.
        carried: whether its gradient is guessed to come back as summands.
        readings: the layouts in which it has been read.
    """

    layout: Layout
    carried: bool = False
    readings: Readings = frozenset()


@dataclass(frozen=True)
class Stage:
    """The edges of one layer, or some of them.

    Attributes:
        states: number of states before it.
        source: index of the state before each edge, ascending [edges].
        target: index of the state behind each edge, in the next stage [edges].
        costs: the costs of each edge [edges, costs].
        choice: index of each edge's choice among the layer's [edges].
        place: index of each edge among all of the layer [edges].
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
        """Of each state, its first edge; then the number of edges."""
        found: Integers = np.searchsorted(self.source, np.arange(self.states + 1))
        return found

    @cached_property
    def left(self) -> Integers:
        """The states that edges leave."""
        return np.flatnonzero(np.diff(self.first))

    @cached_property
    def starts(self) -> Integers:
        """The first edge of each of these."""
        return self.first[self.left]


@dataclass(frozen=True)
class Trellis:
    """All stages. The first begins with one state, the last leads to one.

    Attributes:
        layers: the layer of each stage.
        options: for each layer that can be split, its choices.
        stages: the stage of each layer.
        at_costs: gives its stages at other costs.
    """

    layers: tuple[Layer, ...]
    options: Mapping[str, tuple[LayerPlan, ...]]
    stages: tuple[Stage, ...]
    at_costs: Callable[[Sequence[Stage], Costs], tuple[Stage, ...]] = field(repr=False)

    def priced(self, costs: Costs) -> "Trellis":
        """The same paths at other costs, of layers that are alike by those that it has too."""
        return replace(self, stages=self.at_costs(self.stages, costs))

    def choices(self, path: Sequence[int]) -> dict[str, LayerPlan]:
        """The plan of a path, given as one edge for each stage."""
        found = {}
        for layer, stage, edge in zip(self.layers, self.stages, path, strict=True):
            if layer.name in self.options:
                found[layer.name] = self.options[layer.name][stage.choice[edge]]
        return found

    def path(self, choices: Mapping[str, LayerPlan]) -> list[int] | None:
        """The path of a plan; None: it has a choice that was not considered."""
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
        return list(reached[0])


def kept(choice: LayerPlan) -> LayerPlan:
    """A choice without what it says of computing again."""
    return replace(choice, recompute=False)
