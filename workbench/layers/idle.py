"""The part of a rank that owns nothing of a layer, and yet must stay in its backward pass.

Without the tie to its inputs and weights, autograd would not call the crossings above this
layer on this rank, and the other ranks would wait for it for ever.
"""

from typing import Any

import torch
from torch import Tensor, nn


def nothing(shape: tuple[int, ...], x: Tensor, *weights: Tensor | None) -> Tensor:
    """Zeros of `shape` that depend on `x` and `weights`, with gradients of zero."""
    return _Nothing.apply(shape, x, *(w for w in weights if w is not None))


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], *tensors: Tensor) -> Tensor:
        ctx.like = [(t.shape, t.dtype, t.device) for t in tensors]
        return tensors[0].new_zeros(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        zeros = (torch.zeros(s, dtype=d, device=v) for s, d, v in ctx.like)
        return None, *zeros


class Idle(nn.Module):
    """Stands in for a layer of which this rank owns no input or no output features.

    Args:
        layer: the layer's local module, which keeps its (empty) weights under their names; or
            None for a function.
        shape: one sample's local shape of the output, the owned dimension included.
    """

    def __init__(self, layer: nn.Module | None, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        if layer is not None:
            for name, parameter in layer.named_parameters(recurse=False):
                self.register_parameter(name, nn.Parameter(parameter.detach()))
            for name, buffer in layer.named_buffers(recurse=False):
                self.register_buffer(name, buffer)

    def forward(self, x: Tensor, *others: object) -> Tensor:
        """Zeros for as many rows as `x` has; of the other inputs some may be numbers."""
        tied = (other for other in others if isinstance(other, Tensor))
        return nothing((x.shape[0], *self.shape), x, *tied, *self.parameters())
