"""Coding in one all-reduce: what may go wrong is said, and what is lost may be kept."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from workbench.comm.codecs.casts import Cast, Chop
from workbench.comm.codecs.coder import Coder
from workbench.comm.codecs.scaled import Int4, Int8
from workbench.comm.codecs.top_k import TopK
from workbench.comm.groups.errors import CodecError
from workbench.comm.groups.phases import Mark, unheard
from workbench.comm.pieces import cut
from workbench.plan.codec import Codec, CodecName

_CODERS: Mapping[CodecName, Callable[[Codec, torch.device], Coder]] = MappingProxyType(
    {
        "fp16": partial(Cast, dtype=torch.float16),
        "bf16": partial(Cast, dtype=torch.bfloat16),
        "bf16_truncated": Chop,
        "int8": Int8,
        "int4": Int4,
        "top_k": TopK,
    }
)
_HOLDS: Mapping[CodecName, float] = MappingProxyType(
    {"fp16": torch.finfo(torch.float16).max, "bf16": torch.finfo(torch.bfloat16).max}
)
# A piece's bytes begin where any type's may.
_ALIGNED = 16


def coder_of(codec: Codec, device: torch.device) -> Coder:
    """What does on tensors what a codec says."""
    return _CODERS[codec.name](codec, device)


@dataclass(frozen=True)
class Coding:
    """Encodes the pieces of one all-reduce on one rank.

    Attributes:
        coder: does it.
        residual: what earlier encodings left out of the elements that are coded, flat; None:
            nobody keeps it.
        what: this rank and the collective, for errors.
        mark: hears what begins: "encode", "decode", or "reduce", which decodes and adds.
    """

    coder: Coder
    residual: Tensor | None = None
    what: str = ""
    mark: Mark = unheard

    def size(self, length: int) -> int:
        """Bytes of `length` values that are encoded together."""
        return self.coder.codec.encoded_bytes(length)

    def cut(self, sizes: Sequence[int]) -> "list[Coding]":
        """The coding of each of the consecutive pieces of what this one is for."""
        if self.residual is None:
            return [self] * len(sizes)
        return [replace(self, residual=piece) for piece in cut(self.residual, sizes)]

    def rooms(self, lengths: Sequence[int]) -> list[Tensor]:
        """Memory for the bytes of pieces of so many values."""
        sizes = [self.size(length) for length in lengths]
        padded = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
        whole = torch.empty(sum(padded), dtype=torch.uint8, device=self.coder.device)
        rooms = cut(whole, padded)
        return [room[:size] for room, size in zip(rooms, sizes, strict=True)]

    def encode(self, x: Tensor, wire: Tensor) -> None:
        """Fills `wire` from x and the residual, of which the new one is what is left out.

        Raises:
            CodecError: a value is no number, or too large for the codec.
        """
        if len(x) == 0:
            return
        self.mark("encode")
        if self.residual is not None:
            x = self.residual.add_(x)
        self.coder.encode(x, wire)
        if not bool(torch.isfinite(self.coder.peak(wire, len(x)))):
            raise self._fault(x)
        if self.residual is not None:
            self.coder.add(wire, self.residual, sign=-1)

    def add(self, wire: Tensor, out: Tensor) -> None:
        """Adds what `wire` holds to `out`."""
        if len(out):
            self.mark("reduce")
            self.coder.add(wire, out)

    def decode(self, wire: Tensor, out: Tensor) -> None:
        """Fills `out` with what `wire` holds."""
        if len(out):
            self.mark("decode")
            self.coder.decode(wire, out)

    def _fault(self, x: Tensor) -> CodecError:
        name = self.coder.codec.name
        worst = x.abs().max().item()
        if not math.isfinite(worst):
            bad = int((~torch.isfinite(x)).sum())
            said = f"{bad} of {len(x)} values to be encoded are NaN or infinite"
        else:
            most = _HOLDS.get(name, torch.finfo(torch.float32).max)
            said = f"holds magnitudes up to {most:.5g}, and got {worst:.5g}"
            said += "; bf16 and int8 hold larger ones" if name == "fp16" else ""
        return CodecError(f"codec {name!r} in {self.what}: {said}")
