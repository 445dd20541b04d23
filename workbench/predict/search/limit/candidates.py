"""Candidate plans, the prices at which they are compared, and the rules of branching."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workbench.plan.choice import LayerPlan
from workbench.plan.tail import Rounds
from workbench.predict.search.limit.memory_costs import BESIDE, OTHER, RESIDENT
from workbench.predict.search.limit.recompute import Transitions
from workbench.predict.search.space.trellis import Floats, Integers, Stage


@dataclass(frozen=True)
class Prices:
    """What time and memory cost.

    Attributes:
        mix: share of the second bound of time.
        moments: seconds for each byte that is there in the backward pass of each layer.
        time: price of a second: 1, or 0 where memory alone counts.
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
class Candidate:
    """A plan, and what it takes at least.

    Attributes:
        path: its edges in the trellis.
        plan: the choice of each layer that can be split.
        recomputed: names of the layers to compute again.
        choices: index of each stage's choice [stages].
        recomputes: whether each stage's layer is recomputed [stages].
        tails: whether each stage is in the tail [stages].
        rounds: the rounds of its tail.
        serial_s: f + b + s g + u, in seconds; see `relaxation.py`.
        overlapped_s: f + g + u, and b but for the last of the tail's rounds.
        levels: bytes in the backward pass of each layer, as they are priced.
        peak: bytes, at least.
    """

    path: tuple[int, ...]
    plan: dict[str, LayerPlan]
    recomputed: tuple[str, ...]
    choices: Integers
    recomputes: Integers
    tails: Integers
    rounds: Rounds
    serial_s: float
    overlapped_s: float
    levels: Floats
    peak: float

    @property
    def seconds(self) -> float:
        """Of a step, at least."""
        return max(self.serial_s, self.overlapped_s)


Flags = npt.NDArray[np.bool_]
DECISIONS = ("choice", "recompute", "tail")
"""By what plans can be told from each other, at one stage."""


def spreads_of(every: Sequence[Stage], transitions: Sequence[Transitions]) -> dict[str, Floats]:
    """For each of `DECISIONS`, bytes that it decides on at each stage; 0: nothing."""
    held = np.array([np.ptp(edges.costs[:, RESIDENT]) for edges in every])
    kept = np.array([edges.costs[:, BESIDE : OTHER + 1].sum(axis=1).max() for edges in every])
    several = np.array([np.ptp(edges.choice) > 0 for edges in every])
    able = np.array([np.ptp(some.recompute) > 0 for some in transitions])
    tails = np.array([np.ptp(some.tail) > 0 for some in transitions])
    total = held.sum() + kept.sum()
    return {
        "choice": (held + kept + 1) * several,
        "recompute": (kept + 1) * able,
        "tail": (total + 1) * tails,
    }


@dataclass(frozen=True)
class Rule:
    """What plans must have in common at one stage, or must not have.

    Attributes:
        stage: index of a stage of the trellis.
        what: "choice": the index of its choice; "recompute", "tail": as in `Transitions`.
        value: the value that is asked for.
        kept: whether it must have it, or must not.
    """

    stage: int
    what: str
    value: int
    kept: bool

    def allowed(self, edges: Stage, transitions: Transitions) -> Flags:
        """[edges, transitions]: which keep the rule."""
        if self.what == "choice":
            have = (edges.choice == self.value)[:, None]
        else:
            have = (getattr(transitions, self.what) == self.value)[None, :]
        found: Flags = np.broadcast_to(
            have == self.kept, (len(edges.choice), len(transitions.before))
        )
        return found

    def holds(self, candidate: Candidate) -> bool:
        """Whether a plan keeps it."""
        return (getattr(candidate, f"{self.what}s")[self.stage] == self.value) == self.kept
