"""The edges of a trellis by the states that they leave, and rules on which of them count."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from workbench.predict.search.limit.loads import Load
from workbench.predict.search.limit.memory_costs import BESIDE, ENTRIES, OTHER, OVER, RESIDENT
from workbench.predict.search.limit.moves import NONE, ONE, Moves
from workbench.predict.search.space.trellis import Floats, Integers, Stage, Trellis

Flags = npt.NDArray[np.bool_]
WHATS = ("choice", "again", "tail")
"""By what plans can be told from each other, at one stage."""


@dataclass(frozen=True)
class Edges:
    """Of one stage: as `Stage`, by the state that they leave.

    Attributes:
        states: number of states before it.
        source: the state that each edge leaves; ascending.
        target: where it leads.
        costs: [edges, costs].
        choice: the index of the layer's choice.
        place: its index among the stage's edges.
    """

    states: int
    source: Integers
    target: Integers
    costs: Floats
    choice: Integers
    place: Integers

    @classmethod
    def of(cls, stage: Stage) -> "Edges":
        """All of a stage."""
        place = np.arange(len(stage.source))
        return cls(stage.states, stage.source, stage.target, stage.costs, stage.choice, place)

    def only(self, mine: Flags) -> "Edges":
        """Some of them."""
        return Edges(
            states=self.states,
            source=self.source[mine],
            target=self.target[mine],
            costs=self.costs[mine],
            choice=self.choice[mine],
            place=self.place[mine],
        )

    @cached_property
    def first(self) -> Integers:
        """Of each state, its first edge; then the number of edges."""
        found: Integers = np.searchsorted(self.source, np.arange(self.states + 1))
        return found

    @cached_property
    def present(self) -> Integers:
        """The states that edges leave."""
        return np.flatnonzero(np.diff(self.first))

    @cached_property
    def starts(self) -> Integers:
        """The first edge of each of these."""
        return self.first[self.present]

    def refused(self, entry: Integers, parts: int) -> Flags:
        """[edges, transitions]: which do not go together."""
        entries, over = self.costs[:, ENTRIES, None], self.costs[:, OVER, None]
        one = (entries == 1) & (over == parts)
        refused: Flags = ((entry == NONE) & (entries > 0)) | ((entry == ONE) & ~one)
        return refused


def edges_of(trellis: Trellis) -> list[Edges]:
    """The edges of all stages; stages that are one have one."""
    known = {id(stage): Edges.of(stage) for stage in trellis.stages}
    return [known[id(stage)] for stage in trellis.stages]


def spreads_of(every: Sequence[Edges], moves: Sequence[Moves]) -> dict[str, Floats]:
    """For each of `WHATS`, bytes that it decides on at each stage; 0: nothing."""
    held = np.array([np.ptp(edges.costs[:, RESIDENT]) for edges in every])
    kept = np.array([edges.costs[:, BESIDE : OTHER + 1].sum(axis=1).max() for edges in every])
    several = np.array([np.ptp(edges.choice) > 0 for edges in every])
    able = np.array([np.ptp(some.again) > 0 for some in moves])
    tails = np.array([np.ptp(some.tail) > 0 for some in moves])
    total = held.sum() + kept.sum()
    return {
        "choice": (held + kept + 1) * several,
        "again": (kept + 1) * able,
        "tail": (total + 1) * tails,
    }


@dataclass(frozen=True)
class Rule:
    """What plans must have in common at one stage, or must not have.

    Attributes:
        stage: of the trellis.
        what: "choice": the index of its choice; "again", "tail": as in `Moves`.
        value: that it has.
        kept: whether it must have it, or must not.
    """

    stage: int
    what: str
    value: int
    kept: bool

    def allowed(self, edges: Edges, moves: Moves) -> Flags:
        """[edges, transitions]: which keep the rule."""
        if self.what == "choice":
            have = (edges.choice == self.value)[:, None]
        else:
            have = (getattr(moves, self.what) == self.value)[None, :]
        found: Flags = np.broadcast_to(have == self.kept, (len(edges.choice), len(moves.before)))
        return found

    def holds(self, load: Load) -> bool:
        """Whether a plan keeps it."""
        return (getattr(load, f"{self.what}s")[self.stage] == self.value) == self.kept
