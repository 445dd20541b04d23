"""The values saved for backward, layer by layer, as an automaton over recomputation and tails.

Besides its scheme every layer chooses whether it is recomputed in the backward pass (activation
checkpointing), and the model chooses where its tail begins if it runs in rounds. What is saved of a
value depends on the layers that produce and read it:

    a layer that is not recomputed        saves its output or inputs, as its kind needs
    a layer that is recomputed            saves its inputs from before its segment, until the
                                          segment's own backward pass; all else is alive from the
                                          segment's recomputation to the layer's own

so a value is freed only if all layers that need it are recomputed in one segment. A state of the
automaton has for each live value whether it is saved already, and if not, whether it was produced
in the current segment, and for how many layers that will continue; it is combined with the
trellis's states.

A tail in rounds holds a part of its activations at a time. It begins where a single value is live,
and only that value is converted from own rows into groups after it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from workbench.plan.graph.graph import Graph, Layer
from workbench.predict.search.limit.footprint import SLOTS, Footprints
from workbench.predict.search.space.trellis import Floats, Integers

ANY, NONE, ONE = range(3)
"""Conversions from own rows into groups: any, none, one of the tail's."""


@dataclass(frozen=True)
class Transitions:
    """The automaton's transitions at one layer, ordered by the state before.

    Attributes:
        states: the number of states before.
        after_states: the number of states after.
        before: the state before each transition [transitions].
        after: the state after each transition [transitions].
        recompute: 1 where the layer is recomputed, else 0 [transitions].
        kept: the saved fraction of beside, output, inputs and converted inputs [transitions, 2 + 2
            SLOTS].
        there: the fraction that is alive in its segment's backward pass alone [transitions, 2 + 2
            SLOTS].
        left: the number of further layers of its segment, at least [transitions].
        repeats: 1 where conversions are recomputed with the layer, else 0 [transitions].
        tail: 1 where the layer is in a tail that runs in rounds, else 0 [transitions].
        held: the bytes that are alive from this layer on: where a tail begins, the gradient of its
            input [transitions].
        stays: the bytes that are alive all the time: inputs that nothing else saves [transitions].
        entry: the conversions that are allowed: `ANY`, `NONE` or `ONE` [transitions].
    """

    states: int
    after_states: int
    before: Integers
    after: Integers
    recompute: Floats
    kept: Floats
    there: Floats
    left: Integers
    repeats: Floats
    tail: Floats
    held: Floats
    stays: Floats
    entry: Integers

    @classmethod
    def of(cls, states: int, after_states: int, rows: Iterable[Sequence[object]]) -> "Transitions":
        """Makes transitions of rows of values, in the order of the attributes."""
        columns: list[Any] = [
            np.array(column, dtype=np.int64 if name in _INTEGERS else np.float64)
            for name, column in zip(_COLUMNS, zip(*rows, strict=True), strict=True)
        ]
        return cls(states, after_states, *columns)

    @cached_property
    def starts(self) -> Integers:
        """The first transition of each state [states]."""
        found: Integers = np.searchsorted(self.before, np.arange(self.states))
        return found

    @cached_property
    def ends(self) -> Integers:
        """The index after the last transition of each state [states]."""
        return np.append(self.starts[1:], len(self.before))

    @property
    def key(self) -> tuple[bytes, ...]:
        """A key that is equal for equal transitions."""
        columns = (getattr(self, name) for name in _COLUMNS)
        sizes = repr((self.states, self.after_states)).encode()
        return (sizes, *(column.tobytes() for column in columns))

    @classmethod
    def joined(cls, every: "Iterable[tuple[Transitions, int]]") -> "Transitions":
        """Joins one transition of each."""
        rows = ([getattr(some, name)[place] for name in _COLUMNS] for some, place in every)
        return cls.of(1, 1, rows)


_COLUMNS = tuple(field.name for field in fields(Transitions))[2:]
_INTEGERS = ("before", "after", "left", "entry")


_BEFORE, _BEGUN, _BEHIND = range(3)  # the tail's gather
# A value that is not saved yet: produced outside the current segment, inside, or saved in it.
_OUTSIDE, _INSIDE, _INNER = 1, 2, 3
_NO_SEGMENT = -1
REACH = 4
"""The number of layers ahead for which a segment's continuation is known."""
# (phase, values that are not saved yet, layers that the segment is known to continue for)
_State = tuple[int, tuple[tuple[str, int], ...], int]


@dataclass(frozen=True)
class RecomputeAutomaton:
    """The automaton of what is saved: its transitions are what one layer may do.

    Attributes:
        transitions: the transitions of each layer.
        ends: whether a plan may end in each state after the last layer [states].
        parts: whether each layer ends the segment before it, unless it is itself in it [layers].
        reaches: for each layer, the index behind it, and behind the first, second, ... later layer
            of those that `parts` marks [layers of [1 + reach]].
    """

    transitions: tuple[Transitions, ...]
    ends: tuple[bool, ...]
    parts: tuple[bool, ...]
    reaches: tuple[Integers, ...]


def automaton_of(
    graph: Graph,
    footprints: Footprints,
    recomputable: Sequence[bool],
    boundaries: Mapping[str, float] | None = None,
    reach: int = REACH,
) -> RecomputeAutomaton:
    """Makes the automaton of plans without rounds, or of those with a tail in rounds.

    Args:
        graph: the model.
        footprints: the memory of layers.
        recomputable: whether each layer may be recomputed [layers].
        boundaries: the values whose readers can be a tail, and the bytes of their gradients; None:
            there is no tail.
        reach: the number of layers ahead for which it is known how long a segment continues.
    """
    writing = _Writing(graph, footprints, boundaries, reach)
    known: dict[tuple[bytes, ...], Transitions] = {}
    states: list[_State] = [(_BEFORE, (), _NO_SEGMENT)]
    found = []
    ahead = _ahead(graph, footprints, recomputable, reach)
    for layer, recompute, most in zip(graph.layers, recomputable, ahead, strict=True):
        transitions, states = writing.transitions(layer, recompute, most, states)
        found.append(known.setdefault(transitions.key, transitions))
    ends = tuple(
        (boundaries is None or phase == _BEHIND) and left <= 0 for phase, _, left in states
    )
    parts = tuple(takes_part(layer, footprints) for layer in graph.layers)
    return RecomputeAutomaton(tuple(found), ends, parts, tuple(_reaches(parts, reach)))


def _reaches(parts: Sequence[bool], reach: int) -> Iterator[Integers]:
    places = [*np.flatnonzero(parts), *[len(parts)] * (reach + 1)]
    behind = np.cumsum(parts)
    for index in range(len(parts)):
        first = int(behind[index])
        next_ = (min(place + 1, len(parts)) for place in places[first : first + reach])
        yield np.array([index + 1, *next_])


def takes_part(layer: Layer, footprints: Footprints) -> bool:
    """Whether a layer ends the segment before it, unless it is itself in it."""
    return layer.rows > 0 and layer.name in footprints.learns


def _ahead(
    graph: Graph, footprints: Footprints, recomputable: Sequence[bool], reach: int
) -> list[int]:
    """How many layers a segment can continue after each layer, at most `reach` [layers]."""
    found, run = [], 0
    for layer, may in zip(reversed(graph.layers), reversed(recomputable), strict=True):
        found.append(min(run, reach))
        if takes_part(layer, footprints):
            run = run + 1 if may else 0
    return found[::-1]


def boundaries_of(graph: Graph, heads: frozenset[str] | set[str]) -> list[str]:
    """The values among these that are the only live one where they are first read."""
    last = {name: readers[-1] for name, readers in graph.consumers.items() if readers}
    live, found, seen = set(graph.sources) & last.keys(), list[str](), set[str]()
    for layer in graph.layers:
        for name in dict.fromkeys(layer.inputs):
            if name in heads and name not in seen and live == {name}:
                found.append(name)
            seen.add(name)
        live -= {name for name in layer.inputs if last[name] == layer.name}
        if layer.rows and layer.name in last:
            live.add(layer.name)
    return found


class _Writing:
    def __init__(
        self,
        graph: Graph,
        footprints: Footprints,
        boundaries: Mapping[str, float] | None,
        reach: int,
    ) -> None:
        self.graph, self.footprints, self.reach = graph, footprints, reach
        self.whole, self.boundaries = boundaries is None, boundaries or {}
        consumers = graph.consumers
        self.first = {consumers[name][0]: name for name in self.boundaries}
        self.last = {name: readers[-1] for name, readers in consumers.items() if readers}
        self.until = self._until()
        self.gathered = ""

    def _until(self) -> dict[str, str]:
        """The last layer that reads each value, itself or as a view."""
        found: dict[str, str] = {}
        for layer in self.graph.layers:
            found.update({self.footprints.root(name): layer.name for name in layer.inputs})
        return found

    def transitions(
        self, layer: Layer, recomputable: bool, most: int, states: list[_State]
    ) -> tuple[Transitions, list[_State]]:
        numbers: dict[_State, int] = {}
        rows = []
        footprints = self.footprints
        self.takes_part = takes_part(layer, footprints)
        roots = map(footprints.root, footprints.slots(layer))
        self.reads = list(zip(roots, footprints.needs(layer), strict=True))
        self.gives = footprints.gives(layer.name)
        self.lives = layer.name in self.until and footprints.counts(layer.name)
        self.read = bool(self.graph.consumers[layer.name])
        self.over = [name for name in layer.inputs if self.last[name] == layer.name]
        if layer.name in self.first:
            self.gathered = self.first[layer.name]
        for before, (phase, values, left) in enumerate(states):
            for then, entry in self._phases(layer, phase):
                known, going, held, stays = dict(values), left, 0.0, 0.0
                if phase == _BEFORE != then:  # a tail is a segment of its own
                    if left > 0:
                        continue
                    known, going = dict.fromkeys(known, _OUTSIDE), _NO_SEGMENT
                    held = self.boundaries[self.gathered]
                    if known.pop(footprints.root(self.gathered), None) is not None:
                        stays = held
                for recompute, more in self._segments(recomputable, most, going):
                    kept, there, repeats, lives = self._kept(layer, recompute, dict(known))
                    after = numbers.setdefault((then, lives, more), len(numbers))
                    further, tail = more if recompute else 0, then != _BEFORE
                    row = before, after, recompute, kept, there, further
                    rows.append((*row, repeats, tail, held, stays, entry))
        return Transitions.of(len(states), len(numbers), rows), list(numbers)

    def _segments(self, recomputable: bool, most: int, left: int) -> Iterator[tuple[bool, int]]:
        """(whether the layer is recomputed, how long its segment continues after it)."""
        if not self.takes_part:
            yield False, left
            if left == 0:
                yield False, _NO_SEGMENT
            return
        if left <= 0:
            yield False, _NO_SEGMENT
        if recomputable and left == _NO_SEGMENT:
            yield from ((True, more) for more in range(most + 1))
        elif recomputable:
            longer = (left - 1, left) if left == self.reach else (left - 1,)
            yield from ((True, more) for more in longer if 0 <= more <= most)

    def _phases(self, layer: Layer, phase: int) -> Iterator[tuple[int, int]]:
        """(the phase after the layer, the conversions that it may have)."""
        if self.whole:
            yield _BEFORE, ANY
            return
        begins = layer.name in self.first
        ends = self.last.get(self.gathered) == layer.name
        if phase == _BEFORE:
            yield _BEFORE, NONE
        if phase == _BEHIND:
            yield _BEHIND, NONE
        elif phase == _BEGUN or begins:
            yield (_BEHIND, ONE) if ends else (_BEGUN, NONE)

    def _kept(
        self, layer: Layer, recompute: bool, values: dict[str, int]
    ) -> tuple[list[float], list[float], float, tuple[tuple[str, int], ...]]:
        """The values that a layer saves.

        Returns:
            What is saved, what is alive in its segment's backward pass alone, whether conversions
            are repeated, and what is not saved yet.
        """
        name, gives = layer.name, self.gives
        kept, there = [0.0] * (2 + 2 * SLOTS), [0.0] * (2 + 2 * SLOTS)
        own = there if recompute else kept
        own[:2] = 1.0, float(gives)
        roots = map(self.footprints.root, self.over)
        outputs = {name, *self.over} & set(self.graph.outputs)
        repeats = recompute and self.read and bool(self.over) and not outputs
        repeats = repeats and all(values.get(root, _OUTSIDE) != _OUTSIDE for root in roots)
        for place, (value, needed) in enumerate(self.reads, start=2):
            where = values.get(value)
            if where is None:  # as it was given or read elsewhere, but not as it is read here
                kept[place + SLOTS] = float(recompute or needed)
            elif where == _OUTSIDE if recompute else needed:
                kept[place] = 1.0
                del values[value]
            elif recompute and needed and where == _INNER:
                there[place + SLOTS] = 1.0
            elif recompute and needed:
                there[place] = 1.0
                values[value] = _INNER
        if self.takes_part and not recompute:  # a segment ends
            values = dict.fromkeys(values, _OUTSIDE)
        values = {value: where for value, where in values.items() if self.until[value] != name}
        if self.lives and not (gives and not recompute):
            values[name] = (_INNER if gives else _INSIDE) if recompute else _OUTSIDE
        return kept, there, float(repeats), tuple(sorted(values.items()))


def priced_bytes(there: Floats, left: Integers, automaton: RecomputeAutomaton) -> Floats:
    """The bytes of the layers up to each, as they are priced [stages].

    Args:
        there: the bytes of each layer [stages].
        left: the number of further layers of its segment that are considered [stages].
        automaton: the automaton.
    """
    found = np.zeros(len(there) + 1)
    ends = [reach[more] for reach, more in zip(automaton.reaches, left, strict=True)]
    np.add.at(found, np.arange(len(there)), there)
    np.subtract.at(found, ends, there)
    return found[:-1].cumsum()


def segment_bytes(
    there: Floats, recompute: Floats, tails: Floats, automaton: RecomputeAutomaton
) -> Floats:
    """The bytes of the layers up to each, in its segment [stages].

    Args:
        there: the bytes of each layer [stages].
        recompute: whether each layer is recomputed [stages].
        tails: whether each layer is in the tail, which is a segment of its own [stages].
        automaton: the automaton.
    """
    found, total = np.zeros(len(there)), 0.0
    for index, takes_part in enumerate(automaton.parts):
        begins = index > 0 and tails[index] != tails[index - 1]
        if takes_part and (not recompute[index] or begins):
            total = 0.0
        total += there[index]
        found[index] = total if takes_part else there[index]
    return found
