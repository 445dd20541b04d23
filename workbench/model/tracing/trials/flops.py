"""A counter of floating-point operations."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop

from workbench.model.tracing.draws import is_random


def _recurrent(
    x: Tensor, weight: Tensor, hidden: Tensor, *args: Any, out_val: Any = None, **kwargs: Any
) -> int:
    """FLOPs of one layer and direction of an LSTM: each step multiplies by both weights."""
    steps_and_rows: int = x.shape[0] * x.shape[1]
    return 2 * steps_and_rows * (weight.numel() + hidden.numel())


_FORMULAS: dict[Any, Any] = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    torch.ops.aten.mkldnn_rnn_layer: _recurrent,
}
_LIBRARIES = ("aten", "prim", "prims")
# Operations that read rows of a matrix, and compute nothing.
_LOOKUPS = (torch.ops.aten.embedding, torch.ops.aten._embedding_bag)


class FlopCounter(TorchDispatchMode):
    """Adds up the FLOPs of matrix products, convolutions and attention (a multiply-add is 2).

    It is `torch.utils.flop_counter` without its bookkeeping for each module, and with the kernels
    of CPUs for attention and recurrent layers. Everything else counts as nothing.

    Attributes:
        flops: the FLOPs counted so far.
        random: whether an operation that can draw random numbers was run.
        looked_up: whether rows of a matrix were read, which is no FLOP.
        foreign: whether an operation of another library than torch was run, which may do any number
            of FLOPs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.random = False
        self.looked_up = False
        self.foreign = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        value = func(*args, **kwargs)
        self.random = self.random or is_random(func)
        formula = _FORMULAS.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=value)
        self.looked_up |= func._overloadpacket in _LOOKUPS
        self.foreign |= formula is None and func.namespace not in _LIBRARIES
        return value
