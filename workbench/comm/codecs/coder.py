"""The base class of codecs, built-in ones and a person's own."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from workbench.plan.extension.extension import Extension


class Coder(Extension, ABC):
    """Turns flat floating-point tensors into bytes, and back.

    What is encoded together is decoded together: bytes say neither how many values they hold nor
    of which codec they are. Sums are taken in fp32 or fp64.

    An own codec keeps nothing from call to call: one object encodes all that a rank sends, several
    sums may be under way at once, and their pieces come in any order. The same values must give
    the same bytes. What an encoding leaves out is kept for it, as error feedback.

    Attributes:
        error_feedback: whether each rank keeps what its encodings lost, and adds it to what they
            encode next time, unless the experiment says otherwise.
        inexact: the format of what is sent, in words; "": its name.
        error: the most that a decoded value is off, as a part of the largest magnitude that was
            encoded with it; None: it promises nothing.
    """

    kind: ClassVar[str] = "codecs"
    error_feedback: bool = False
    inexact: str = ""
    error: float | None = None

    @abstractmethod
    def encoded_bytes(self, length: int) -> int:
        """Returns the bytes of `length` values, one or more, that are encoded together.

        Predictions call it, also where there is no torch.
        """

    @abstractmethod
    def encode(self, x: Tensor, wire: Tensor) -> None:
        """Fills `wire` from x, which stays as it is.

        Args:
            x: the values [length], fp32 or fp64, contiguous.
            wire: the bytes, uint8 [encoded_bytes(length)], contiguous; its memory begins at a
                multiple of 4 bytes.
        """

    @abstractmethod
    def decode(self, wire: Tensor, out: Tensor) -> None:
        """Fills `out` [length], fp32 or fp64, from `wire`."""

    def add(self, wire: Tensor, out: Tensor, sign: int = 1) -> None:
        """Adds `sign` times what `wire` holds to `out` [length], fp32 or fp64."""
        decoded = torch.empty_like(out)
        self.decode(wire, decoded)
        out.add_(decoded, alpha=sign)

    def peak(self, x: Tensor, wire: Tensor) -> Tensor:
        """Returns a number [] that is finite if and only if x could be encoded.

        Args:
            x: the values [length], one or more, as they were encoded.
            wire: what `encode` has made of them.
        """
        decoded = torch.empty_like(x)
        self.decode(wire, decoded)
        return torch.maximum(x.abs().max(), decoded.abs().max())
