"""Plans with what they take, and the prices at which they are compared."""

from dataclasses import dataclass

from workbench.plan.choice import LayerPlan
from workbench.plan.tail import Rounds
from workbench.predict.search.space.trellis import Floats, Integers


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
