"""Counting floating-point operations as tensors meet them."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop

from workbench.model.draws import is_random

_FORMULAS = flop_registry | {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
}


class FlopCounter(TorchDispatchMode):
    """Adds up the FLOPs of matrix products, convolutions and attention (a multiply-add is 2).

    As `torch.utils.flop_counter`, without its bookkeeping for each module, and with the
    attention kernel of CPUs. Everything else counts as nothing.

    Attributes:
        flops: so far.
        random: whether an operation was met that can draw random numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.random = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        value = func(*args, **kwargs)
        self.random = self.random or is_random(func)
        formula = _FORMULAS.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=value)
        return value
