"""Dropout of tensors that may be cut, with masks that no split can change.

An element's fate is a hash of (seed, step, layer, index of its sample in the global batch, index
in its sample), as `model/tracing/draws.py` says of `bernoulli`, so that every plan, one process
included, drops the same elements.
"""

import math

import torch
from torch import Tensor, nn

from workbench.layers.context import BatchContext
from workbench.model.tracing.draws import hashed, kept
from workbench.plan.placement.layout import Layout
from workbench.plan.placement.placement import Shard


class PlacedDropout(nn.Module):
    """Dropout of a tensor that may be cut.

    Args:
        p: the probability that an element is zeroed; the others are scaled by 1 / (1 - p).
        layout: the layout of its input.
        shape: the whole shape of one sample.
        rows: the rows of dimension 0 for each sample.
        name: the layer's name.
        context: the rows that are held now.
        mode: what lives or dies as one: an "element", a "row" of dimension 0 (stochastic
            depth), or the "batch".
        index: the index of the mask among the random tensors that a call of the layer draws.
        always: whether it drops in evaluation too, as a function does that is told to.
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
        *,
        index: int = 0,
        always: bool = False,
    ) -> None:
        super().__init__()
        self.p, self.layout, self.shape, self.rows = p, layout, shape, rows
        self.name, self.context, self.mode = name, context, mode
        self.index, self.always = index, always

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training or self.always) or self.p == 0.0:
            return x
        if self.p == 1.0:
            return x * 0.0
        keep = kept(self._bits(x.device), 1.0 - self.p)
        return x * (keep.to(x.dtype) / (1.0 - self.p))

    def _bits(self, device: torch.device) -> Tensor:
        """Returns 64 bits for each thing that lives or dies as one.

        Small indices are only made large when they are hashed.
        """
        ones = (1,) * len(self.shape)
        if self.mode == "batch":
            samples = element = torch.zeros((1, 1, *ones), dtype=torch.int64, device=device)
        else:
            samples = self.context.indices(self.layout.group_size, device=device)
            samples = samples.view(-1, 1, *ones)
            element = torch.arange(self.rows, device=device).view(1, -1, *ones)
        if self.mode == "element":
            element = element * math.prod(self.shape) + self._features(device)
        key = self.context.key(self.name, self.index)
        return hashed(key, samples, element).flatten(0, 1)

    def _features(self, device: torch.device) -> Tensor:
        """Returns the index in the whole row of every element of the local one [1, 1, *shape]."""
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
        """Returns what `print(model)` says of it."""
        return f"p={self.p}, {self.mode}"
