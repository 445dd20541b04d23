"""What a strategy carries from step to step, as a checkpoint keeps it.

    in_flight/<a>/gradient/<parameter>    S[T - a], the sum of the gradients of that step
    in_flight/<a>/weight/<parameter>      w[T - a], that they were computed at, where it is needed
    residual/<use>/<replica>/<parameter>  what encodings have left out so far

Gradients that are computed and not yet used are kept for each age a = 1, 2, ... that is in flight
after step T: logical tensors, cut as the parameters are; sums over all rows, they mean the same
under any plan, and on any number of ranks.

With error feedback a rank holds a residual of every gradient that it sends, one for each set of
ranks that together hold the whole model: under the plan that it was saved under, each rank goes on
with its own. Under another one, of a checkpoint or of a re-cut, residuals are added up or begin at
zero, so that what is held back in total is the same. Where several sums of gradients take turns,
`use` counts them in the order of their next turns.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from workbench.layers.cut_model import CutModel
from workbench.plan.placement.placement import Shard

IN_FLIGHT = "in_flight/"
_GRADIENT = re.compile(IN_FLIGHT + r"(\d+)/gradient/")


@dataclass(frozen=True)
class InFlight:
    """What one step left to be used later, on one rank.

    Attributes:
        step: the step that computed it.
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


RESIDUAL = "residual/"
_ENTRY = re.compile(RESIDUAL + r"(\d+)/(\d+)/(.+)")

Residuals = Sequence[Mapping[str, Tensor]]
"""For each sum of gradients, this rank's pieces by parameter, where they lie."""


def named(model: CutModel, residuals: Residuals) -> dict[str, Tensor]:
    """This rank's pieces by the names of their logical tensors."""
    return {
        residual_entry(use, _replica(model, name), name): piece
        for use, pieces in enumerate(residuals)
        for name, piece in pieces.items()
    }


class Stored(Protocol):
    """Tensors in pieces, of a checkpoint or of a run that goes on under another plan."""

    @property
    def names(self) -> tuple[str, ...]:
        """The logical tensors that there are."""
        ...

    def read(self, name: str, shard: Shard | None = None, rank: int = 0) -> Tensor:
        """One rank's piece of a tensor that is cut like this; None: the whole."""
        ...


@torch.no_grad()
def restore_residuals(reader: Stored, model: CutModel, residuals: Residuals) -> None:
    """Adds what a checkpoint or a re-cut brings to this rank's residuals, if it keeps some."""
    for stored in reader.names:
        match = _ENTRY.fullmatch(stored)
        if match is None or not residuals:
            continue
        use, replica, name = int(match[1]), int(match[2]), match[3]
        placed = model.placements[name]
        replicas = model.plan.world_size // placed.group_size
        mine = residuals[use % len(residuals)].get(name)
        if mine is not None and replica % replicas == _replica(model, name):
            shard = placed.placement if isinstance(placed.placement, Shard) else None
            index = model.context.rank % placed.group_size
            mine.add_(reader.read(stored, shard, index).view_as(mine).to(mine.device))


def residual_entry(use: int, replica: int, name: str) -> str:
    """The name of the logical tensor of one sum, one set of ranks and one parameter."""
    return f"{RESIDUAL}{use}/{replica}/{name}"


def _replica(model: CutModel, name: str) -> int:
    """Which of the sets of ranks that hold a whole parameter this rank is in."""
    return model.context.rank // model.placements[name].group_size
