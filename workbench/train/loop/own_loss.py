"""A user's own loss, on outputs that lie as a plan has them.

Outputs are brought to the ranks that have their rows, whole. There the loss is a sum over rows, as
it is in one process, whatever rows each rank and micro-batch has.
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from workbench.comm.all_reduce import all_reduce
from workbench.comm.groups.group import Group
from workbench.layers.cut_model import CutModel
from workbench.plan.experiment.task import Loss
from workbench.plan.extension.own import Own, OwnObjectError
from workbench.train.data.feed import MicroBatch
from workbench.train.loop.objective import own_rows
from workbench.train.loop.trial import Trial

# The relative difference that tells rounding from rows that are mixed.
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}


class OwnLoss:
    """A loss as a sum over rows.

    Args:
        value: the loss.
        everyone: all ranks, which add up the weights of rows.
        device: the device that computes it.
        dtype: the type of outputs; a module's own tensors get it.

    Raises:
        OwnObjectError: it cannot be loaded, or has parameters of its own to train.
    """

    def __init__(
        self, value: Loss, everyone: Group, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.name, self._mean, self._everyone = str(value.function), value.is_mean, everyone
        self._function = self._loaded(value.function, device, dtype)
        self._weights = None if value.weights is None else value.weights.loaded

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
        found = self.summed(mine, targets, rows)
        found = found / total if self._mean else found
        # Of rows that are all left out it may be a constant: other ranks wait for its gradient.
        return found if found.requires_grad else found + nothing, found.item()

    def total(self, batches: Sequence[MicroBatch], rank: int) -> float:
        """The weights of all rows of a step, added up over the ranks; all of them call it."""
        given = [(batch.targets, batch.rows[rank]) for batch in batches]
        mine = sum(self.weight(targets, rows) for targets, rows in given if rows)
        weight = torch.tensor([mine], dtype=torch.float64)
        return all_reduce(weight, self._everyone, layer="weights").item()

    def summed(self, outputs: tuple[Tensor, ...], targets: Any, rows: int) -> Tensor:
        """The sum over these rows [], each times its weight.

        Raises:
            OwnObjectError: the function gives no number, and not one for each row.
        """
        wide = tuple(x.float() if x.dtype in (torch.bfloat16, torch.half) else x for x in outputs)
        found = self._function(wide[0] if len(wide) == 1 else wide, targets)
        if isinstance(found, Tensor) and found.shape == (rows,):
            return (found if self._weights is None else found * self._of_rows(targets, rows)).sum()
        if isinstance(found, Tensor) and found.ndim == 0 and self._weights is None:
            return found * rows if self._mean else found
        given = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        one = "one number, or one" if self._weights is None else "with weights one number"
        raise OwnObjectError(
            f"loss {self.name} gives {one} for each row, shape ({rows},) for {rows} rows, "
            f"got {given}"
        )

    def weight(self, targets: Any, rows: int) -> float:
        """What the sum over these rows is divided by, for their loss."""
        if not self._mean:
            return 1.0
        return rows if self._weights is None else self._of_rows(targets, rows).sum().item()

    def of_all(self, total: float, weight: float) -> float:
        """The loss of rows whose sums and weights add up to these."""
        return total / weight if self._mean else total

    def check(self, tried: Trial) -> None:
        """Tries by parts of rows whether the loss of a row, or its gradient, depends on others.

        Raises:
            OwnObjectError: it does, or has no gradient, or the function raised.
        """
        halves = [at for at in (tried.rows // 2, tried.rows // 3) if at]
        # Among many rows, weights of their own are hardly told from equal ones.
        pairs = tried.pairs() if tried.rows > 2 else ()
        try:
            with torch.enable_grad():
                every = [self._parted(tried, at) for at in halves or [0]]
                every += [self._parted(pair, 1) for pair in pairs]
        except OwnObjectError:
            raise
        except Exception as error:  # whatever its own code raises
            raise OwnObjectError(
                f"loss {self.name} fails for {tried}: {type(error).__name__}: {error}"
            ) from error
        whole = every[0].whole
        if not whole.depends:
            raise OwnObjectError(
                f"loss {self.name} has no gradient for {tried}: argmax, a comparison, detach() or "
                ".item() is on its way from the outputs; take one that has, say cross-entropy of "
                "the scores, and give this one as metrics="
            )
        if not math.isfinite(whole.value):
            raise OwnObjectError(
                f"loss {self.name} is {whole.value} for {tried}; outputs were between 0 and 1"
            )
        # Values say more than gradients.
        unlike = [one for one in every if not one.adds_up]
        unlike += [one for one in every if not one.is_sum]
        if unlike:
            raise OwnObjectError(self._mixed(unlike[0], every, _broadcast(tried)))

    def _mixed(self, first: "_Parted", every: Sequence["_Parted"], broadcast: str) -> str:
        """Says that some parts do not make up a whole, and what may be meant."""
        name = "sum" if self._mean else "mean"
        hint = broadcast or (
            f"it is their {name}: say Loss(..., reduction={name!r})"
            if all(one.otherwise(mean=self._mean).is_sum for one in every)
            else "loss=CrossEntropy(ignore_index=..., weight=...) counts labels of the whole batch"
            if isinstance(self._function, nn.CrossEntropyLoss)
            else "if it weighs rows by their targets, or leaves some out, let it give a value for "
            "each row, and Loss(..., weights=function of the targets)"
        )
        values = first.whole.value, sum(part.value for part in first.parts)
        shown = [self.of_all(value, first.weight) for value in values]
        rows = f"of {first.whole.rows} rows"
        found = (
            f"loss {self.name} {rows} has another gradient than by halves"
            if first.adds_up
            else f"loss {self.name} {rows} is {shown[0]:.6g}, and {shown[1]:.6g} by halves"
        )
        return (
            f"{found}: the loss of a row must not depend on others, which other ranks have; {hint}"
        )

    def _parted(self, tried: Trial, at: int) -> "_Parted":
        """The sum over rows, and over those up to this one and after it."""
        whole, weight = self._of(tried), self.weight(tried.targets, tried.rows)
        close = CLOSE.get(tried.outputs[0].dtype, CLOSE[torch.float32])
        return _Parted(whole, [self._of(part) for part in tried.cut(at)], weight, close)

    def _of(self, tried: Trial) -> "_Sum":
        leaves = tuple(output.detach().requires_grad_() for output in tried.outputs)
        # As in a step, what the function gets is no leaf, into which it could not write.
        found = self.summed(tuple(leaf.clone() for leaf in leaves), tried.targets, tried.rows)
        each: tuple[Tensor | None, ...] = (None,) * len(leaves)
        if found.requires_grad:
            each = torch.autograd.grad(found, leaves, allow_unused=True)
        both = zip(each, leaves, strict=True)
        gradients = tuple(torch.zeros_like(leaf) if one is None else one for one, leaf in both)
        return _Sum(tried.rows, found.item(), gradients, any(one is not None for one in each))

    def _loaded(self, given: Own, device: torch.device, dtype: torch.dtype) -> Any:
        function = given.loaded
        if isinstance(function, type):
            raise OwnObjectError(f"loss {self.name} is a class: give an object of it")
        if not isinstance(function, nn.Module):
            return function
        if any(parameter.requires_grad for parameter in function.parameters()):
            raise OwnObjectError(
                f"loss {self.name} has parameters of its own, which nothing would train: make them "
                "part of the model, or set requires_grad to False"
            )
        return deepcopy(function).to(device, dtype)

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


@dataclass(frozen=True)
class _Sum:
    """What a loss sums up over some rows.

    Attributes:
        rows: how many rows.
        value: the sum over them.
        gradients: the sum's for each output [rows, ...]; zeros for one that it does not depend on.
        depends: whether it depends on an output.
    """

    rows: int
    value: float
    gradients: tuple[Tensor, ...]
    depends: bool

    def times(self, factor: float) -> "_Sum":
        """The same, were the loss so many times what it is."""
        gradients = tuple(factor * gradient for gradient in self.gradients)
        return replace(self, value=factor * self.value, gradients=gradients)


@dataclass(frozen=True)
class _Parted:
    """What a loss sums up over some rows, and over parts of them.

    Attributes:
        whole: over all of them.
        parts: over the rows of each part.
        weight: the weight of the rows.
        close: the relative difference that is rounding.
    """

    whole: _Sum
    parts: Sequence[_Sum]
    weight: float
    close: float

    @property
    def is_sum(self) -> bool:
        """Whether the parts make up the whole, and so do their gradients."""
        return self.adds_up and self._joins

    @property
    def adds_up(self) -> bool:
        """Whether the parts make up the whole."""
        found = sum(part.value for part in self.parts)
        return abs(self.whole.value - found) <= self.close * max(abs(self.whole.value), 1e-6)

    @property
    def _joins(self) -> bool:
        """Whether each part has the gradient that the whole has for its rows."""
        each = zip(*(part.gradients for part in self.parts), strict=True)
        return all(
            self._are_close(whole, torch.cat(parts))
            for whole, parts in zip(self.whole.gradients, each, strict=True)
        )

    def _are_close(self, whole: Tensor, found: Tensor) -> bool:
        """Whether they differ by rounding; NaN and infinity, as a root has at 0, are alike."""
        largest = whole.abs().nan_to_num(0.0, 0.0, 0.0).max().item() if whole.numel() else 0.0
        return torch.allclose(whole, found, 0.0, self.close * max(largest, 1e-6), equal_nan=True)

    def otherwise(self, *, mean: bool) -> "_Parted":
        """The same, were the loss a sum of what is said to be a mean, or the other way round."""
        rows = self.whole.rows
        factors = [rows / part.rows if mean else part.rows / rows for part in self.parts]
        parts = [part.times(by) for part, by in zip(self.parts, factors, strict=True)]
        return replace(self, parts=parts)


def _broadcast(tried: Trial) -> str:
    """Why rows may meet each other: outputs and targets of other shapes are made to fit."""
    output, targets = tried.outputs[0], tried.targets
    if not isinstance(targets, Tensor) or output.shape == targets.shape:
        return ""
    try:
        both = torch.broadcast_shapes(output.shape, targets.shape)
    except RuntimeError:
        return ""
    if not targets.is_floating_point() or both == output.shape:
        return ""
    shapes = f"outputs are {tuple(output.shape)} and targets {tuple(targets.shape)}"
    return (
        f"{shapes}, which torch broadcasts to {tuple(both)}: give both one shape, as in "
        "loss=lambda outputs, targets: function(outputs.squeeze(1), targets)"
    )
