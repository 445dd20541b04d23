"""A user's own loss, on outputs that lie as a plan has them.

Outputs are brought to the ranks that have their rows, whole. There the loss is a sum over rows, as
it is in one process, whatever rows each rank and micro-batch has.
"""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from workbench.layers.cut_model import CutModel
from workbench.plan.experiment.task import Loss
from workbench.train.data import own
from workbench.train.data.errors import OwnObjectError
from workbench.train.loop.objective import own_rows
from workbench.train.loop.trial import Trial

# The relative difference that tells rounding from rows that are mixed.
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}


class OwnLoss:
    """A loss as a sum over rows.

    Args:
        value: the loss.
        device: where it is computed.
        dtype: the type of outputs; a module's own tensors get it.

    Raises:
        OwnObjectError: it cannot be loaded, or has parameters of its own to train.
    """

    def __init__(self, value: Loss, device: torch.device, dtype: torch.dtype) -> None:
        self.name, self._mean = str(value.function), value.reduction == "mean"
        function = own.load(value.function)
        if isinstance(function, nn.Module):
            if any(parameter.requires_grad for parameter in function.parameters()):
                raise OwnObjectError(
                    f"loss {self.name} has parameters of its own, which nothing would train: make "
                    "them part of the model, or set requires_grad to False"
                )
            function = deepcopy(function).to(device, dtype)
        elif isinstance(function, type):
            raise OwnObjectError(f"loss {self.name} is a class: give an object of it")
        self._function = function

    def __call__(
        self, model: CutModel, outputs: tuple[Tensor, ...], targets: Any, batch_size: int
    ) -> tuple[Tensor, float]:
        """As `step_loss`."""
        context = model.context
        named = zip(model.plan.graph.outputs, outputs, strict=True)
        mine = tuple(own_rows(model, name, output) for name, output in named)
        rows = context.rows[context.rank]
        if rows == 0:  # a function of no rows need not be defined; its gradient is zero
            return sum((0.0 * output.sum() for output in mine), outputs[0].new_zeros(())), 0.0
        total = self.summed(mine, targets, rows)
        total = total / batch_size if self._mean else total
        return total, total.item()

    def summed(self, outputs: tuple[Tensor, ...], targets: Any, rows: int) -> Tensor:
        """The sum over these rows [].

        Raises:
            OwnObjectError: the function gives no number, and not one for each row.
        """
        value = self._value(outputs, targets, rows)
        return value * rows if self._mean else value

    def of_all(self, total: float, samples: int) -> float:
        """The loss of a whole split, of the sum over its rows."""
        return total / samples if self._mean else total

    def check(self, tried: Trial) -> None:
        """Tries whether the loss of some rows depends on others, by parts of them.

        Raises:
            OwnObjectError: it does, or the function raised.
        """
        try:
            with torch.no_grad():
                whole = self._value(tried.outputs, tried.targets, tried.rows)
                parts = [
                    [(self._value(p.outputs, p.targets, p.rows), p.rows) for p in tried.cut(at)]
                    for at in (tried.rows // 2, tried.rows // 3)
                ]
        except OwnObjectError:
            raise
        except Exception as error:  # whatever its own code raises
            raise OwnObjectError(
                f"loss {self.name} fails for {tried}: {type(error).__name__}: {error}"
            ) from error
        means = [sum(value * rows for value, rows in each) / tried.rows for each in parts]
        sums = [sum(value for value, _ in each) for each in parts]
        own, other = (means, sums) if self._mean else (sums, means)
        if all(_close(whole, each) for each in own):
            return
        name = "sum" if self._mean else "mean"
        hint = (
            f"it is their {name}: say Loss(..., reduction={name!r})"
            if all(_close(whole, each) for each in other)
            else "what weighs rows by their class, or leaves some out, can give a value for each "
            "row, and reduction='sum'"
        )
        raise OwnObjectError(
            f"loss {self.name} of {tried.rows} rows is {whole:.6g}, and {own[0]:.6g} by halves: "
            f"the loss of a row must not depend on others, which other ranks have; {hint}"
        )

    def _value(self, outputs: tuple[Tensor, ...], targets: Any, rows: int) -> Tensor:
        """What the function gives, or its mean or sum over rows [], as is stated."""
        wide = tuple(x.float() if x.dtype in (torch.bfloat16, torch.half) else x for x in outputs)
        found = self._function(wide[0] if len(wide) == 1 else wide, targets)
        if isinstance(found, Tensor) and found.shape == (rows,):
            return found.mean() if self._mean else found.sum()
        if isinstance(found, Tensor) and found.ndim == 0:
            return found
        given = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise OwnObjectError(
            f"loss {self.name} gives one number, or one for each row: shape () or ({rows},) for "
            f"{rows} rows, got {given}"
        )


def _close(one: Tensor, other: Tensor | float) -> bool:
    allowed = CLOSE[one.dtype if one.dtype in CLOSE else torch.float32]
    return bool((one - other).abs() <= allowed * one.abs().clamp(min=1e-6))
