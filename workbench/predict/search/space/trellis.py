"""All plans of a model as the paths through a graph of states, so that costs add up along a path.

A stage is a layer, in the order of execution. The state before it says all that what follows can
depend on: of every value that has still to be read, where it lies, who has read it in what layout
so far, and whether its gradient will come back as summands; and of every layer with a scheme that
an earlier one has heard, what it may wish. An edge is a layer's choice, with its cost and that of
the conversions of what it was the last to read. Two plans that agree on a state can be continued
alike, and that is what makes the search exact.

What is decided behind a layer, its wish and its gradient's summands, is guessed where it matters
and held against what follows; a wrong guess ends nowhere.
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
class Live:
    """A value that has still to be read.

    Attributes:
        layout: where it lies.
        carried: whether its gradient is guessed to come back as summands.
        readings: by those who have read it.
    """

    layout: Layout
    carried: bool = False
    readings: Readings = frozenset()


@dataclass(frozen=True)
class Stage:
    """The edges of one layer.

    Attributes:
        states: number of states before it.
        source: of each edge, the index of the state before; ascending.
        target: of each edge, the index of the state behind, in the next stage.
        costs: of each edge, [edges, costs].
        choice: of each edge, the index of the layer's choice.
    """

    states: int
    source: Integers
    target: Integers
    costs: Floats
    choice: Integers

    @cached_property
    def starts(self) -> Integers:
        """The first edge of each state that has edges."""
        return np.flatnonzero(np.diff(self.source, prepend=-1))

    @cached_property
    def left(self) -> Integers:
        """The states that edges leave."""
        found: Integers = self.source[self.starts]
        return found


@dataclass(frozen=True)
class Trellis:
    """All stages. The first begins with one state, the last leads to one.

    Attributes:
        layers: of each stage.
        options: for each layer that can be split, its choices.
        stages: of the layers.
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
