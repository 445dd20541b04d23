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

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from workbench.plan.choice import LayerPlan
from workbench.plan.graph import Graph, Layer
from workbench.plan.layout import ROWS, Layout
from workbench.plan.placement import Replicate
from workbench.plan.rules import CARRIES_PARTIAL, SPLITTABLE, SUMMED_BACK
from workbench.predict.search.choices import Wish, wish_of
from workbench.predict.search.following import Following

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
# In which layouts a value has been read, and whether a gradient of summands comes back from there.
Readings = frozenset[tuple[Layout, bool]]
Cost = tuple[float, ...]
T = TypeVar("T", bound=Hashable)


class Costs(Protocol):
    """What layers and conversions cost; all costs are vectors of the same length."""

    def layer(
        self, layer: Layer, choice: LayerPlan | None, read: Layout, given: Layout
    ) -> Cost: ...

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


_ALL = 0  # the number of: every wish


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


@dataclass(frozen=True)
class Trellis:
    """All stages. The first begins with one state, the last leads to one.

    Attributes:
        layers: of each stage.
        options: for each layer that can be split, its choices.
        stages: of the layers.
    """

    layers: tuple[Layer, ...]
    options: Mapping[str, tuple[LayerPlan, ...]]
    stages: tuple[Stage, ...]

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


@dataclass(frozen=True)
class _Frame:
    """What of a stage is the same for all its states: places in the state, by index.

    Attributes:
        layer: of the stage.
        names: of the live values before it.
        reads: indices of its inputs among them.
        ends: indices of those that it reads last.
        heard: number of layers with a scheme that have been heard so far.
        wisher: index among them of whom the layer hears, or of itself; None: there is none.
        lives: whether its own value is read later on.
        may_carry: whether its gradient can come back as summands.
    """

    layer: Layer
    names: tuple[str, ...]
    reads: tuple[int, ...]
    ends: tuple[int, ...]
    heard: int
    wisher: int | None
    lives: bool
    may_carry: bool


def trellis_of(
    graph: Graph,
    following: Following,
    options: Mapping[str, tuple[LayerPlan, ...]],
    costs: Costs,
) -> Trellis:
    """Lays out all plans that can be made of these options.

    Args:
        graph: the model.
        following: its placement rules.
        options: for each layer that can be split, its choices.
        costs: of layers and conversions.
    """
    return _Laying(graph, following, options, costs).laid()


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to go on, as far as a stage's own values are concerned.

    Attributes:
        choice: index of the layer's choice.
        state: numbers of its own value, of its inputs that live on, and of the wishes still open
            to whom it hears; as far as there are any.
        cost: of the layer, and of all that ends here.
    """

    choice: int
    state: tuple[int, ...]
    cost: Cost


@dataclass(frozen=True, slots=True)
class _Move:
    """What a layer does, whatever its inputs have seen so far.

    Attributes:
        choice: index of the layer's choice.
        read: number of the layout in which it reads.
        sums: whether a gradient of summands comes back from it.
        own: number of its own value, where that lives.
        wishes: number of the wishes still open to whom it hears, if it hears somebody.
        cost: of the layer.
    """

    choice: int
    read: int
    sums: bool
    own: tuple[int, ...]
    wishes: tuple[int, ...]
    cost: Cost


@dataclass(frozen=True, slots=True)
class _Met:
    """A value that has been read once more: its number, or the cost with which it ends."""

    number: tuple[int, ...]
    cost: Cost


class _Numbers(Generic[T]):
    """Equal values have equal numbers, so that states are cheap to compare."""

    def __init__(self, *first: T) -> None:
        self.values: list[T] = []
        self._of: dict[T, int] = {}
        for value in first:
            self.of(value)

    def of(self, value: T) -> int:
        number = self._of.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


class _Laying:
    def __init__(
        self,
        graph: Graph,
        following: Following,
        options: Mapping[str, tuple[LayerPlan, ...]],
        costs: Costs,
    ) -> None:
        self.graph, self.following = graph, following
        self.options, self.costs = options, costs
        self.last = {name: (readers or (name,))[-1] for name, readers in graph.consumers.items()}
        self.lives, self.layouts = _Numbers[Live](), _Numbers[Layout]()
        self.layout: list[int] = []  # of each live value, the number of its layout
        self.frames = _Numbers[Hashable]()
        self.wishes = _Numbers[frozenset[Wish]](frozenset(following.wishes))
        kinds = _Numbers[Hashable]()
        self.kinds = {name: kinds.of(costs.alike(name)) for name in graph.consumers}
        self.rules = {layer.name: kinds.of(following.alike(layer.name)) for layer in graph.layers}
        self._stages: dict[Hashable, tuple[Stage, Integers]] = {}
        self._moves: dict[Hashable, list[_Move]] = {}
        self._meets: dict[Hashable, _Met | None] = {}
        self._costs: dict[Hashable, Cost] = {}

    def laid(self) -> Trellis:
        states = np.array([[self._number(Live(ROWS))]], dtype=np.int64)
        stages = []
        for frame in self._frames():
            alike = self.frames.of(self._alike(frame))
            known = (alike, states.shape, states.tobytes())
            if known not in self._stages:
                self._stages[known] = self._made(frame, alike, states)
            stage, states = self._stages[known]
            stages.append(stage)
        return Trellis(self.graph.layers, self.options, tuple(stages))

    def _frames(self) -> list[_Frame]:
        names, heard = ["input"], list[str]()
        found = []
        for layer in self.graph.layers:
            whom = self.following.wishers.get(layer.name)
            if whom is not None and whom not in heard:
                heard.append(whom)
            own = layer.name if layer.kind in SPLITTABLE else whom
            readers = self.graph.consumers[layer.name]
            found.append(
                _Frame(
                    layer=layer,
                    names=tuple(names),
                    reads=tuple(names.index(name) for name in layer.inputs),
                    ends=tuple(i for i, n in enumerate(names) if self.last[n] == layer.name),
                    heard=len(heard),
                    wisher=heard.index(own) if own in heard else None,
                    lives=bool(readers),
                    may_carry=self._may_carry(layer.name)
                    and bool(readers)
                    and all(self._may_sum(self.graph[name]) for name in readers),
                )
            )
            names = [name for name in names if self.last[name] != layer.name]
            names += [layer.name] * bool(readers)
            if layer.name in heard:
                heard.remove(layer.name)
        return found

    def _may_carry(self, name: str) -> bool:
        if name == "input" or name in self.graph.outputs:
            return False
        return self.graph[name].kind in CARRIES_PARTIAL

    def _may_sum(self, reader: Layer) -> bool:
        return reader.kind in CARRIES_PARTIAL or reader.name in self.options

    def _alike(self, frame: _Frame) -> Hashable:
        """Equal where equal states have equal edges."""
        name = frame.layer.name
        return (
            self.kinds[name],
            tuple(self.kinds[frame.names[index]] for index in frame.ends),
            frame.reads,
            frame.ends,
            frame.heard,
            frame.wisher,
            frame.lives,
            frame.may_carry,
            self.options.get(name),
            self.rules[name],
        )

    def _made(self, frame: _Frame, alike: int, states: Integers) -> tuple[Stage, Integers]:
        count, width = len(states), len(frame.names)
        newly = frame.heard - (states.shape[1] - width)
        states = np.concatenate([states, np.full((count, newly), _ALL)], axis=1)
        ours = sorted(set(frame.reads))
        heard = [] if frame.wisher is None else [width + frame.wisher]
        shown = states[:, [*ours, *heard]]
        first, which = _distinct(shown)
        ways = [self._ways_of(frame, alike, shown[index].tolist()) for index in first]

        # Every state with each of its ways: an edge.
        counts = np.array([len(some) for some in ways], dtype=np.int64)
        starts = np.cumsum(counts) - counts
        source = np.repeat(np.arange(count), counts[which])
        turn = np.arange(len(source)) - np.repeat(
            np.cumsum(counts[which]) - counts[which], counts[which]
        )
        way = starts[which][source] + turn

        every = [one for some in ways for one in some]
        changed = np.array([one.state for one in every], dtype=np.int64).reshape(len(every), -1)
        after = states[source]
        after[:, [*(i for i in ours if i not in frame.ends), *heard]] = changed[way, frame.lives :]
        gone = set(frame.ends) | (set(heard) if frame.layer.name in self.options else set())
        stay = [index for index in range(after.shape[1]) if index not in gone]
        split = sum(index < width for index in stay)
        own = [changed[way, :1]] if frame.lives else []
        kept = after[:, stay]
        after = np.concatenate([kept[:, :split], *own, kept[:, split:]], axis=1)
        first, target = _distinct(after)
        costs = np.array([one.cost for one in every], dtype=np.float64)[way]
        chosen = np.array([one.choice for one in every], dtype=np.int64)[way]
        return Stage(count, source, target, costs, chosen), after[first]

    def _ways_of(self, frame: _Frame, alike: int, shown: list[int]) -> list[_Way]:
        """Every way to go on from given inputs, and wishes open to whom the layer hears."""
        ours = sorted(set(frame.reads))
        numbers = dict(zip(ours, shown, strict=False))
        wished = shown[len(ours) :]
        coming = tuple(self.layout[numbers[index]] for index in frame.reads)
        key = (alike, coming, *wished)
        if key not in self._moves:
            self._moves[key] = self._moves_of(frame, coming, wished)
        found = []
        for move in self._moves[key]:
            state, cost = list(move.own), move.cost
            for index in ours:
                met = self._met(frame, alike, index, numbers[index], move)
                if met is None:
                    break
                state += met.number
                if met.cost:
                    cost = _sum(cost, met.cost)
            else:
                found.append(_Way(move.choice, (*state, *move.wishes), cost))
        return found

    def _moves_of(
        self, frame: _Frame, coming: tuple[int, ...], wished: Sequence[int]
    ) -> list[_Move]:
        """What a layer can do with inputs of these layouts."""
        layer, found = frame.layer, []
        open_ = self.wishes.values[wished[0] if wished else _ALL]
        layouts = tuple(self.layouts.values[number] for number in coming)
        for place, choice, read, given, left in self._placed(frame, open_, layouts):
            whole = read != ROWS and read.placement == Replicate()
            cost = self._layer_cost(layer, choice, read, given)
            if not frame.lives:
                cost = _sum(cost, self._value_cost(layer.name, Live(given)))
            for carried in (False, True) if frame.may_carry and whole else (False,):
                sums = carried if choice is None else whole and choice.scheme in SUMMED_BACK
                own = (self._number(Live(given, carried)),) if frame.lives else ()
                wishes = (self.wishes.of(left),) if wished else ()
                found.append(_Move(place, self.layouts.of(read), sums, own, wishes, cost))
        return found

    def _met(self, frame: _Frame, alike: int, index: int, number: int, move: _Move) -> _Met | None:
        """What reading makes of a value; None: its gradient was guessed wrong."""
        key = (alike, index, number, move.read, move.sums)
        if key not in self._meets:
            self._meets[key] = self._read(frame, index, number, move)
        return self._meets[key]

    def _read(self, frame: _Frame, index: int, number: int, move: _Move) -> _Met | None:
        value, read = self.lives.values[number], self.layouts.values[move.read]
        if value.carried and (read != value.layout or not move.sums):
            return None
        value = replace(value, readings=value.readings | {(read, move.sums)})
        if index not in frame.ends:
            return _Met((self._number(value),), ())
        name = frame.names[index]
        alone = value.readings == {(value.layout, True)}
        if alone and not value.carried and self._may_carry(name):
            return None
        return _Met((), self._value_cost(name, value))

    def _number(self, value: Live) -> int:
        number = self.lives.of(value)
        if number == len(self.layout):
            self.layout.append(self.layouts.of(value.layout))
        return number

    def _layer_cost(
        self, layer: Layer, choice: LayerPlan | None, read: Layout, given: Layout
    ) -> Cost:
        key = (self.kinds[layer.name], choice, read, given)
        if key not in self._costs:
            self._costs[key] = self.costs.layer(layer, choice, read, given)
        return self._costs[key]

    def _value_cost(self, name: str, value: Live) -> Cost:
        key = (self.kinds[name], value)
        if key not in self._costs:
            self._costs[key] = self.costs.value(name, value.layout, value.readings, value.carried)
        return self._costs[key]

    def _placed(
        self, frame: _Frame, open_: frozenset[Wish], coming: tuple[Layout, ...]
    ) -> list[tuple[int, LayerPlan | None, Layout, Layout, frozenset[Wish]]]:
        """(index of the choice, choice, layout read, layout given, wishes left open)."""
        layer = frame.layer
        if layer.name in self.options:
            return [
                (place, choice, *self.following.by_scheme(layer, choice, coming), open_)
                for place, choice in enumerate(self.options[layer.name])
                if wish_of(layer, choice) in open_
            ]
        ways = self.following.followed(layer, coming)
        if len(ways) == 1:
            return [(-1, None, *place, open_) for place in ways]
        return [
            (-1, None, *place, wishes & open_) for place, wishes in ways.items() if wishes & open_
        ]


def kept(choice: LayerPlan) -> LayerPlan:
    """A choice without what it says of computing again."""
    return replace(choice, recompute=False)


def _distinct(rows: Integers) -> tuple[Integers, Integers]:
    """(index of one of each kind of row, for each row the number of its kind)."""
    code = np.zeros(len(rows), dtype=np.int64)
    for column in rows.T:
        if len(code) and int(code.max() + 1) * int(column.max() + 1) >= 2**62:
            code = np.unique(code, return_inverse=True)[1]
        code = code * (column.max(initial=0) + 1) + column
    _, first, which = np.unique(code, return_index=True, return_inverse=True)
    return first, which


def _sum(one: Cost, other: Cost) -> Cost:
    return tuple(map(add, one, other))
