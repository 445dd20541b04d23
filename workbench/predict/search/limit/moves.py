"""The transitions of the automaton of `keeping.py`, as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from workbench.predict.search.space.trellis import Floats, Integers

ANY, NONE, ONE = range(3)
"""Conversions from own rows into groups: any, none, one of the tail's."""


@dataclass(frozen=True)
class Moves:
    """The automaton's transitions at one layer, ordered by the state before.

    Attributes:
        states: number of states before.
        after_states: number of states behind.
        before: of each transition.
        after: of each transition.
        again: 1 where the layer is computed again, else 0.
        kept: [transitions, 2 + 2 SLOTS]: of beside, output, inputs and inputs converted, the part
            that is kept.
        there: the part that is there in its segment's backward pass alone.
        left: so many further layers of its segment, at least.
        repeats: 1 where conversions are computed again with the layer, else 0.
        tail: 1 where the layer is in a tail that runs in rounds, else 0.
        held: bytes that are there from this layer on: where a tail begins, the gradient of what it
            reads.
        stays: bytes that are there all the time: of what it reads, where nobody else keeps that.
        entry: `ANY`, `NONE` or `ONE`.
    """

    states: int
    after_states: int
    before: Integers
    after: Integers
    again: Floats
    kept: Floats
    there: Floats
    left: Integers
    repeats: Floats
    tail: Floats
    held: Floats
    stays: Floats
    entry: Integers

    @cached_property
    def starts(self) -> Integers:
        """Of each state, its first transition."""
        found: Integers = np.searchsorted(self.before, np.arange(self.states))
        return found

    @cached_property
    def ends(self) -> Integers:
        """Of each state, the one behind its last transition."""
        return np.append(self.starts[1:], len(self.before))

    @property
    def key(self) -> tuple[bytes, ...]:
        """Equal for equal transitions."""
        columns = (getattr(self, name) for name in _COLUMNS)
        sizes = repr((self.states, self.after_states)).encode()
        return (sizes, *(column.tobytes() for column in columns))

    @classmethod
    def joined(cls, every: "Sequence[tuple[Moves, int]]") -> "Moves":
        """One transition of each."""
        columns = (
            np.array([getattr(moves, name)[place] for moves, place in every]) for name in _COLUMNS
        )
        return cls(1, 1, *columns)


_COLUMNS = tuple(field.name for field in fields(Moves))[2:]


def moves_of(
    states: int, after_states: int, whole: Sequence[Integers], others: Sequence[Floats]
) -> Moves:
    """Transitions of their columns.

    Args:
        states: number of states before.
        after_states: number of states behind.
        whole: before, after, entry, left.
        others: again, kept, there, repeats, tail, held, stays.
    """
    before, after, entry, left = whole
    again, kept, there, repeats, tail, held, stays = others
    return Moves(
        states,
        after_states,
        before=before,
        after=after,
        again=again,
        kept=kept,
        there=there,
        left=left,
        repeats=repeats,
        tail=tail,
        held=held,
        stays=stays,
        entry=entry,
    )
