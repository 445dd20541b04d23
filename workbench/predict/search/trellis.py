"""All plans of a model as paths through a graph of states, so that costs add up along a path.

A stage is a layer, in the order of execution. The state before it holds all that later layers
depend on: for every live value its layout, the layouts in which it has been read, and whether its
gradient comes back as partial sums; and for every layer whose preferred layout an earlier one
depended on, what that may still be. An edge is a layer's choice, with its cost and that of the
conversions of the values that it is the last to read. Two plans in one state have the same
continuations, which makes the search exact.

The preferred layout of a later layer, and the form of its gradient, are assumed where they matter
and compared with what follows; a wrong assumption leads to no path.

States are numbers, equal ones for equal states, so that stages are computed as arrays: the steps of
a layer are computed once for each kind of layer and layouts of its inputs, the effect of a read
once for each state of an input, and both are then combined.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import chain, count
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from workbench.plan.graph.graph import Graph, Layer
from workbench.plan.placement.layer_plan import LayerPlan, placed_by_scheme
from workbench.plan.placement.placement import ROWS, Layout, Replicate
from workbench.plan.placement.rules import CARRIES_PARTIAL, SPLITTABLE, read_each
from workbench.predict.search.choices import LocalPlacement, Preference, preference_of

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
        carried: whether its gradient is assumed to come back as partial sums.
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
    """All stages. The first begins with one state, the last leads to one."""

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


@dataclass(frozen=True)
class Frame:
    """The part of a stage that is the same for all its states: places in the state, by index.

    Attributes:
        names: the names of the live values before it.
        ends: the indices of those that it reads last.
        heard: the number of deciders whose preference has been assumed so far.
        decider: the index among them of the layer's decider, or of itself; None: there is none.
        lives: whether its own value is read later on.
        may_carry: whether its gradient can come back as partial sums.
    """

    layer: Layer
    names: tuple[str, ...]
    reads: tuple[int, ...]
    ends: tuple[int, ...]
    heard: int
    decider: int | None
    lives: bool
    may_carry: bool


def frames_of(
    graph: Graph, placement: LocalPlacement, options: Mapping[str, tuple[LayerPlan, ...]]
) -> list[Frame]:
    """The frames of all layers, in order."""
    last = {name: (readers or (name,))[-1] for name, readers in graph.consumers.items()}
    names, heard = sources_read(graph), list[str]()
    found = []
    for layer in graph.layers:
        whom = placement.deciders.get(layer.name)
        if whom is not None and whom not in heard:
            heard.append(whom)
        own = layer.name if layer.name in options else whom
        readers = graph.consumers[layer.name]
        found.append(
            Frame(
                layer=layer,
                names=tuple(names),
                reads=tuple(names.index(name) for name in layer.inputs),
                ends=tuple(i for i, n in enumerate(names) if last[n] == layer.name),
                heard=len(heard),
                decider=heard.index(own) if own in heard else None,
                lives=bool(readers),
                may_carry=may_carry(graph, layer.name)
                and bool(readers)
                and all(_may_sum(graph[name], options) for name in readers),
            )
        )
        names = [name for name in names if last[name] != layer.name]
        names += [layer.name] * bool(readers)
        if layer.name in heard:
            heard.remove(layer.name)
    return found


def sources_read(graph: Graph) -> list[str]:
    """The inputs that a layer reads, under their names: one may serve evaluation alone."""
    return [name for name in graph.sources if graph.consumers[name]]


def may_carry(graph: Graph, name: str) -> bool:
    """Whether the gradient of a value can come back as partial sums."""
    if name in graph.sources or name in graph.outputs:
        return False
    return graph[name].kind in CARRIES_PARTIAL


def _may_sum(reader: Layer, options: Mapping[str, tuple[LayerPlan, ...]]) -> bool:
    return reader.kind in CARRIES_PARTIAL or reader.name in options


@dataclass(frozen=True, slots=True)
class Step:
    """One way to continue, as far as a stage's own values are concerned.

    Attributes:
        choice: the index of the layer's choice.
        preferences: the number of the set of its decider's preferences under which it is possible.
        state: the numbers of its own value and of its inputs that live on, if any.
        costs: the numbers of the costs of the layer, and of the values that end here.
    """

    choice: int
    preferences: int
    state: tuple[int, ...]
    costs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerStep:
    """A step of a layer, whatever its inputs have been read as so far.

    Attributes:
        choice: the index of the layer's choice.
        preferences: the number of a set of preferences, as in `Step`.
        reads: the numbers of the layouts in which it reads its inputs.
        sums: whether a gradient of partial sums comes back from it.
        own: the number of its own value, if that lives on.
        costs: the numbers of the costs of the layer, and of its value if nothing reads that.
    """

    choice: int
    preferences: int
    reads: tuple[int, ...]
    sums: bool
    own: tuple[int, ...]
    costs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InputRead:
    """A value after one more read: its number, or the number of its cost if it ends."""

    number: tuple[int, ...]
    cost: tuple[int, ...]


T = TypeVar("T", bound=Hashable)


class Numbering(Generic[T]):
    """Numbers for values, equal ones for equal values, so that states are cheap to compare."""

    def __init__(self, *first: T) -> None:
        self.values: list[T] = []
        self._of: dict[T, int] = {}
        for value in first:
            self.of(value)

    def of(self, value: T) -> int:
        """The number of a value."""
        number = self._of.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


class CostTable:
    """A table of costs by their numbers."""

    def __init__(self) -> None:
        self._costs: Floats = np.zeros((0, 0))
        self._count = 0

    def add(self, cost: Cost) -> tuple[int, ...]:
        """Adds a cost, and returns its number."""
        if self._count == len(self._costs):
            more = np.zeros((max(1024, len(self._costs)), len(cost)))
            self._costs = more if not len(self._costs) else np.concatenate([self._costs, more])
        self._costs[self._count] = cost
        self._count += 1
        return (self._count - 1,)

    def summed(self, numbers: Sequence[tuple[int, ...]]) -> Floats:
        """The sums of the costs of these numbers [sums, costs]."""
        counts = np.array([len(some) for some in numbers], dtype=np.int64)
        every = self._costs[np.fromiter(chain.from_iterable(numbers), dtype=np.int64)]
        found: Floats = np.add.reduceat(every, np.cumsum(counts) - counts, axis=0)
        return found


def distinct_rows(rows: Integers) -> tuple[Integers, Integers]:
    """(the index of the first row of each kind, the number of each row's kind [rows])."""
    code = np.zeros(len(rows), dtype=np.int64)
    for column in rows.T:
        if len(code) and int(code.max() + 1) * int(column.max() + 1) >= 2**62:
            code = np.unique(code, return_inverse=True)[1]
        code = code * (column.max(initial=0) + 1) + column
    _, first, which = np.unique(code, return_index=True, return_inverse=True)
    return first, which


_ALL = 0  # the number of the set of all preferences


def trellis_of(
    graph: Graph,
    placement: LocalPlacement,
    options: Mapping[str, tuple[LayerPlan, ...]],
    costs: Costs,
) -> Trellis:
    """Builds the trellis of all plans that can be made of these options."""
    return _Construction(graph, placement, options, costs).built()


class _Construction:
    def __init__(
        self,
        graph: Graph,
        placement: LocalPlacement,
        options: Mapping[str, tuple[LayerPlan, ...]],
        costs: Costs,
    ) -> None:
        self.graph, self.placement = graph, placement
        self.options, self.costs = options, costs
        self.lives, self.layouts = Numbering[LiveValue](), Numbering[Layout]()
        self.layout: list[int] = []  # of each live value, the number of its layout
        self.frames = Numbering[Hashable]()
        self.preferences = Numbering[frozenset[Preference]](frozenset(placement.preferences))
        kinds = Numbering[Hashable]()
        self.kinds = {name: kinds.of(costs.alike(name)) for name in graph.consumers}
        self.rules = {layer.name: kinds.of(placement.alike(layer.name)) for layer in graph.layers}
        self._preferring = {
            name: [(choice, frozenset({preference_of(graph[name], choice)})) for choice in those]
            for name, those in options.items()
        }
        self._stages: dict[Hashable, tuple[Stage, Integers]] = {}
        self._layer_steps: dict[Hashable, list[LayerStep]] = {}
        self._input_reads: dict[tuple[int, int, int], dict[tuple[int, bool], InputRead | None]] = {}
        self._costs: dict[Hashable, tuple[int, ...]] = {}
        self._after: dict[tuple[int, int, bool], int] = {}
        self._table = CostTable()
        # What the costs were asked for, by the number of the cost.
        self._asked: list[Callable[[Costs], Cost]] = []
        # Of each stage: the numbers of its ways' costs, and the way of each edge.
        self._sums: dict[int, tuple[list[tuple[int, ...]], Integers]] = {}

    def built(self) -> Trellis:
        first = self._number(LiveValue(ROWS))
        states = np.full((1, len(sources_read(self.graph))), first, dtype=np.int64)
        stages = []
        for frame in frames_of(self.graph, self.placement, self.options):
            alike = self.frames.of(self._alike(frame))
            known = (alike, states.shape, states.tobytes())
            if known not in self._stages:
                self._stages[known] = self._made(frame, alike, states)
            stage, states = self._stages[known]
            stages.append(stage)
        return Trellis(self.graph.layers, self.options, tuple(stages), self._priced)

    def _priced(self, stages: Sequence[Stage], costs: Costs) -> tuple[Stage, ...]:
        """The same stages at other costs."""
        table = CostTable()
        for asked in self._asked:
            table.add(asked(costs))
        known = {}
        for stage in {id(stage): stage for stage in stages}.values():
            numbers, way = self._sums[id(stage)]
            known[id(stage)] = replace(stage, costs=table.summed(numbers)[way])
        return tuple(known[id(stage)] for stage in stages)

    def _cost(self, asked: Callable[[Costs], Cost]) -> tuple[int, ...]:
        """The number of a cost."""
        self._asked.append(asked)
        return self._table.add(asked(self.costs))

    def _alike(self, frame: Frame) -> Hashable:
        """A key that is equal for frames in which equal states have equal edges."""
        name = frame.layer.name
        return (
            self.kinds[name],
            tuple(self.kinds[frame.names[index]] for index in frame.ends),
            frame.reads,
            frame.ends,
            frame.heard,
            frame.decider,
            frame.lives,
            frame.may_carry,
            self.options.get(name),
            self._asked_by_name(name),
            self.rules[name],
        )

    def _asked_by_name(self, name: str) -> str:
        """Its name, where an own scheme is asked about it, which may look at anything; else ""."""
        return name if any(choice.is_own for choice in self.options.get(name, ())) else ""

    def _made(self, frame: Frame, alike: int, states: Integers) -> tuple[Stage, Integers]:
        count, width = len(states), len(frame.names)
        newly = frame.heard - (states.shape[1] - width)
        states = np.concatenate([states, np.full((count, newly), _ALL)], axis=1)
        ours = sorted(set(frame.reads))
        first, which = distinct_rows(states[:, ours])
        ways = [self._steps_of(frame, alike, states[index, ours].tolist()) for index in first]

        # Each state with each of its steps is an edge, unless its preferences were ruled out.
        counts = np.array([len(some) for some in ways], dtype=np.int64)[which]
        starts = np.cumsum([0, *(len(some) for some in ways)])[which]
        source = np.repeat(np.arange(count), counts)
        way = (
            starts[source] + np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
        )
        every = [one for some in ways for one in some]
        heard = [] if frame.decider is None else [width + frame.decider]
        left = states[source][:, heard]
        if heard:
            asked = np.array([one.preferences for one in every], dtype=np.int64)[way]
            left = self._left_open(left[:, 0], asked)[:, None]
            open_ = left[:, 0] >= 0
            source, way, left = source[open_], way[open_], left[open_]

        changed = np.array([one.state for one in every], dtype=np.int64).reshape(len(every), -1)
        after = states[source]
        after[:, [i for i in ours if i not in frame.ends]] = changed[way, frame.lives :]
        after[:, heard] = left
        gone = set(frame.ends) | (set(heard) if frame.layer.name in self.options else set())
        stay = [index for index in range(after.shape[1]) if index not in gone]
        split = sum(index < width for index in stay)
        own = [changed[way, :1]] if frame.lives else []
        kept = after[:, stay]
        after = np.concatenate([kept[:, :split], *own, kept[:, split:]], axis=1)
        first, target = distinct_rows(after)
        numbers = [one.costs for one in every]
        chosen = np.array([one.choice for one in every], dtype=np.int64)[way]
        stage = Stage(
            count, source, target, self._table.summed(numbers)[way], chosen, np.arange(len(way))
        )
        self._sums[id(stage)] = numbers, way
        return stage, after[first]

    def _left_open(self, open_: Integers, asked: Integers) -> Integers:
        """The numbers of the intersections of sets of preferences; -1: it is empty."""
        size = len(self.preferences.values)
        pairs, which = np.unique(open_ * size + asked, return_inverse=True)
        found = []
        for one, other in zip(*(side.tolist() for side in divmod(pairs, size)), strict=True):
            both = self.preferences.values[one] & self.preferences.values[other]
            found.append(self.preferences.of(both) if both else -1)
        return np.array(found, dtype=np.int64)[which]

    def _steps_of(self, frame: Frame, alike: int, shown: list[int]) -> list[Step]:
        """Every step from given inputs, under any preference."""
        ours = sorted(set(frame.reads))
        numbers = dict(zip(ours, shown, strict=True))
        coming = tuple(self.layout[numbers[index]] for index in frame.reads)
        key = (alike, coming)
        if key not in self._layer_steps:
            self._layer_steps[key] = self._layer_steps_of(frame, coming)
        known = [
            (i, n, self._input_reads.setdefault((alike, i, n), {})) for i, n in numbers.items()
        ]
        found = []
        for step in self._layer_steps[key]:
            state, costs = step.own, step.costs
            for index, number, input_reads in known:
                reading = (step.reads[frame.reads.index(index)], step.sums)
                if reading not in input_reads:
                    input_reads[reading] = self._read(frame, index, number, *reading)
                input_read = input_reads[reading]
                if input_read is None:
                    break
                state += input_read.number
                costs += input_read.cost
            else:
                found.append(Step(step.choice, step.preferences, state, costs))
        return found

    def _layer_steps_of(self, frame: Frame, coming: tuple[int, ...]) -> list[LayerStep]:
        """The steps of a layer with inputs of these layouts."""
        layer, found = frame.layer, list[LayerStep]()
        shapes = [self.graph.shape_of(name) for name in layer.inputs]
        layouts = tuple(self.layouts.values[number] for number in coming)
        for place, choice, read, given, asked in self._placed(frame, layouts):
            whole = read != ROWS and read.placement == Replicate()
            preferences, costs = (
                self.preferences.of(asked),
                self._layer_cost(layer, choice, read, given),
            )
            if not frame.lives:
                costs += self._value_cost(layer.name, self._number(LiveValue(given)))
            alike = choice is not None and choice.group_size > 1
            each = (read,) * len(shapes) if alike else read_each(layer, read, shapes)
            reads = tuple(map(self.layouts.of, each))
            for carried in (False, True) if frame.may_carry and whole else (False,):
                sums = carried if choice is None else whole and choice.sums_back(given)
                own = (self._number(LiveValue(given, carried)),) if frame.lives else ()
                found.append(LayerStep(place, preferences, reads, sums, own, costs))
        return found

    def _read(
        self, frame: Frame, index: int, number: int, layout: int, sums: bool
    ) -> InputRead | None:
        """The effect of reading a value; None: its gradient was assumed wrongly."""
        value, read = self.lives.values[number], self.layouts.values[layout]
        if value.carried and (read != value.layout or not sums):
            return None
        name = frame.names[index]
        cost: tuple[int, ...] = ()
        if read != value.layout and all(read != layout for layout, _ in value.readings):
            cost = self._converted_cost(frame.layer, name, read)
        number = self._once_more(number, layout, sums)
        value = self.lives.values[number]
        if index not in frame.ends:
            return InputRead((number,), cost)
        alone = value.readings == {(value.layout, True)}
        if alone and not value.carried and may_carry(self.graph, name):
            return None
        return InputRead((), cost + self._value_cost(name, number))

    def _once_more(self, number: int, layout: int, sums: bool) -> int:
        """The number of a value after one more read."""
        key = (number, layout, sums)
        if key not in self._after:
            value, read = self.lives.values[number], self.layouts.values[layout]
            readings = value.readings | {(read, sums)}
            self._after[key] = self._number(LiveValue(value.layout, value.carried, readings))
        return self._after[key]

    def _number(self, value: LiveValue) -> int:
        number = self.lives.of(value)
        if number == len(self.layout):
            self.layout.append(self.layouts.of(value.layout))
        return number

    def _layer_cost(
        self, layer: Layer, choice: LayerPlan | None, read: Layout, given: Layout
    ) -> tuple[int, ...]:
        kind = self.kinds[layer.name]
        own = layer.name if choice is not None and choice.is_own else ""
        key = (kind, choice, self.layouts.of(read), self.layouts.of(given), own)
        if key not in self._costs:
            self._costs[key] = self._cost(lambda costs: costs.layer(layer, choice, read, given))
        return self._costs[key]

    def _converted_cost(self, layer: Layer, name: str, read: Layout) -> tuple[int, ...]:
        key = (self.kinds[layer.name], layer.inputs.index(name), self.layouts.of(read))
        if key not in self._costs:
            self._costs[key] = self._cost(lambda costs: costs.converted(layer, name, read))
        return self._costs[key]

    def _value_cost(self, name: str, number: int) -> tuple[int, ...]:
        key = (self.kinds[name], number)
        if key not in self._costs:
            value = self.lives.values[number]
            how = name, value.layout, value.readings, value.carried
            self._costs[key] = self._cost(lambda costs: costs.value(*how))
        return self._costs[key]

    def _placed(
        self, frame: Frame, coming: tuple[Layout, ...]
    ) -> list[tuple[int, LayerPlan | None, Layout, Layout, frozenset[Preference]]]:
        """(index of the choice, choice, layout read, layout given, preferences that allow it)."""
        layer = frame.layer
        if layer.name in self.options:
            return [
                (
                    place,
                    choice,
                    *self._of_choice(layer, choice, coming),
                    preferred,
                )
                for place, (choice, preferred) in enumerate(self._preferring[layer.name])
            ]
        ways = self.placement.followed(layer, coming)
        every = self.preferences.values[_ALL]
        return [(-1, None, *place, every if len(ways) == 1 else ways[place]) for place in ways]

    def _of_choice(
        self, layer: Layer, choice: LayerPlan, coming: tuple[Layout, ...]
    ) -> tuple[Layout, Layout]:
        """The layouts of a layer under one of its choices, of which one may be to follow."""
        if layer.kind in SPLITTABLE or choice.group_size > 1:
            return placed_by_scheme(layer, choice, coming[0])
        (place,) = self.placement.followed(layer, coming)  # no later layer has a say in it
        return place
