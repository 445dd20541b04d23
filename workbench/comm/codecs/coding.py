"""A codec in one all-reduce: values that it cannot hold are refused, and losses may be kept."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from workbench.comm.codecs.coders import BlockCoder, Coder, coder_of
from workbench.comm.groups.group import Group, GroupCall
from workbench.comm.messages.errors import CodecError
from workbench.comm.messages.flat import accumulator, cut
from workbench.comm.messages.recorder import PhaseMark, unheard
from workbench.plan.collective.codec import AnyCodec, Codec, OwnCodec, as_codec

_HOLDS: Mapping[str, float] = MappingProxyType(
    {"fp16": torch.finfo(torch.float16).max, "bf16": torch.finfo(torch.bfloat16).max}
)
# A piece's bytes begin where any type's may.
_ALIGNED = 16


@dataclass(frozen=True)
class PieceCoding:
    """Encodes the pieces of one all-reduce on one rank.

    Attributes:
        coder: what encodes and decodes.
        device: the device of all tensors.
        residual: what earlier encodings left out of the elements that are coded [elements]; None:
            nobody keeps it.
        what: the collective and the rank, for errors.
        mark: a function that hears what begins: "encode", "decode", or "reduce", which decodes
            and adds.
    """

    coder: Coder
    device: torch.device
    residual: Tensor | None = None
    what: str = ""
    mark: PhaseMark = unheard

    def size(self, length: int) -> int:
        """Returns the bytes of `length` values that are encoded together."""
        return self.coder.encoded_bytes(length) if length else 0

    def cut(self, sizes: Sequence[int]) -> "list[PieceCoding]":
        """Returns the coding of each of consecutive pieces, of these sizes [elements]."""
        if self.residual is None:
            return [self] * len(sizes)
        return [replace(self, residual=piece) for piece in cut(self.residual, sizes)]

    def buffers(self, lengths: Sequence[int]) -> list[Tensor]:
        """Returns memory, uint8 [size(length)], for each piece of `length` values."""
        sizes = [self.size(length) for length in lengths]
        padded = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
        whole = torch.empty(sum(padded), dtype=torch.uint8, device=self.device)
        return [piece[:size] for piece, size in zip(cut(whole, padded), sizes, strict=True)]

    def encode(self, x: Tensor, wire: Tensor) -> None:
        """Encodes x plus the residual; what that leaves out is the new residual.

        Args:
            x: the values [length].
            wire: the bytes [size(length)] that are filled.

        Raises:
            CodecError: a value is NaN or infinite, or too large for the codec.
        """
        if len(x) == 0:
            return
        self.mark("encode")
        if self.residual is not None:
            x = self.residual.add_(x)
        self.coder.encode(x, wire)
        if not bool(torch.isfinite(self.coder.peak(x, wire))):
            raise self._fault(x)
        if self.residual is not None:
            self.coder.add(wire, self.residual, sign=-1)

    def add(self, wire: Tensor, out: Tensor) -> None:
        """Adds what `wire` [size(length)] holds to `out` [length]."""
        if len(out):
            self.mark("reduce")
            self.coder.add(wire, out)

    def decode(self, wire: Tensor, out: Tensor) -> None:
        """Fills `out` [length] with what `wire` [size(length)] holds."""
        if len(out):
            self.mark("decode")
            self.coder.decode(wire, out)

    def _fault(self, x: Tensor) -> CodecError:
        name = self.coder.name
        worst = x.abs().max().item()
        if not math.isfinite(worst):
            bad = int((~torch.isfinite(x)).sum())
            said = f"{bad} of {len(x)} values to be encoded are NaN or infinite"
        elif not isinstance(self.coder, BlockCoder):
            said = f"of finite magnitudes up to {worst:.5g} it decodes some to NaN or infinity"
        else:
            most = _HOLDS.get(name, torch.finfo(torch.float32).max)
            said = f"holds magnitudes up to {most:.5g}, and got {worst:.5g}"
            said += "; bf16 and int8 hold larger ones" if name == "fp16" else ""
        return CodecError(f"codec {name!r} in {self.what}: {said}")


def checked(
    codec: AnyCodec | str | None, x: Tensor, group: Group, residual: Tensor | None
) -> AnyCodec | None:
    """Returns the codec that is meant; refuses what cannot be coded before anybody communicates.

    Args:
        codec: the codec, its name, or None.
        residual: what earlier encodings left out [x.numel()]; None: nothing is kept.

    Raises:
        ValueError: there is no such codec, or x is of a type that codecs do not know, or `residual`
            is not what the codec wants for it.
    """
    if not isinstance(codec, Codec | OwnCodec | str | None):
        raise ValueError(f"codec must be a Codec, a name or None, got {type(codec).__name__}")
    found: AnyCodec | None = as_codec(codec)
    if found is None:
        if residual is not None:
            raise ValueError(
                f"a residual is for a codec with error feedback, and group {group.name} was given "
                "no codec"
            )
        return None
    if not x.is_floating_point():
        raise ValueError(f"codec {found.name!r} is for floating-point tensors, got {x.dtype}")
    if found.error_feedback != (residual is not None):
        does = "needs" if found.error_feedback else "has no use for"
        raise ValueError(
            f"codec {found.name!r} with error_feedback={found.error_feedback} {does} a residual"
        )
    if residual is not None:
        device = x.device if group.link is None else group.link.device
        wanted = ((x.numel(),), accumulator(x.dtype), device.type)
        given = (tuple(residual.shape), residual.dtype, residual.device.type)
        if given != wanted:
            raise ValueError(
                f"the residual of codec {found.name!r} in group {group.name} has (shape, dtype, "
                f"device) {wanted}, got {given}"
            )
    return found


def coding_of(
    codec: AnyCodec | None, call: GroupCall, residual: Tensor | None
) -> PieceCoding | None:
    """Returns what encodes in a call; None where there is no codec, or nothing travels."""
    group = call.group
    if codec is None or group.link is None:
        return None
    what = f"{call}, rank {group.ranks[group.rank]}"
    device = group.link.device
    return PieceCoding(coder_of(codec, device), device, residual, what, call.mark)
