"""Random masks that no split can change.

An element's fate is a hash of (seed, step, layer, index of its row in the global batch, index
in its sample), so that every plan, one process included, drops the same elements.
"""

import math

import torch
from torch import Tensor, nn

from workbench.layers.context import BatchContext
from workbench.plan.layout import Layout
from workbench.plan.placement import Shard


def keep_mask(key: int, rows: Tensor, features: Tensor, p: float) -> Tensor:
    """True with probability 1 - p for each (row, feature), from their indices alone.

    Args:
        key: 64 bits.
        rows: int64 indices; broadcasts with `features`.
        features: int64 indices.
        p: probability of False.

    Source: the finalizer is SplitMix64's (Steele, Lea and Flood 2014); int64 arithmetic wraps.
    """
    mixed = _mix(_mix(rows + _signed(key)) ^ (features * _signed(0x9E3779B97F4A7C15)))
    uniform = (mixed >> 32) & 0xFFFFFFFF
    return uniform >= round(p * 2**32)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    return z ^ _shifted(z, 27)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's shift of a negative number copies its sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


class PlacedDropout(nn.Module):
    """Dropout of a tensor that may be cut.

    Args:
        p: probability that an element is zeroed; the others are scaled by 1 / (1 - p).
        layout: how its input lies.
        shape: one sample's whole shape.
        rows: rows of dimension 0 for each sample.
        name: the layer's.
        context: says which rows are held.
        mode: what lives or dies as one: an "element", a "row" of dimension 0 (stochastic
            depth), or the "batch".
        always: whether it drops in evaluation, too.
    """

    def __init__(
        self,
        p: float,
        layout: Layout,
        shape: tuple[int, ...],
        rows: int,
        name: str,
        context: BatchContext,
        mode: str = "element",
        always: bool = False,
    ) -> None:
        super().__init__()
        self.always = always
        self.p, self.layout, self.shape, self.rows = p, layout, shape, rows
        self.name, self.context, self.mode = name, context, mode

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training or self.always) or self.p == 0.0:
            return x
        if self.p == 1.0:
            return x * 0.0
        ones = (1,) * len(self.shape)
        rows = self.context.indices(self.layout.group_size, self.rows, x.device)
        rows = torch.zeros_like(rows) if self.mode == "batch" else rows
        features = self._features(x.device) if self.mode == "element" else rows.new_zeros(ones)
        keep = keep_mask(self.context.key(self.name), rows.view(-1, *ones), features, self.p)
        return x * (keep.to(x.dtype) / (1.0 - self.p))

    def _features(self, device: torch.device) -> Tensor:
        """Index in the whole sample of every element of the local one."""
        cut = self.layout.placement
        index = torch.zeros((1,) * len(self.shape), dtype=torch.int64, device=device)
        for d, length in enumerate(self.shape):
            start, size = 0, length
            if isinstance(cut, Shard) and cut.dim == d + 1:
                start, size = cut.span(self.context.rank % self.layout.group_size)
            along = torch.arange(start, start + size, device=device)
            stride = math.prod(self.shape[d + 1 :])
            index = index + (along * stride).view(
                *[-1 if i == d else 1 for i in range(len(self.shape))]
            )
        return index

    def extra_repr(self) -> str:
        """What `print(model)` says of it."""
        return f"p={self.p}, {self.mode}"
