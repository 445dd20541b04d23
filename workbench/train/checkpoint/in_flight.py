"""Gradients that are computed and not yet used, as a checkpoint keeps them.

A checkpoint after step T holds, for each age a = 1, 2, ... that is in flight,

    in_flight/<a>/gradient/<parameter>    S[T - a], the sum of the gradients of that step
    in_flight/<a>/weight/<parameter>      w[T - a], that they were computed at, where it is needed

as logical tensors, cut as the parameters are: sums over all rows, they mean the same under any
plan, and on any number of ranks.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

IN_FLIGHT = "in_flight/"
_GRADIENT = re.compile(IN_FLIGHT + r"(\d+)/gradient/")


@dataclass(frozen=True)
class InFlight:
    """What one step left to be used later, on one rank.

    Attributes:
        step: that computed it.
        gradients: this rank's pieces of the sums, by parameter.
        weights: its pieces of the weights then; none where nobody asks for them.
    """

    step: int
    gradients: Mapping[str, Tensor]
    weights: Mapping[str, Tensor] = field(default_factory=dict)

    def beside(self, parameters: Mapping[str, Tensor]) -> "InFlight":
        """The same, each piece of its parameter's type and on its device; files lie on the host."""
        return InFlight(
            self.step,
            {name: piece.to(parameters[name]) for name, piece in self.gradients.items()},
            {name: piece.to(parameters[name]) for name, piece in self.weights.items()},
        )

    def by_age(self, done: int) -> dict[str, Mapping[str, Tensor]]:
        """What of it there is, by its kind's name in a checkpoint after `done` steps."""
        age = done - self.step
        found = {kind(age, "gradient"): self.gradients}
        return found | ({kind(age, "weight"): self.weights} if self.weights else {})


def kind(age: int, what: Literal["gradient", "weight"]) -> str:
    """What the name of a logical tensor begins with that was computed `age` steps ago."""
    return f"{IN_FLIGHT}{age}/{what}/"


def ages(names: Iterable[str]) -> list[int]:
    """Of the gradients in flight among the logical tensors of a checkpoint, the oldest first."""
    found = (_GRADIENT.match(name) for name in names)
    return sorted({int(match[1]) for match in found if match}, reverse=True)
