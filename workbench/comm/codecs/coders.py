"""What codecs do to flat tensors: the base class of all, a person's own included; built-in ones.

Those are shorter floating-point types, quantisation, and top-k.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import ceil
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from workbench.plan.collective.codec import AnyCodec, Codec, CodecName, OwnCodec
from workbench.plan.extension.extension import Extension, extension_of


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
            wire: the bytes that `encode` has made of them.
        """
        decoded = torch.empty_like(x)
        self.decode(wire, decoded)
        return torch.maximum(x.abs().max(), decoded.abs().max())


# Values are coded so many at a time on a CPU: with their scratch they take 1 MiB of its cache. With
# a quarter of that, calls into torch take as long as what they do.
BLOCK = 2**17


class BlockCoder(Coder):
    """A built-in codec, whose values are coded in blocks with scratch memory between.

    Everything is computed in fp32; of fp64, what fp32 holds is encoded. One thread at a time.
    """

    def __init__(self, codec: Codec, device: torch.device) -> None:
        self.codec, self.device = codec, device
        self.name, self.inexact = codec.name, codec.inexact
        self.error_feedback = codec.error_feedback
        self._scratch: dict[torch.dtype, Tensor] = {}

    def encoded_bytes(self, length: int) -> int:
        return self.codec.encoded_bytes(length)

    def scratch(self, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns memory [length], until somebody asks for some of this dtype again."""
        held = self._scratch.get(dtype)
        if held is None or len(held) < length:
            held = self._scratch[dtype] = torch.empty(length, dtype=dtype, device=self.device)
        return held[:length]

    def blocks(self, length: int) -> Iterator[slice]:
        """Yields consecutive parts of `length` values: one on a GPU, whose kernels want much."""
        step = BLOCK if self.device.type == "cpu" else max(1, length)
        for start in range(0, length, step):
            yield slice(start, min(start + step, length))


class Cast(BlockCoder):
    """A shorter floating-point type: rounds to its nearest value, to the even one of two."""

    def __init__(self, codec: Codec, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(codec, device)
        self._dtype, self.error = dtype, torch.finfo(dtype).eps / 2

    def encode(self, x: Tensor, wire: Tensor) -> None:
        short = wire.view(self._dtype)
        for block in self.blocks(len(x)):
            self._shorten(x[block], short[block])

    def peak(self, x: Tensor, wire: Tensor) -> Tensor:
        short, found = wire.view(self._dtype), wire.new_zeros((), dtype=self._dtype)
        for block in self.blocks(len(x)):
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
        self.error = torch.finfo(torch.bfloat16).eps

    def _shorten(self, x: Tensor, short: Tensor) -> None:
        if x.dtype != torch.float32:
            x = self.scratch(len(x)).copy_(x)
        room = self.scratch(len(x), torch.int32)
        short.view(torch.int16).copy_(torch.bitwise_right_shift(x.view(torch.int32), 16, out=room))


_SCALE_BYTES = 4


class Int8(BlockCoder):
    """Uniform quantisation: whole multiples, from -127 to 127, of a scale for each chunk.

        [fp32 scale of each chunk] [int8 of each value, or two of 4 bits in each byte]

    A chunk's scale is its largest magnitude divided by the largest multiple, so that nothing is
    cut off, and no value is off by more than half a scale.

    Source: Q of Pipe-SGD (Li et al. 2018, arXiv:1811.03619), whose chunk is a ring's segment.
    Chunks of any size, and 4 bits, are ours.
    """

    most, error = 127, 0.5 / 127

    def encode(self, x: Tensor, wire: Tensor) -> None:
        scales = self._scales(wire, len(x))
        multiples = self._room_for_multiples(wire, len(x))
        for chunks, values in self._tiles(len(x)):
            part, scale = x[values], scales[chunks]
            if part.dtype != torch.float32:
                part = self.scratch(len(part)).copy_(part)
            rows = part.view(len(scale), -1)
            torch.amax(rows, 1, out=scale)
            torch.maximum(scale, torch.amin(rows, 1).neg_(), out=scale)
            scale.div_(self.most)
            # A chunk of zeros, or of magnitudes near the smallest of fp32, becomes zeros.
            inverse = torch.reciprocal(scale).nan_to_num_(nan=0.0, posinf=0.0)
            room = self.scratch(len(part)).view_as(rows)
            torch.mul(rows, inverse[:, None], out=room).round_()
            multiples[values].view_as(rows).copy_(room)
        self._store(multiples, wire)

    def peak(self, x: Tensor, wire: Tensor) -> Tensor:
        return self._scales(wire, len(x)).max() * self.most

    def add(self, wire: Tensor, out: Tensor, sign: int = 1) -> None:
        scales, multiples = self._scales(wire, len(out)), self._load(wire, len(out))
        for chunks, values in self._tiles(len(out)):
            scale = scales[chunks]
            rows = multiples[values].view(len(scale), -1)
            room = self.scratch(rows.numel()).view_as(rows)
            out[values].view_as(rows).add_(torch.mul(rows, scale[:, None], out=room), alpha=sign)

    def decode(self, wire: Tensor, out: Tensor) -> None:
        scales, multiples = self._scales(wire, len(out)), self._load(wire, len(out))
        for chunks, values in self._tiles(len(out)):
            scale = scales[chunks]
            rows = multiples[values].view(len(scale), -1)
            torch.mul(rows, scale[:, None], out=out[values].view_as(rows))

    def _tiles(self, length: int) -> Iterator[tuple[slice, slice]]:
        """Yields (chunks that are coded together, their values); a shorter last chunk by itself."""
        chunk = self.codec.chunk
        whole = length // chunk
        step = max(1, BLOCK // chunk) if self.device.type == "cpu" else max(1, whole)
        for first in range(0, whole, step):
            last = min(first + step, whole)
            yield slice(first, last), slice(first * chunk, last * chunk)
        if whole * chunk < length:
            yield slice(whole, whole + 1), slice(whole * chunk, length)

    def _scales(self, wire: Tensor, length: int) -> Tensor:
        return wire[: self._scale_bytes(length)].view(torch.float32)

    def _scale_bytes(self, length: int) -> int:
        return _SCALE_BYTES * ceil(length / self.codec.chunk)

    def _packed(self, wire: Tensor, length: int) -> Tensor:
        """Returns the multiples as they travel."""
        return wire[self._scale_bytes(length) :].view(torch.int8)

    def _room_for_multiples(self, wire: Tensor, length: int) -> Tensor:
        """Returns where `encode` puts a multiple for each value [length]."""
        return self._packed(wire, length)

    def _store(self, multiples: Tensor, wire: Tensor) -> None:
        """Puts the multiples where they travel."""

    def _load(self, wire: Tensor, length: int) -> Tensor:
        """Returns the multiples [length] that were stored; the inverse of `_store`."""
        return self._packed(wire, length)


class Int4(Int8):
    """As `Int8`, of 4 bits, from -7 to 7: the first half of the values in the low bits."""

    most, error = 7, 0.5 / 7

    def _room_for_multiples(self, wire: Tensor, length: int) -> Tensor:
        return self.scratch(length, torch.int8)

    def _store(self, multiples: Tensor, wire: Tensor) -> None:
        length = len(multiples)
        packed, half = self._packed(wire, length), ceil(length / 2)
        torch.bitwise_and(multiples[:half], 0xF, out=packed)
        packed[: length - half].bitwise_or_(multiples[half:].bitwise_left_shift_(4))

    def _load(self, wire: Tensor, length: int) -> Tensor:
        multiples, packed, half = self.scratch(length, torch.int8), self._packed(wire, length), 0
        half = ceil(length / 2)
        # Shifting back brings the sign along.
        torch.bitwise_left_shift(packed, 4, out=multiples[:half]).bitwise_right_shift_(4)
        torch.bitwise_right_shift(packed[: length - half], 4, out=multiples[half:])
        return multiples


# On a CPU, where to select among all is slow, so many of them say about where to begin.
_SAMPLES = 2**14


class TopK(BlockCoder):
    """The largest magnitudes and where they are: fp32 values, then int32 indices in rising order.

    Everything else becomes zero, so this codec wants error feedback.

    Source: sparsified gradients of Aji and Heafield 2017 (arXiv:1704.05021), whose threshold is
    global; here every piece that is encoded keeps its own share.
    """

    def encode(self, x: Tensor, wire: Tensor) -> None:
        values, indices = self._parts(wire)
        found = _largest(x.abs(), len(values)).sort().values
        indices.copy_(found)
        values.copy_(x[found])

    def peak(self, x: Tensor, wire: Tensor) -> Tensor:
        values, _ = self._parts(wire)
        return values.abs().max()

    def add(self, wire: Tensor, out: Tensor, sign: int = 1) -> None:
        values, indices = self._parts(wire)
        out.index_add_(0, indices, values.to(out.dtype), alpha=sign)

    def decode(self, wire: Tensor, out: Tensor) -> None:
        out.zero_()
        self.add(wire, out)

    def _parts(self, wire: Tensor) -> tuple[Tensor, Tensor]:
        half = len(wire) // 2
        return wire[:half].view(torch.float32), wire[half:].view(torch.int32)


def _largest(magnitudes: Tensor, count: int) -> Tensor:
    """Returns the indices of the `count` largest; NaN is larger than all."""
    length = len(magnitudes)
    if magnitudes.device.type == "cpu" and length >= 4 * _SAMPLES:
        sample = magnitudes[:: length // _SAMPLES]
        expected = count * len(sample) / length
        rank = min(len(sample), math.ceil(expected + 4 * math.sqrt(expected) + 4))
        threshold = sample.topk(rank).values[-1]
        candidates = magnitudes.lt(threshold).logical_not_().nonzero().view(-1)
        if len(candidates) >= count:  # else the sample was not like the rest
            return candidates[magnitudes[candidates].topk(count, sorted=False).indices]
    return magnitudes.topk(count, sorted=False).indices


_CODERS: Mapping[CodecName, Callable[[Codec, torch.device], BlockCoder]] = MappingProxyType(
    {
        "fp16": partial(Cast, dtype=torch.float16),
        "bf16": partial(Cast, dtype=torch.bfloat16),
        "bf16_truncated": Chop,
        "int8": Int8,
        "int4": Int4,
        "top_k": TopK,
    }
)


def coder_of(codec: AnyCodec, device: torch.device) -> Coder:
    """Returns the coder that does on tensors of a device what a codec says.

    Raises:
        OwnObjectError: a codec of a person's own cannot be loaded, or is none.
    """
    if isinstance(codec, OwnCodec):
        found: Coder = extension_of(codec.own, "codecs")
        return found
    return _CODERS[codec.name](codec, device)
