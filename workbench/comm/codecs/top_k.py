"""The largest magnitudes and where they are: fp32 values, then int32 indices in rising order.

Source: sparsified gradients of Aji and Heafield 2017 (arXiv:1704.05021), whose threshold is global;
here every piece that is encoded keeps its own share.
"""

import math

import torch
from torch import Tensor

from workbench.comm.codecs.coder import Coder

# On a CPU, where to select among all is slow, so many of them say about where to begin.
_SAMPLES = 2**14


class TopK(Coder):
    """Everything else becomes zero, so this one wants error feedback."""

    def encode(self, x: Tensor, wire: Tensor) -> None:
        values, indices = self._parts(wire)
        found = _largest(x.abs(), len(values)).sort().values
        indices.copy_(found)
        values.copy_(x[found])

    def peak(self, wire: Tensor, length: int) -> Tensor:
        values, _ = self._parts(wire)
        return values.abs().max() if length else values.new_zeros(())

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
    """Indices of the `count` largest; what is no number is larger than all."""
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
