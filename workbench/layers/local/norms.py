"""Batch and instance norm of rows that are spread over ranks.

Torch misreads a single row on the CPU if its channels lie innermost: its kernels (seen with 2.13)
read other elements, of the input after a transposition, of the gradient of an instance norm in any
case, and say nothing. A rank has one row more often than one process has, so norms read such a row
from a copy with its elements in order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.comm.groups.group import Group
from workbench.comm.regions import reduce_from
from workbench.layers.local.context import BatchContext
from workbench.layers.local.idle import nothing


def in_order(x: Tensor) -> Tensor:
    """Returns a single row [1, ...] with its elements in order; several rows as they are."""
    if x.ndim < 3 or x.shape[0] != 1 or (x.is_contiguous() and x.stride(0) == x.numel()):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def read_in_order(norm: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Returns what a norm computes from x, however x and its gradient lie in memory.

    Args:
        x: its input [rows, channels, ...].
    """
    if x.shape[0] != 1:
        return norm(x, *args, **kwargs)
    y = norm(in_order(x), *args, **kwargs)
    if y.requires_grad:
        y.register_hook(in_order)
    return y


def batch_norm(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Computes `torch.nn.functional.batch_norm`, also of a single row."""
    return read_in_order(F.batch_norm, x, *args, **kwargs)


def instance_norm(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Computes `torch.nn.functional.instance_norm`, also of a single row."""
    return read_in_order(F.instance_norm, x, *args, **kwargs)


def guard(norm: nn.Module) -> None:
    """Lets a norm of torch's own read its input, and the gradient of its output, in order."""
    norm.register_forward_pre_hook(lambda _norm, given: (in_order(*given),))
    norm.register_forward_hook(_guard_gradient)


def _guard_gradient(_norm: nn.Module, _given: tuple[Tensor, ...], y: Tensor) -> None:
    if y.requires_grad and y.shape[0] == 1:
        y.register_hook(in_order)


@dataclass
class RunningShare:
    """One rank's share of the world's running statistics, where batch norm is local.

    In a training pass with the rows n_1 .. n_k of k ranks (or shard groups), n of them together,
    rank r normalizes by its own mean s_r. The world's running mean R (the running variance
    likewise) moves by what all ranks have seen, each as much as it has rows; with momentum m

        R  <-  (1 - m) R + m (n_1 s_1 + ... + n_k s_k) / n

    No rank knows R before it is asked for. Instead each keeps a share W_r of it, and its own
    running mean B_r, so that R = W_1 B_1 + ... + W_k B_k at any time, and the shares add up to 1:

        W_r'  =  W_r + m (n_r / n - W_r)              without rows it fades
        B_r  <-  (1 - f) B_r + f s_r                  f = m (n_r / n) / W_r'

    Ranks whose part of the rows never changes have W_r = n_r / n and f = m: what torch itself
    does. Every rank computes its share from the rows of all, which it knows: nothing is sent.

    Attributes:
        context: the rows that the batch in hand has on each rank.
        group_size: the size of the groups in which the layer lies: all ranks of one see the same
            rows.
        value: the share; None: all ranks hold the same statistics, and nothing was seen since.
    """

    context: BatchContext
    group_size: int
    value: float | None = None

    def factor(self, momentum: float) -> float:
        """Counts the batch in hand; returns the momentum of the rank's own statistics for it.

        Args:
            momentum: the momentum of the world's statistics; where it is the cumulative average's,
                1 / batches so far.
        """
        rows = self.context.global_rows
        if rows == 0:
            return 0.0
        own = sum(self.context.group_rows(self.group_size).sizes) / rows
        before = own if self.value is None else self.value
        self.value = before + momentum * (own - before)
        # Where rows never change the quotient is 1, and the momentum torch's to the bit.
        return momentum * (own / self.value) if self.value else 0.0


class LocalBatchNorm(nn.Module):
    """`torch.nn.BatchNorm2d` (or 1d) over the rows and channels that this rank holds.

    With own rows the statistics are per rank, as under torch's DDP. A rank without channels or
    rows passes on nothing, and counts the batch with the others. It is in the mode of `norm`: in
    eval mode it uses its running statistics.

    Args:
        share: this rank's share of the world's running statistics; None: they are all this rank's.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(
        self, norm: nn.BatchNorm1d | nn.BatchNorm2d, share: RunningShare | None = None
    ) -> None:
        super().__init__()
        self.eps, self.momentum, self.share = norm.eps, norm.momentum, share
        self.track_running_stats = norm.track_running_stats
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(norm, name))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))
        self.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == 0:
            if self.moves:
                self._average_factor()
            return nothing(tuple(x.shape), x, self.weight, self.bias)
        running = self.moves or not self.training
        return batch_norm(
            x,
            self.running_mean if running else None,
            self.running_var if running else None,
            self.weight,
            self.bias,
            self.of_batch,
            self._average_factor() if self.moves else 0.0,
            self.eps,
        )

    @property
    def moves(self) -> bool:
        """Whether the batch in hand moves the running statistics, where there are any."""
        return self.training and self.track_running_stats

    @property
    def of_batch(self) -> bool:
        """Whether the batch in hand gives the statistics, rather than the running ones."""
        return self.training or self.running_mean is None

    def _average_factor(self) -> float:
        """Counts the batch; returns its weight in the running statistics."""
        if self.num_batches_tracked is None:
            return self.momentum or 0.0
        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:  # a cumulative average
            momentum = 1.0 / float(self.num_batches_tracked)
        return momentum if self.share is None else self.share.factor(momentum)


class SynchronizedBatchNorm(LocalBatchNorm):
    """Batch normalization with the statistics of all rows of the world.

    C = channels held here; n = rows of the whole batch times positions

        forward    mean  = all_reduce(sum x) / n               C elements
                   var   = all_reduce(sum (x - mean)^2) / n    C elements
        backward   the same two sums of the gradient           2 C elements

    The variance is summed around the mean, in a second reduction, since E[x^2] - E[x]^2
    cancels in fp32. Every sum is used by all ranks, each for other rows, so that its
    gradient is summed as well: `reduce_from` with a partial gradient.

    Args:
        group: the ranks that hold other rows of the same channels.

    Source: Ioffe and Szegedy 2015 (arXiv:1502.03167), alg. 1 and 2.
    """

    def __init__(
        self, norm: nn.BatchNorm1d | nn.BatchNorm2d, group: Group, *, layer: str = ""
    ) -> None:
        super().__init__(norm)
        self.group, self.layer = group, layer

    def forward(self, x: Tensor) -> Tensor:
        if not self.of_batch:
            return super().forward(x)
        dims = [d for d in range(x.ndim) if d != 1]
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        count = wide.new_tensor([x.numel() / max(x.shape[1], 1)])
        totals = self._sum(torch.cat([wide.sum(dims), count]))
        n = totals[-1].detach()
        mean = (totals[:-1] / n).view(1, -1, *[1] * (x.ndim - 2))
        centred = wide - mean
        var = self._sum(centred.square().sum(dims)) / n
        factor = self._average_factor() if self.moves else 0.0
        if self.moves and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                self.running_mean.lerp_(mean.view(-1), factor)
                self.running_var.lerp_(var * (n / (n - 1)), factor)
        y = centred * torch.rsqrt(var + self.eps).view_as(mean)
        if self.weight is not None:
            y = y * self.weight.view_as(mean)
        if self.bias is not None:
            y = y + self.bias.view_as(mean)
        return y.to(x.dtype)

    def _sum(self, x: Tensor) -> Tensor:
        return reduce_from(x, self.group, gradient="partial", layer=self.layer)
