"""Shorter floating-point types: 16 bits for each value."""

import torch
from torch import Tensor

from workbench.comm.codecs.coder import Coder
from workbench.plan.codec import Codec


class Cast(Coder):
    """Rounds to the nearest value of a type, to the even one of two.

    Args:
        codec: the value.
        device: of all tensors.
        dtype: what travels.
    """

    def __init__(self, codec: Codec, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(codec, device)
        self._dtype = dtype

    def encode(self, x: Tensor, wire: Tensor) -> None:
        short = wire.view(self._dtype)
        for block in self.blocks(len(x)):
            self._shorten(x[block], short[block])

    def peak(self, wire: Tensor, length: int) -> Tensor:
        short, found = wire.view(self._dtype), wire.new_zeros((), dtype=self._dtype)
        for block in self.blocks(length):
            room = self.scratch(block.stop - block.start, self._dtype)
            found = torch.maximum(found, torch.abs(short[block], out=room).max())
        return found

    def add(self, wire: Tensor, out: Tensor, sign: int = 1) -> None:
        short = wire.view(self._dtype)
        for block in self.blocks(len(out)):
            room = self.scratch(block.stop - block.start)
            out[block].add_(room.copy_(short[block]), alpha=sign)

    def decode(self, wire: Tensor, out: Tensor) -> None:
        out.copy_(wire.view(self._dtype))

    def _shorten(self, x: Tensor, short: Tensor) -> None:
        short.copy_(x)


class Chop(Cast):
    """Cuts off the low 16 bits of fp32, which leaves a bf16 that is never larger.

    Source: T of Pipe-SGD (Li et al. 2018, arXiv:1811.03619).
    """

    def __init__(self, codec: Codec, device: torch.device) -> None:
        super().__init__(codec, device, torch.bfloat16)

    def _shorten(self, x: Tensor, short: Tensor) -> None:
        if x.dtype != torch.float32:
            x = self.scratch(len(x)).copy_(x)
        room = self.scratch(len(x), torch.int32)
        short.view(torch.int16).copy_(torch.bitwise_right_shift(x.view(torch.int32), 16, out=room))
