"""What the kernels of a layer take beside their tensors, as a device's allocator saw it.

It depends on the device and its libraries (instruction set, oneDNN or cuDNN, threads), and not
smoothly on shapes: each layer shape is measured by itself. Between rows it lies on lines.

Convolutions take some on any device, and linear layers whose bias is trained on GPUs: there its
gradient is added up by many blocks of threads, each of which writes its part in fp32.
"""

from bisect import bisect_left
from itertools import pairwise
from typing import NamedTuple, Self

from pydantic import Field, model_validator

from workbench.plan.graph import Layer
from workbench.plan.value import MachineValue


def takes_workspace(layer: Layer, device: str) -> bool:
    """Whether the kernels of a layer take memory beside its tensors.

    Args:
        layer: the layer.
        device: the kind of the device: "cpu" or "cuda".
    """
    if layer.kind == "linear":
        learns = any(weight.trainable and len(weight.shape) == 1 for weight in layer.weights)
        return learns and device == "cuda"
    return layer.kind == "conv2d"


class Needed(NamedTuple):
    """The bytes that the kernels of one layer take beside their tensors, at the peak of each.

    Attributes:
        forward: bytes beside its input, weights and output.
        input_gradient: bytes beside these two gradients: of its output and of its input.
        weight_gradient: bytes beside these, and the gradients of its weights.
    """

    forward: int
    input_gradient: int
    weight_gradient: int


class Workspace(MachineValue):
    """The measured workspace of one layer shape."""

    key: str
    """The key of the layer shape, as in `Work`."""
    precision: str
    """The precision that it was computed in."""
    points: tuple[tuple[int, int, int, int], ...] = Field(min_length=1)
    """(rows, bytes forward, bytes for the gradient of its input, bytes for those of its weights),
    in ascending order of rows."""

    @model_validator(mode="after")
    def _ascends(self) -> Self:
        if any(left[0] >= right[0] for left, right in pairwise(self.points)):
            raise ValueError(f"points must be in ascending order of rows, got {self.points}")
        return self

    def at(self, rows: int) -> Needed | None:
        """The workspace for so many rows, on the line of the nearest two measured numbers.

        Returns:
            The bytes, none without rows; None: they are not known, for so few or many rows.
        """
        points = self.points
        if rows == 0:
            return Needed(0, 0, 0)
        if not points[0][0] <= rows <= points[-1][0]:
            return None
        place = bisect_left(points, (rows,))
        if points[place][0] == rows:
            return Needed(*points[place][1:])
        (left, *before), (right, *behind) = points[place - 1], points[place]
        share = (rows - left) / (right - left)
        return Needed(*(round(a + (b - a) * share) for a, b in zip(before, behind, strict=True)))
