"""Batch norm of several parts of a batch, each by itself, in one process."""

from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.plan.plans.plan import Plan


def part_batch_norm(model: nn.Module, plan: Plan) -> None:
    """Replaces each batch norm by one that normalizes every rank's (or group's) rows apart."""
    for layer in plan.graph.layers:
        if layer.of_batch and not layer.shared:
            group_size = plan.flow.inputs[layer.name].group_size
            norm = model.get_submodule(layer.name)
            model.set_submodule(layer.name, PartedBatchNorm(norm, plan, group_size, layer.rows))


class PartedBatchNorm(nn.Module):
    """Normalizes the rows of each group of ranks by themselves.

    With P parts of n_p of the n rows, of mean s_p and unbiased variance v_p, and momentum m

        running mean   <-  (1 - m) running mean + m sum over p of (n_p / n) s_p
        running var    <-  (1 - m) running var  + m sum over p of (n_p / n) v_p

    and a batch is one batch, however many parts it has.

    Args:
        norm: the norm of the whole model.
        plan: the plan, which says which rows each rank holds.
        group_size: Ranks of each group in which the layer lies.
        rows: the rows of the layer's input for each sample.
    """

    def __init__(self, norm: nn.Module, plan: Plan, group_size: int, rows: int) -> None:
        super().__init__()
        self.plan, self.group_size, self.rows = plan, group_size, rows
        self.eps = cast(float, norm.eps)
        self.momentum = cast("float | None", norm.momentum)
        self.training = norm.training
        self.track_running_stats = cast(bool, norm.track_running_stats)
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            value = getattr(norm, name)
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        if self.running_mean is not None and not self.training:
            return self._normalized(x, of_batch=False)
        parts = [part for part in x.split(self._sizes(x.shape[0])) if len(part)]
        if self.training and self.track_running_stats:
            self._track([part.detach() for part in parts])
        return torch.cat([self._normalized(part, of_batch=True) for part in parts])

    def _sizes(self, length: int) -> list[int]:
        """Rows of each group."""
        ranks = self.plan.rows_of(length // self.rows)
        bounds = range(0, len(ranks) + 1, self.group_size)
        return [self.rows * sum(ranks[first:end]) for first, end in pairwise(bounds)]

    def _track(self, parts: list[Tensor]) -> None:
        if self.num_batches_tracked is None:
            return
        count = cast(Tensor, self.num_batches_tracked).add_(1)
        if self.running_mean is None:
            return
        m = 1.0 / count.item() if self.momentum is None else self.momentum
        total = sum(len(part) for part in parts)
        for running, statistic in (("running_mean", torch.mean), ("running_var", torch.var)):
            moved = cast(Tensor, getattr(self, running)).mul_(1.0 - m)
            for part in parts:
                dims = [dim for dim in range(part.ndim) if dim != 1]
                moved.add_(statistic(part, dims), alpha=m * len(part) / total)

    def _normalized(self, x: Tensor, *, of_batch: bool) -> Tensor:
        mean, var = (None, None) if of_batch else (self.running_mean, self.running_var)
        weight, bias = cast("Tensor | None", self.weight), cast("Tensor | None", self.bias)
        given = cast("Tensor | None", mean), cast("Tensor | None", var)
        return F.batch_norm(x, *given, weight, bias, of_batch, 0.0, self.eps)
