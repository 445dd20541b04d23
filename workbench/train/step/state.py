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

What a rank does to make updates of gradients, whatever the strategy: what all have in common.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from workbench.layers.cut_model import CutModel
from workbench.plan.placement.placement import Shard
from workbench.program.buckets import Bucket
from workbench.program.instructions import Instruction
from workbench.program.step import RankProgram
from workbench.train.data.feed import MicroBatch
from workbench.train.step.gradients import LossScaling

IN_FLIGHT = "in_flight/"
_GRADIENT = re.compile(IN_FLIGHT + r"(\d+)/gradient/")


@dataclass(frozen=True)
class InFlight:
    """What one step left to be used later, on one rank.

    Attributes:
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
    def names(self) -> tuple[str, ...]: ...

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
    return f"{RESIDUAL}{use}/{replica}/{name}"


def _replica(model: CutModel, name: str) -> int:
    """Which of the sets of ranks that hold a whole parameter this rank is in."""
    return model.context.rank // model.placements[name].group_size


@dataclass
class StepState:
    """One step under way on one rank.

    Attributes:
        weight: the weights of all rows in the loss; None: it is their number.
        loss: this rank's part of the mean loss, of the micro-batches that are done.
        outputs: the outputs of the last of these, as the plan's flow lays them.
        reported: the part of the loss of the micro-batch under way.
        objective: what the next backward pass begins with.
        boundary: what the head returned, where there are rounds.
        gradient: the gradient of the boundary, as far as rounds have left it.
        parts: for each round, this rank's rows of the boundary.
        rounds: the outputs of each round that is done.
        updates: whether its gradients move weights: all of them are numbers.
    """

    step: int
    rows: tuple[int, ...]
    samples: int
    batches: tuple[MicroBatch, ...] = ()
    weight: float | None = None
    loss: float = 0.0
    outputs: tuple[Tensor, ...] = ()
    reported: float = 0.0
    objective: Tensor | None = None
    returned: tuple[Tensor, ...] = ()
    boundary: Tensor | None = None
    gradient: Tensor | None = None
    parts: list[Tensor] = field(default_factory=list)
    rounds: list[tuple[Tensor, ...]] = field(default_factory=list)
    updates: bool = True

    @property
    def total(self) -> float:
        """What a mean over all rows is divided by."""
        return self.samples if self.weight is None else self.weight

    def take(self) -> tuple[Tensor, ...]:
        """What the last forward pass returned, apart from its graph; nothing of that is kept."""
        found = tuple(output.detach() for output in self.returned)
        self.returned, self.objective = (), None
        return found


StepFunction = Callable[[StepState], None]


class OutOfOrder(RuntimeError):
    """What a rank did is not what its program lists."""


class Strategy:
    """What a rank does at those instructions of its program that turn gradients into updates.

    The defaults: between steps nothing travels or waits to be used, replicas are always equal, and
    no codec leaves anything out.

    Args:
        program: what the rank executes in a step, if all of its rows are there.
    """

    def __init__(self, program: RankProgram) -> None:
        self.program = program

    def at(self, step: int) -> "Strategy":
        """The strategy from this step on; every rank asks before each step."""
        return self

    def bound(self, instruction: Instruction) -> StepFunction:
        """What is done at an instruction of the program.

        Raises:
            OutOfOrder: its steps have no such instruction.
        """
        raise OutOfOrder(f"{type(self).__name__} does nothing at {instruction.word!r}")

    def reducing(self, buckets: Sequence[Bucket]) -> StepFunction:
        """What begins to sum these buckets, at their own place in the list."""
        raise NotImplementedError

    def expecting(self, names: Collection[str], buckets: Sequence[Bucket]) -> StepFunction | None:
        """What is to be done before a backward pass in which sums may begin.

        Args:
            names: the parameters that get no more gradients after it, before they are summed.
            buckets: the buckets that may begin to be summed, in their order.
        """
        return None

    def settle(self) -> None:
        """Makes weights and optimizer state equal on all ranks that hold the same piece."""

    @property
    def is_settled(self) -> bool:
        """Whether all ranks that hold the same piece of a weight are to have the same now."""
        return True

    def rest(self) -> None:
        """Waits until nothing travels any more, whatever comes of it; moves no weights."""

    @property
    def in_flight(self) -> list[InFlight]:
        """What has been computed and will be used in later steps; sums once it has settled."""
        return []

    @property
    def residuals(self) -> Residuals:
        """What its codec has left out so far, of as many sums on all ranks; to be added to."""
        return []

    @property
    def buffers(self) -> list[Tensor]:
        """What it keeps from step to step, for the account of memory."""
        return []

    @property
    def scaling(self) -> LossScaling | None:
        """The loss scale, or None for no scaling."""
        return None
