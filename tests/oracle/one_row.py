"""Norms of one row in plain torch, whose kernels on the CPU misread some gradients of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@contextmanager
def read_right() -> Iterator[None]:
    """Batch and instance norm get a single row, and the gradient of what they give, in order.

    Else torch (2.13) is wrong by any factor where its channels lie innermost.
    """
    were = {name: getattr(F, name) for name in ("batch_norm", "instance_norm")}
    for name, norm in were.items():
        setattr(F, name, _right(norm))
    try:
        yield
    finally:
        for name, norm in were.items():
            setattr(F, name, norm)


def _right(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def called(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = norm(_in_order(x), *args, **kwargs)
        if y.requires_grad:
            y.register_hook(_in_order)
        return y

    return called


def _in_order(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format) if len(x) == 1 else x
