"""What a codec does to a flat tensor, and the order in which it goes through a long one."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from workbench.plan.codec import Codec

# Values are coded so many at a time on a CPU: with their scratch they stay in a core's cache.
BLOCK = 2**16


class Coder(ABC):
    """Turns flat floating-point tensors into bytes, and back.

    What is encoded together is decoded together: bytes say neither how many values they hold nor
    of which codec they are. Everything is computed in fp32; of fp64, what fp32 holds is encoded.

    One thread at a time: the coder keeps scratch memory.

    Args:
        codec: the value.
        device: of all tensors.
    """

    def __init__(self, codec: Codec, device: torch.device) -> None:
        self.codec, self.device = codec, device
        self._scratch: dict[torch.dtype, Tensor] = {}

    @abstractmethod
    def encode(self, x: Tensor, wire: Tensor) -> None:
        """Fills `wire`, uint8 [encoded_bytes(len(x))], from x.

        What cannot be encoded, say because it is no number, leaves bytes in which `fault` sees it.

        Args:
            x: flat and contiguous.
            wire: contiguous; its memory begins at a multiple of 4 bytes.
        """

    @abstractmethod
    def peak(self, wire: Tensor, length: int) -> Tensor:
        """Of what is encoded in `wire`, a number that is finite if and only if all of it is."""

    @abstractmethod
    def add(self, wire: Tensor, out: Tensor, sign: int = 1) -> None:
        """Adds `sign` times what `wire` holds to `out`, fp32 or fp64."""

    @abstractmethod
    def decode(self, wire: Tensor, out: Tensor) -> None:
        """Fills `out`, fp32 or fp64, from `wire`."""

    def scratch(self, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory for `length` elements, until somebody asks for some of this dtype again."""
        held = self._scratch.get(dtype)
        if held is None or len(held) < length:
            held = self._scratch[dtype] = torch.empty(length, dtype=dtype, device=self.device)
        return held[:length]

    def blocks(self, length: int) -> Iterator[slice]:
        """Consecutive parts of `length` values: one on a GPU, whose kernels want much to do."""
        step = BLOCK if self.device.type == "cpu" else max(1, length)
        for start in range(0, length, step):
            yield slice(start, min(start + step, length))
