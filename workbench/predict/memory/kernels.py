"""The workspace of kernels while they run, as torch's own allocator sees it on CPUs.

oneDNN, which computes convolutions in fp32, lays images and weights out in blocks of channels
first. With x, w, y the sizes of input, weight and output, and dx, dw their gradients:

    forward          x + w + y in blocks; then y in blocks beside y
    backward         y + w + x in blocks; then dx in blocks beside dx, twice where strided
                     y + x in blocks, and dw, beside dx; dw is then copied into its own layout
      large kernel   instead of y and x: one image unfolded, four times dw to add up in

A kernel is large where it is wider than 13 or higher than the image. Images of at most 3
channels are read as they are. In fp64 and bf16 torch unfolds all images beside the result
instead.

A random mask is three int64 numbers for each element of the activation while it is drawn.

Source: oneDNN 3's AVX2 convolutions (jit_avx2_conv_kernel_f32, gemm_convolution) and torch's
slow_conv2d, checked against the allocator's events; other instruction sets may differ.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workbench.plan.graph import Layer
from workbench.program.rows import Counts

_FEW_CHANNELS = 4
_FEW_ROWS = 16
_REDUCERS = 4
_WIDEST = 13
_MASK_BYTES = 24


@dataclass(frozen=True)
class Workspace:
    """Bytes of workspace on each rank [ranks], at moments of one layer; None: nothing.

    Attributes:
        forward: bytes before its output is made.
        beside_output: bytes once its output is made.
        backward: bytes before the gradient of its input is made.
        beside_gradient: bytes once the gradient of its input is made.
        of_weight: bytes while its weight's gradient is computed, that gradient included.
        copies_weight: whether that gradient is then copied before autograd takes it.
    """

    forward: Counts | None = None
    beside_output: Counts | None = None
    backward: Counts | None = None
    beside_gradient: Counts | None = None
    of_weight: Counts | None = None
    copies_weight: bool = False


def convolution(
    layer: Layer, x: Counts, w: Counts, y: Counts, rows: Counts, itemsize: int
) -> Workspace:
    """The workspace of a convolution.

    Args:
        layer: the convolution, of kind "conv2d".
        x: bytes of the local input [ranks].
        w: bytes of the local weight [ranks].
        y: bytes of the local output [ranks].
        rows: the rows that each rank passes to it [ranks].
        itemsize: the bytes of an element.
    """
    kernel = layer.weights[0].shape[2:] if layer.weights else (1, 1)
    image, given = layer.input_shape[-2:], layer.output_shape[-2:]
    strided = given[-1] * 2 <= image[-1] + 1 and image[-1] > 1
    pointwise = kernel == (1, 1) and not strided
    unfolded = x // max(math.prod(image), 1) * math.prod(kernel) * math.prod(given)
    if itemsize != 4:
        columns = unfolded * (0 if pointwise else 1)
        of_weight = None if layer.keeps_weight else columns + w
        return Workspace(beside_output=columns, of_weight=of_weight)
    blocked = x * (0 if layer.input_shape[0] < _FEW_CHANNELS else 1)
    of_weight = y + blocked + w
    if kernel[0] > image[0] or kernel[1] > _WIDEST:
        of_weight = unfolded // np.maximum(rows, 1) + (_REDUCERS + 1) * w
    spaces = [blocked + w + y, y, y + w + x, x * (2 if strided else 1), of_weight]
    if pointwise:  # with few rows torch multiplies matrices itself
        spaces = [space * (rows >= _FEW_ROWS) for space in spaces]
    forward, beside_output, backward, beside_gradient, of_weight = spaces
    if layer.keeps_weight:
        return Workspace(forward, beside_output, backward, beside_gradient)
    return Workspace(
        forward, beside_output, backward, beside_gradient, of_weight, copies_weight=True
    )


def mask(elements: Counts) -> Workspace:
    """The workspace of drawing a mask for so many elements [ranks]."""
    return Workspace(forward=elements * _MASK_BYTES)


def attention(size: Counts, heads: npt.NDArray[np.float64] | None) -> Workspace:
    """The workspace of multi-head attention, which as a whole transposes its input and output.

    Args:
        size: bytes of the output on each rank [ranks].
        heads: the fraction of all heads that each rank has [ranks]; None: attention is not sharded.
    """
    if heads is None:
        return Workspace(forward=3 * size, backward=5 * size)
    own = (3 * heads * size).astype(np.int64)
    return Workspace(forward=own, backward=own)
