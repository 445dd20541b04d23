"""Candidate plans, the prices at which they are compared, and the rules of branching."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workbench.plan.placement.layer_plan import LayerPlan
from workbench.plan.placement.rounds import Rounds
from workbench.predict.search.limit.memory_costs import BESIDE, OTHER, RESIDENT
from workbench.predict.search.limit.recompute import Transitions
from workbench.predict.search.space.trellis import Floats, Integers, Stage


@dataclass(frozen=True)
class Prices:
    """The prices of time and memory.

    Attributes:
        mix: the share of the second bound of time.
        moments: the seconds for each byte that is alive in the backward pass of each layer
            [layers].
        time: the price of a second: 1, or 0 where memory alone counts.
    """

    mix: float
    moments: Floats
    time: float = 1.0

    def towards(self, other: "Prices", share: float) -> "Prices":
        """The mean of these and other prices, in which the others have this share."""
        mix = (1 - share) * self.mix + share * other.mix
        return Prices(mix, (1 - share) * self.moments + share * other.moments, self.time)

    @property
    def total(self) -> float:
        """The price of a byte that stays from step to step."""
        return float(self.moments.sum())


@dataclass(frozen=True)
class Candidate:
    """A plan, with lower bounds of its time and memory.

    Attributes:
        path: the edges of the plan in the trellis.
        plan: the choice of each layer that can be split.
        recomputed: the names of the layers that are recomputed.
        choices: the index of each stage's choice [stages].
        recomputes: whether each stage's layer is recomputed [stages].
        tails: whether each stage is in the tail [stages].
        rounds: the rounds of its tail.
        serial_s: the first bound, f + b + s g + u, in seconds; see `relaxation.py`.
        overlapped_s: the second bound, f + g + u, and b except for the last of the tail's rounds,
            in seconds.
        levels: the bytes in the backward pass of each layer, as they are priced [layers].
        peak: a lower bound of its peak memory, in bytes.
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
        """A lower bound of its step time, in seconds."""
        return max(self.serial_s, self.overlapped_s)


Flags = npt.NDArray[np.bool_]
DECISIONS = ("choice", "recompute", "tail")
"""The properties in which plans can differ at one stage."""


def spreads_of(every: Sequence[Stage], transitions: Sequence[Transitions]) -> dict[str, Floats]:
    """The bytes that each of `DECISIONS` decides on at each stage; 0: none [stages]."""
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
    """A condition on plans at one stage.

    Attributes:
        stage: the index of a stage of the trellis.
        what: the property: "choice": the index of its choice; "recompute", "tail": as in
            `Transitions`.
        value: the value that is compared with.
        kept: whether the property must have the value, or must not.
    """

    stage: int
    what: str
    value: int
    kept: bool

    def allowed(self, edges: Stage, transitions: Transitions) -> Flags:
        """Which edges and transitions keep the rule [edges, transitions]."""
        if self.what == "choice":
            have = (edges.choice == self.value)[:, None]
        else:
            have = (getattr(transitions, self.what) == self.value)[None, :]
        found: Flags = np.broadcast_to(
            have == self.kept, (len(edges.choice), len(transitions.before))
        )
        return found

    def holds(self, candidate: Candidate) -> bool:
        """Whether a plan keeps the rule."""
        return (getattr(candidate, f"{self.what}s")[self.stage] == self.value) == self.kept
