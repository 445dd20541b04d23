"""The part of a rank that owns nothing of a layer, and yet must stay in its backward pass.

Without the tie to its inputs and weights, autograd would not call the crossings above this layer
on this rank, and the other ranks would wait for it for ever. The rank's output has the type that
the layer's has on other ranks: under autocast that is the operation's, not that of what it reads.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from workbench.model.build import with_tensors
from workbench.model.weights.files import TORCH_DTYPES
from workbench.plan.graph.graph import Input

OutputType = Callable[[], torch.dtype]
"""Returns the type of a layer's output under the autocast that is in force."""


def nothing(
    shape: tuple[int, ...], x: Tensor, *weights: Tensor | None, dtype: OutputType | None = None
) -> Tensor:
    """Returns zeros of `shape` that depend on `x` and `weights`, with gradients of zero.

    Args:
        shape: the shape of the zeros.
        *weights: the weights, and whatever else they are tied to.
        dtype: the type of the zeros; None: that of `x`.
    """
    wanted = x.dtype if dtype is None else dtype()
    return _Nothing.apply(shape, wanted, x, *(w for w in weights if w is not None))


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
        dtype: the type of the layer's output; None: that of its input.
    """

    def __init__(
        self,
        layer: nn.Module | None,
        shape: tuple[int, ...],
        dtype: OutputType | None = None,
        *,
        learns: bool = True,
    ) -> None:
        super().__init__()
        self.shape, self.dtype, self.learns = shape, dtype, learns
        if layer is not None:
            for name, parameter in layer.named_parameters(recurse=False):
                self.register_parameter(name, parameter)
            for name, buffer in layer.named_buffers(recurse=False):
                self.register_buffer(name, buffer)

    def forward(self, x: Tensor, *others: object) -> Tensor:
        """Maps x [rows, ...] to zeros [rows, *shape]; other inputs may be tensors or numbers."""
        tied = (other for other in others if isinstance(other, Tensor))
        shape = (x.shape[0], *self.shape)
        zeros = nothing(shape, x, *tied, *self.parameters(), dtype=self.dtype)
        return zeros if self.learns else zeros.detach()


_ROWS = 2  # batch norm wants more than one

Autocast = tuple[bool, torch.dtype]


class LayerDtypes:
    """The types of what a model's layers compute, as one process would have them.

    The whole model runs once on fake tensors, without memory, for each autocast that is in force.

    Args:
        traced: the model, whole and without values; it may be rewritten afterwards.
    """

    def __init__(
        self,
        traced: torch.fx.GraphModule,
        inputs: Sequence[Input],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._mode, self._device = FakeTensorMode(), device

        def fake(tensor: Tensor) -> Tensor:
            wanted = dtype if tensor.is_floating_point() else tensor.dtype
            with self._mode:
                return torch.empty(tensor.shape, dtype=wanted, device=device)

        self._whole = with_tensors(traced, fake)
        for module in self._whole.modules():
            if isinstance(module, _BatchNorm) and module.momentum is None:
                module.momentum = 1.0  # a cumulative one reads its count of batches, a value
        self._samples = [
            fake(torch.empty(_ROWS, *one.shape, device="meta", dtype=TORCH_DTYPES[one.dtype]))
            for one in inputs
        ]
        self._known: dict[Autocast, dict[str, torch.dtype]] = {}

    def of(self, node: str) -> torch.dtype:
        """Returns the type of what a node of the traced model computes, under this autocast."""
        kind = self._device.type
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        if autocast not in self._known:
            noting = _Noting(self._whole)
            # cuDNN's own LSTM wants values; what it is without has the same types.
            without = torch.backends.cudnn.flags(enabled=False)
            with self._mode, torch.no_grad(), without, self._device:
                noting.run(*(batch.clone() for batch in self._samples))
            self._known[autocast] = noting.found
        return self._known[autocast][node]


class _Noting(torch.fx.Interpreter):
    """Notes the type of what every node computes; of several tensors, of the first."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.found: dict[str, torch.dtype] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        for first in pytree.tree_leaves(value)[:1]:
            if isinstance(first, Tensor):
                self.found[n.name] = first.dtype
        return value
