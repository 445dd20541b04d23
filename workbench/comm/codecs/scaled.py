"""Whole multiples of a scale: uniform quantisation, a scale for each chunk.

    [fp32 scale of each chunk] [int8 of each value, or two of 4 bits in each byte]

A chunk's scale is its largest magnitude divided by the largest multiple, so that nothing is cut
off, and no value is off by more than half a scale.

Source: Q of Pipe-SGD (Li et al. 2018, arXiv:1811.03619), whose chunk is a ring's segment. Chunks of
any size, and 4 bits, are ours.
"""

from collections.abc import Iterator
from math import ceil

import torch
from torch import Tensor

from workbench.comm.codecs.coder import BLOCK, Coder

_SCALE_BYTES = 4


class Int8(Coder):
    """Multiples from -127 to 127."""

    most = 127

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

    def peak(self, wire: Tensor, length: int) -> Tensor:
        scales = self._scales(wire, length)
        return scales.max() if length else scales.new_zeros(())

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
        """Equal chunks that are coded together, and their values; a shorter last one by itself."""
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
        """The multiples as they travel."""
        return wire[self._scale_bytes(length) :].view(torch.int8)

    def _room_for_multiples(self, wire: Tensor, length: int) -> Tensor:
        """Where `encode` puts a multiple for each value."""
        return self._packed(wire, length)

    def _store(self, multiples: Tensor, wire: Tensor) -> None:
        """Puts them where they travel."""

    def _load(self, wire: Tensor, length: int) -> Tensor:
        """The inverse of `_store`."""
        return self._packed(wire, length)


class Int4(Int8):
    """Multiples from -7 to 7: the first half of the values in the low bits, the second above."""

    most = 7

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
