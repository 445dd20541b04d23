"""Batch normalization of rows that are spread over ranks."""

import torch
from torch import Tensor, nn

from workbench.comm.groups.group import Group
from workbench.comm.regions import reduce_from
from workbench.layers.idle import nothing
from workbench.layers.one_row import batch_norm
from workbench.layers.running_share import RunningShare


class LocalBatchNorm(nn.Module):
    """`torch.nn.BatchNorm2d` (or 1d) over the rows and channels that this rank holds.

    With own rows the statistics are per rank, as under torch's DDP. A rank without channels or
    rows passes on nothing, and counts the batch with the others. It is in the mode of `norm`: in
    eval mode it uses its running statistics.

    Args:
        norm: the module whose weights, buffers and constants to take.
        share: of the world's running statistics; None: they are all this rank's.
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
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(norm, name))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))
        self.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == 0:
            if self.training:
                self._average_factor()
            return nothing(tuple(x.shape), x, self.weight, self.bias)
        return batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.of_batch,
            self._average_factor() if self.training else 0.0,
            self.eps,
        )

    @property
    def of_batch(self) -> bool:
        """Whether the batch in hand gives the statistics, rather than the running ones."""
        return self.training or self.running_mean is None

    def _average_factor(self) -> float:
        """The weight of this batch in the running statistics; counts the batch."""
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
        norm: the module whose weights, buffers and constants to take.
        group: the ranks that hold other rows of the same channels.
        layer: the label under which traffic is recorded.

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
        if self.training and self.running_mean is not None and self.running_var is not None:
            factor = self._average_factor()
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
