"""Layers that compute what torch's do, in less time: large linear layers, pools of one element."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from workbench.model.record.extended import TransposedLinear

LARGE_BYTES = 2**22


class Spare:
    """A tensor that nobody uses, to be written over by whoever takes it."""

    def __init__(self) -> None:
        self._tensor: Tensor | None = None

    def give(self, tensor: Tensor) -> None:
        """Leaves a tensor for the next one who needs memory of its shape and type."""
        self._tensor = tensor

    def take(self) -> Tensor | None:
        """Returns the tensor, once."""
        tensor, self._tensor = self._tensor, None
        return tensor


class Linear(nn.Linear):
    """Torch's linear layer, with the gradient of its weight written where the last step's was.

    For a large weight it is worth it: torch would ask the system for new memory in each step, and
    the system would clear it page by page, which takes half as long as the product itself.

    Attributes:
        spare: the memory [out_features, in_features] for the gradient of its weight.
    """

    def __init__(self, local: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(local.__dict__)
        self.spare = Spare()

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., in_features] to [..., out_features]."""
        if torch.is_autocast_enabled(x.device.type):
            self.spare.take()  # nobody writes over it here, so let it go
            return super().forward(x)
        return _Linear.apply(x, self.weight, self.bias, self.spare, False)


class Transposed(TransposedLinear):
    """The same of a layer that holds its matrix as [in_features, out_features].

    Attributes:
        spare: the memory [in_features, out_features] for the gradient of its weight.
    """

    def __init__(self, local: TransposedLinear) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(local.__dict__)
        self.spare = Spare()

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., in_features] to [..., out_features]."""
        if torch.is_autocast_enabled(x.device.type):
            self.spare.take()
            return super().forward(x)
        return _Linear.apply(x, self.weight.t(), self.bias, self.spare, True)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, spare: Spare, transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.spare, ctx.transposed = spare, transposed
        if x.ndim == 2:
            return F.linear(x, weight, bias)
        # Torch's is then a view, which nothing may change in place where it comes from here.
        out = x.new_empty(*x.shape[:-1], weight.shape[0])
        flat, into = x.reshape(-1, x.shape[-1]), out.view(-1, weight.shape[0])
        if bias is None:
            torch.mm(flat, weight.t(), out=into)
        else:
            torch.addmm(bias, flat, weight.t(), out=into)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        of_x = grad @ weight if needs_x else None
        flat = grad.reshape(-1, weight.shape[0])
        of_weight = of_bias = None
        if needs_weight:
            spare = ctx.spare.take()
            if spare is None:
                into = torch.empty_like(weight)
            else:
                into = spare.t() if ctx.transposed else spare
            torch.mm(flat.t(), x.reshape(-1, weight.shape[1]), out=into)
            of_weight = into.detach()  # another name: torch keeps what has one owner, or copies it
        if needs_bias:
            of_bias = flat.sum(0)
        return of_x, of_weight, of_bias, None, None


class Repeat(nn.Module):
    """An adaptive average pool of 1 x 1 images: each element, as often as the output has room.

    Torch's own averages windows of one element, one by one, which takes twenty times as long.

    Args:
        height: the height of the output [positions].
        width: the width of the output [positions].
    """

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.height, self.width = height, width

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., 1, 1] to [..., height, width]."""
        return x.expand(*x.shape[:-2], self.height, self.width).contiguous()

    def extra_repr(self) -> str:
        """Returns what `print(model)` says of it."""
        return f"{self.height} x {self.width}"
