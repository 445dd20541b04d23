"""Assignments, x += y and x[index] = y, without a change in place.

The result has the type of x, as one that is written into x has: under autocast, x + y may have
another one.
"""

import operator
from typing import Any

import torch
from torch import Tensor


def add(x: Tensor, y: Any) -> Tensor:
    """The value of x after x += y."""
    return _of_type(operator.add(x, y), x)


def sub(x: Tensor, y: Any) -> Tensor:
    """The value of x after x -= y."""
    return _of_type(operator.sub(x, y), x)


def mul(x: Tensor, y: Any) -> Tensor:
    """The value of x after x *= y."""
    return _of_type(operator.mul(x, y), x)


def truediv(x: Tensor, y: Any) -> Tensor:
    """The value of x after x /= y."""
    return _of_type(operator.truediv(x, y), x)


def floordiv(x: Tensor, y: Any) -> Tensor:
    """The value of x after x //= y."""
    return _of_type(operator.floordiv(x, y), x)


def mod(x: Tensor, y: Any) -> Tensor:
    """The value of x after x %= y."""
    return _of_type(operator.mod(x, y), x)


def pow(x: Tensor, y: Any) -> Tensor:
    """The value of x after x **= y."""
    return _of_type(operator.pow(x, y), x)


def and_(x: Tensor, y: Any) -> Tensor:
    """The value of x after x &= y."""
    return _of_type(operator.and_(x, y), x)


def or_(x: Tensor, y: Any) -> Tensor:
    """The value of x after x |= y."""
    return _of_type(operator.or_(x, y), x)


def xor(x: Tensor, y: Any) -> Tensor:
    """The value of x after x ^= y."""
    return _of_type(operator.xor(x, y), x)


def lshift(x: Tensor, y: Any) -> Tensor:
    """The value of x after x <<= y."""
    return _of_type(operator.lshift(x, y), x)


def rshift(x: Tensor, y: Any) -> Tensor:
    """The value of x after x >>= y."""
    return _of_type(operator.rshift(x, y), x)


def setitem(x: Tensor, index: Any, y: Any) -> Tensor:
    """The value of x after x[index] = y."""
    result = x.clone()
    result[index] = y
    return result


def _of_type(result: Tensor, x: Tensor) -> Tensor:
    if result.dtype == x.dtype and result.shape == x.shape:
        return result
    if result.shape != x.shape or not torch.can_cast(result.dtype, x.dtype):
        raise RuntimeError(
            f"{result.dtype} of shape {tuple(result.shape)} cannot be written into {x.dtype} of "
            f"{tuple(x.shape)}"
        )
    return result.to(x.dtype)
