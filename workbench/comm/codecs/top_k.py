"""The largest magnitudes and where they are: fp32 values, then int32 indices in rising order.

Source: sparsified gradients of Aji and Heafield 2017 (arXiv:1704.05021), whose threshold is global;
here every piece that is encoded keeps its own share.
"""

import torch
from torch import Tensor

from workbench.comm.codecs.coder import Coder


class TopK(Coder):
    """Everything else becomes zero, so this one wants error feedback."""

    def encode(self, x: Tensor, wire: Tensor) -> None:
        values, indices = self._parts(wire)
        found = torch.topk(x.abs(), len(values), sorted=False).indices.sort().values
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
