"""The part of a rank that owns nothing of a layer, and yet must stay in its backward pass.

Without the tie to its inputs and weights, autograd would not call the crossings above this
layer on this rank, and the other ranks would wait for it for ever.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# Says which type a layer's output has: under autocast, not always that of what it reads.
GivenType = Callable[[], torch.dtype]


def nothing(
    shape: tuple[int, ...], x: Tensor, *weights: Tensor | None, dtype: GivenType | None = None
) -> Tensor:
    """Zeros of `shape` that depend on `x` and `weights`, with gradients of zero.

    Args:
        shape: of the zeros.
        x: on whose device they are.
        weights: and whatever else they are tied to.
        dtype: of the zeros; None: that of `x`.
    """
    given = x.dtype if dtype is None else dtype()
    return _Nothing.apply(shape, given, x, *(w for w in weights if w is not None))


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], dtype: torch.dtype, *tensors: Tensor) -> Tensor:
        ctx.like = [(t.shape, t.dtype, t.device) for t in tensors]
        return tensors[0].new_zeros(shape, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        zeros = (torch.zeros(s, dtype=d, device=v) for s, d, v in ctx.like)
        return None, None, *zeros


class Idle(nn.Module):
    """Stands in for a layer of which this rank owns no input or no output features.

    Args:
        layer: the layer's local module, which keeps its (empty) weights under their names; or
            None for a function.
        shape: one sample's local shape of the output, the owned dimension included.
        dtype: of the layer's output; None: that of its input.
        learns: whether a gradient comes back to the layer's output, and so to what it is tied to.
    """

    def __init__(
        self,
        layer: nn.Module | None,
        shape: tuple[int, ...],
        dtype: GivenType | None = None,
        *,
        learns: bool = True,
    ) -> None:
        super().__init__()
        self.shape, self.dtype, self.learns = shape, dtype, learns
        if layer is not None:
            for name, parameter in layer.named_parameters(recurse=False):
                own = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
                self.register_parameter(name, own)
            for name, buffer in layer.named_buffers(recurse=False):
                self.register_buffer(name, buffer)

    def forward(self, x: Tensor, *others: object) -> Tensor:
        """Zeros for as many rows as `x` has; of the other inputs some may be numbers."""
        tied = (other for other in others if isinstance(other, Tensor))
        shape = (x.shape[0], *self.shape)
        zeros = nothing(shape, x, *tied, *self.parameters(), dtype=self.dtype)
        return zeros if self.learns else zeros.detach()
