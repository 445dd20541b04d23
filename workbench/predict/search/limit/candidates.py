"""Candidate plans, the prices at which they are compared, and the rules of branching."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from workbench.plan.choice import LayerPlan
from workbench.plan.tail import Rounds
from workbench.predict.search.limit.memory_costs import BESIDE, ENTRIES, OTHER, OVER, RESIDENT
from workbench.predict.search.limit.recompute import NONE, ONE, Moves
from workbench.predict.search.space.trellis import Floats, Integers, Stage, Trellis


@dataclass(frozen=True)
class Prices:
    """What time and memory cost.

    Attributes:
        mix: share of the second bound of time.
        moments: seconds for each byte that is there in the backward pass of each layer.
        time: of a second: 1, or 0 where memory alone counts.
    """

    mix: float
    moments: Floats
    time: float = 1.0

    def towards(self, other: "Prices", share: float) -> "Prices":
        """The mean of these and others of the same kind, which have this share."""
        mix = (1 - share) * self.mix + share * other.mix
        return Prices(mix, (1 - share) * self.moments + share * other.moments, self.time)

    @property
    def total(self) -> float:
        """Of a byte that stays."""
        return float(self.moments.sum())


@dataclass(frozen=True)
class Load:
    """A plan, and what it takes at least.

    Attributes:
        path: its edges in the trellis.
        plan: the choice of each layer that can be split.
        again: the layers to compute again.
        choices: of each stage, the index of its choice.
        agains: of each stage, whether its layer is computed again.
        tails: of each stage, whether it is in the tail.
        rounds: of its tail.
        whole: f + b + s g + u, in seconds; see `bounds.py`.
        beside: f + g + u, and b but for the last of the tail's rounds.
        levels: bytes in the backward pass of each layer, as they are priced.
        peak: bytes, at least.
    """

    path: tuple[int, ...]
    plan: dict[str, LayerPlan]
    again: tuple[str, ...]
    choices: Integers
    agains: Integers
    tails: Integers
    rounds: Rounds
    whole: float
    beside: float
    levels: Floats
    peak: float

    @property
    def seconds(self) -> float:
        """Of a step, at least."""
        return max(self.whole, self.beside)


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
