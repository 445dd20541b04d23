"""Laying out a trellis, stage by stage.

States are numbers, equal ones for equal things, so that stages are worked out as arrays: what a
layer can do is asked for once for each kind of layer and each of its inputs' layouts, what its
reading makes of an input once for each that an input has seen, and both are then combined.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from workbench.plan.choice import LayerPlan
from workbench.plan.graph import Graph, Layer
from workbench.plan.layout import ROWS, Layout
from workbench.plan.placement import Replicate
from workbench.plan.rules import SUMMED_BACK
from workbench.predict.search.choices import Wish, wish_of
from workbench.predict.search.following import Following
from workbench.predict.search.frames import Frame, frames_of, may_carry
from workbench.predict.search.numbers import Numbers, Table, distinct
from workbench.predict.search.trellis import Costs, Integers, Live, Stage, Trellis

_ALL = 0  # the number of: every wish


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
        costs: numbers of the cost of the layer, and of all that ends here.
    """

    choice: int
    state: tuple[int, ...]
    costs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Move:
    """What a layer does, whatever its inputs have seen so far.

    Attributes:
        choice: index of the layer's choice.
        read: number of the layout in which it reads.
        sums: whether a gradient of summands comes back from it.
        own: number of its own value, where that lives.
        wishes: number of the wishes still open to whom it hears, if it hears somebody.
        costs: numbers of the cost of the layer, and of its value where nobody reads that.
    """

    choice: int
    read: int
    sums: bool
    own: tuple[int, ...]
    wishes: tuple[int, ...]
    costs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Met:
    """A value that has been read once more: its number, or that of the cost with which it ends."""

    number: tuple[int, ...]
    cost: tuple[int, ...]


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
        self.lives, self.layouts = Numbers[Live](), Numbers[Layout]()
        self.layout: list[int] = []  # of each live value, the number of its layout
        self.frames = Numbers[Hashable]()
        self.wishes = Numbers[frozenset[Wish]](frozenset(following.wishes))
        kinds = Numbers[Hashable]()
        self.kinds = {name: kinds.of(costs.alike(name)) for name in graph.consumers}
        self.rules = {layer.name: kinds.of(following.alike(layer.name)) for layer in graph.layers}
        self._stages: dict[Hashable, tuple[Stage, Integers]] = {}
        self._moves: dict[Hashable, list[_Move]] = {}
        self._meets: dict[Hashable, _Met | None] = {}
        self._costs: dict[Hashable, tuple[int, ...]] = {}
        self._after: dict[tuple[int, int, bool], int] = {}
        self._table = Table()

    def laid(self) -> Trellis:
        states = np.array([[self._number(Live(ROWS))]], dtype=np.int64)
        stages = []
        for frame in frames_of(self.graph, self.following, self.options):
            alike = self.frames.of(self._alike(frame))
            known = (alike, states.shape, states.tobytes())
            if known not in self._stages:
                self._stages[known] = self._made(frame, alike, states)
            stage, states = self._stages[known]
            stages.append(stage)
        return Trellis(self.graph.layers, self.options, tuple(stages))

    def _alike(self, frame: Frame) -> Hashable:
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

    def _made(self, frame: Frame, alike: int, states: Integers) -> tuple[Stage, Integers]:
        count, width = len(states), len(frame.names)
        newly = frame.heard - (states.shape[1] - width)
        states = np.concatenate([states, np.full((count, newly), _ALL)], axis=1)
        ours = sorted(set(frame.reads))
        heard = [] if frame.wisher is None else [width + frame.wisher]
        shown = states[:, [*ours, *heard]]
        first, which = distinct(shown)
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
        first, target = distinct(after)
        costs = self._table.summed([one.costs for one in every])[way]
        chosen = np.array([one.choice for one in every], dtype=np.int64)[way]
        return Stage(count, source, target, costs, chosen), after[first]

    def _ways_of(self, frame: Frame, alike: int, shown: list[int]) -> list[_Way]:
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
            state, costs = list(move.own), move.costs
            for index in ours:
                met = self._met(frame, alike, index, numbers[index], move)
                if met is None:
                    break
                state += met.number
                costs += met.cost
            else:
                found.append(_Way(move.choice, (*state, *move.wishes), costs))
        return found

    def _moves_of(
        self, frame: Frame, coming: tuple[int, ...], wished: Sequence[int]
    ) -> list[_Move]:
        """What a layer can do with inputs of these layouts."""
        layer, found = frame.layer, []
        open_ = self.wishes.values[wished[0] if wished else _ALL]
        layouts = tuple(self.layouts.values[number] for number in coming)
        for place, choice, read, given, left in self._placed(frame, open_, layouts):
            whole = read != ROWS and read.placement == Replicate()
            costs = self._layer_cost(layer, choice, read, given)
            if not frame.lives:
                costs += self._value_cost(layer.name, self._number(Live(given)))
            for carried in (False, True) if frame.may_carry and whole else (False,):
                sums = carried if choice is None else whole and choice.scheme in SUMMED_BACK
                own = (self._number(Live(given, carried)),) if frame.lives else ()
                wishes = (self.wishes.of(left),) if wished else ()
                found.append(_Move(place, self.layouts.of(read), sums, own, wishes, costs))
        return found

    def _met(self, frame: Frame, alike: int, index: int, number: int, move: _Move) -> _Met | None:
        """What reading makes of a value; None: its gradient was guessed wrong."""
        key = (alike, index, number, move.read, move.sums)
        if key not in self._meets:
            self._meets[key] = self._read(frame, index, number, move)
        return self._meets[key]

    def _read(self, frame: Frame, index: int, number: int, move: _Move) -> _Met | None:
        value, read = self.lives.values[number], self.layouts.values[move.read]
        if value.carried and (read != value.layout or not move.sums):
            return None
        name = frame.names[index]
        cost: tuple[int, ...] = ()
        if read != value.layout and all(read != layout for layout, _ in value.readings):
            cost = self._converted_cost(frame.layer, name, read)
        number = self._once_more(number, move)
        value = self.lives.values[number]
        if index not in frame.ends:
            return _Met((number,), cost)
        alone = value.readings == {(value.layout, True)}
        if alone and not value.carried and may_carry(self.graph, name):
            return None
        return _Met((), cost + self._value_cost(name, number))

    def _once_more(self, number: int, move: _Move) -> int:
        """The number of a value when it has been read once more."""
        key = (number, move.read, move.sums)
        if key not in self._after:
            value, read = self.lives.values[number], self.layouts.values[move.read]
            readings = value.readings | {(read, move.sums)}
            self._after[key] = self._number(Live(value.layout, value.carried, readings))
        return self._after[key]

    def _number(self, value: Live) -> int:
        number = self.lives.of(value)
        if number == len(self.layout):
            self.layout.append(self.layouts.of(value.layout))
        return number

    def _layer_cost(
        self, layer: Layer, choice: LayerPlan | None, read: Layout, given: Layout
    ) -> tuple[int, ...]:
        kind = self.kinds[layer.name]
        key = (kind, choice, self.layouts.of(read), self.layouts.of(given))
        if key not in self._costs:
            self._costs[key] = self._table.add(self.costs.layer(layer, choice, read, given))
        return self._costs[key]

    def _converted_cost(self, layer: Layer, name: str, read: Layout) -> tuple[int, ...]:
        key = (self.kinds[layer.name], layer.inputs.index(name), self.layouts.of(read))
        if key not in self._costs:
            self._costs[key] = self._table.add(self.costs.converted(layer, name, read))
        return self._costs[key]

    def _value_cost(self, name: str, number: int) -> tuple[int, ...]:
        key = (self.kinds[name], number)
        if key not in self._costs:
            value = self.lives.values[number]
            cost = self.costs.value(name, value.layout, value.readings, value.carried)
            self._costs[key] = self._table.add(cost)
        return self._costs[key]

    def _placed(
        self, frame: Frame, open_: frozenset[Wish], coming: tuple[Layout, ...]
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
