"""A user's own loss, on outputs that lie as a plan has them.

Outputs are brought to the ranks that have their rows, whole. There the loss is a sum over rows, as
it is in one process, whatever rows each rank and micro-batch has.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from workbench.comm.all_reduce import all_reduce
from workbench.comm.groups.group import Group
from workbench.layers.cut_model import CutModel
from workbench.plan.experiment.task import Loss
from workbench.plan.extension.user_object import Own, OwnObjectError
from workbench.plan.graph.graph import Graph
from workbench.train.data.copied import copied
from workbench.train.data.feed import MicroBatch
from workbench.train.loop.objective import own_rows

Look = Callable[[Graph, tuple[Tensor, ...], Any, int], None]
"""(model, its outputs for some rows, their targets, how many rows) -> None; may raise."""


@dataclass(frozen=True)
class Seen:
    """The range in which a loss was tried.

    Attributes:
        outputs: the least and the largest output.
        losses: the least and the largest loss of a row, or of the fewest rows that were tried.
        by_row: whether the loss is a value for each row, and not one number for all.
    """

    outputs: tuple[float, float]
    losses: tuple[float, float]
    by_row: bool = False

    def joined(self, other: "Seen | None") -> "Seen":
        """The range of both."""
        if other is None:
            return self
        outputs, losses = _joined(self.outputs, other.outputs), _joined(self.losses, other.losses)
        return Seen(outputs, losses, self.by_row and other.by_row)

    def __str__(self) -> str:
        return (
            f"outputs from {self.outputs[0]:.3g} to {self.outputs[1]:.3g}, losses from "
            f"{self.losses[0]:.3g} to {self.losses[1]:.3g}"
        )


class OwnLoss:
    """A loss as a sum over rows, by a copy of the user's function.

    Args:
        value: the loss.
        everyone: all ranks, which add up the weights of rows; None: it is only tried here.
        device: the device that computes it.
        dtype: the type of outputs; a module's own tensors get it.
        held: the memory of the model's own tensors, of which there are no copies.

    Attributes:
        name: what it is called in errors.
        is_mean: whether the sum over rows is divided by their number, or their weights.
        fresh: makes another one, which remembers nothing of this one's calls; it takes `held`.
        look: what looks at each call; None: nothing does.
        seen: the range in which it was tried; None: it was not.
        by_row: whether the last call gave a loss for each row, and not one number.

    Raises:
        OwnObjectError: it cannot be loaded, or has parameters of its own to train.
    """

    def __init__(
        self,
        value: Loss,
        everyone: Group | None,
        device: torch.device,
        dtype: torch.dtype,
        held: Container[int] = (),
    ) -> None:
        self.name, self.is_mean, self._everyone = str(value.function), value.is_mean, everyone
        self.fresh = partial(OwnLoss, value, None, device, dtype)
        self._function = self._loaded(value.function, device, dtype, held)
        self._weights = None if value.weights is None else copied(value.weights.loaded, held)
        self.look: Look | None = None
        self.seen: Seen | None = None
        self.by_row = False

    @property
    def functions(self) -> tuple[Any, ...]:
        """The user's own: the loss, and what weighs rows, if anything does."""
        return (self._function,) if self._weights is None else (self._function, self._weights)

    def __call__(
        self, model: CutModel, outputs: tuple[Tensor, ...], targets: Any, total: float
    ) -> tuple[Tensor, float]:
        """As `step_loss`; the total is that of the rows' weights, where they have some."""
        context = model.context
        named = zip(model.plan.graph.outputs, outputs, strict=True)
        mine = tuple(own_rows(model, name, output) for name, output in named)
        rows = context.rows[context.rank]
        nothing = sum((output[:0].sum() for output in mine), outputs[0].new_zeros(()))
        if rows == 0:  # a function of no rows need not be defined; its gradient is zero
            return nothing, 0.0
        if self.look is not None:
            self.look(model.plan.graph, mine, targets, rows)
        found = self.summed(model.plan.graph.arranged(mine), targets, rows)
        found = found / total if self.is_mean else found
        # Of rows that are all left out it may be a constant: other ranks wait for its gradient.
        return found if found.requires_grad else found + nothing, found.item()

    def total(self, batches: Sequence[MicroBatch], rank: int) -> float:
        """The weights of all rows of a step, added up over the ranks; all of them call it."""
        given = [(batch.targets, batch.rows[rank]) for batch in batches]
        mine = sum(self.weight(targets, rows) for targets, rows in given if rows)
        weight = torch.tensor([mine], dtype=torch.float64)
        assert self._everyone is not None
        return all_reduce(weight, self._everyone, layer="weights").item()

    def summed(self, outputs: Any, targets: Any, rows: int) -> Tensor:
        """The sum over these rows [], each times its weight.

        Args:
            outputs: what the model returned for these rows, as it returns it.
            targets: their targets.
            rows: how many there are.

        Raises:
            OwnObjectError: the function gives no number, and not one for each row.
        """
        found = self._function(tree_map(widened, outputs), targets)
        self.by_row = isinstance(found, Tensor) and found.ndim == 1
        if isinstance(found, Tensor) and found.shape == (rows,):
            return (found if self._weights is None else found * self._of_rows(targets, rows)).sum()
        if isinstance(found, Tensor) and found.ndim == 0 and self._weights is None:
            return found * rows if self.is_mean else found
        given = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        one = "one number, or one" if self._weights is None else "with weights one number"
        raise OwnObjectError(
            f"loss {self.name} gives {one} for each row, shape ({rows},) for {rows} rows, "
            f"got {given}"
        )

    def weight(self, targets: Any, rows: int) -> float:
        """What the sum over these rows is divided by, for their loss."""
        if not self.is_mean:
            return 1.0
        return rows if self._weights is None else self._of_rows(targets, rows).sum().item()

    def of_all(self, total: float, weight: float) -> float:
        """The loss of rows whose sums and weights add up to these."""
        return total / weight if self.is_mean else total

    def _loaded(
        self, given: Own, device: torch.device, dtype: torch.dtype, held: Container[int]
    ) -> Any:
        function = copied(given.loaded, held)
        if isinstance(function, type):
            raise OwnObjectError(f"loss {self.name} is a class: give an object of it")
        if not isinstance(function, nn.Module):
            return function
        if any(parameter.requires_grad for parameter in function.parameters()):
            raise OwnObjectError(
                f"loss {self.name} has parameters of its own, which nothing would train: make them "
                "part of the model, or set requires_grad to False"
            )
        return function.to(device, dtype)

    def _of_rows(self, targets: Any, rows: int) -> Tensor:
        """The weight of each row."""
        assert self._weights is not None
        found = self._weights(targets)
        if not isinstance(found, Tensor) or found.shape != (rows,):
            given = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise OwnObjectError(
                f"the weights of loss {self.name} are one number for each row, ({rows},) for "
                f"{rows} rows, got {given}"
            )
        return found


def _joined(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    return min(first[0], second[0]), max(first[1], second[1])


def widened(output: Tensor) -> Tensor:
    """An output as losses get it: half precision as single."""
    return output.float() if output.dtype in (torch.bfloat16, torch.half) else output
