"""The workspace of kernels while they run, as torch's own allocator sees it.

What convolutions take beside their tensors belongs to the device, its instruction set and its
libraries. A machine that has measured a layer's shape knows it. Of others it is taken to be that of
one CPU with AVX2 and oneDNN 3, with a band: no less than nothing, and no more than was ever seen.
That CPU lays images and weights out in blocks of channels first. With x, w, y the sizes of input,
weight and output, and dx, dw their gradients, it takes beside what is given:

    forward          x + w + y in blocks; then y in blocks
    backward         y + w + x in blocks; then dx in blocks, twice where strided
                     y + x in blocks, and dw, which is then copied into its own layout
      large kernel   instead of y and x: one image unfolded, four times dw to add up in

A kernel is large where it is wider than 13 or higher than the image. Images of at most 3
channels are read as they are. In fp64 and bf16 torch unfolds all images beside the result
instead.

On a GPU the gradient of a linear layer's bias is a sum over rows, to which many blocks of threads
add: each writes its part, where rows are many. Without a machine that has measured it, it is taken
to be nothing, with a band.

A random mask is three int64 numbers for each element of the activation while it is drawn.

Source: oneDNN 3's AVX2 convolutions (jit_avx2_conv_kernel_f32, gemm_convolution) and torch's
slow_conv2d, and for sums on GPUs torch's Reduce.cuh; checked against the allocator's events.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.plan.graph.graph import Layer
from workbench.plan.machine.machine import Machine
from workbench.plan.machine.work import Needed, PlacedLayers, takes_workspace, works_of
from workbench.program.rows import Counts, Rows

_FEW_CHANNELS = 4
_FEW_ROWS = 16
_REDUCERS, _GROUPED_REDUCERS = 4, 256
_BLOCK = 16  # channels
_WIDEST = 13
_MASK_BYTES = 24
_GPU_THREADS = 160 * 2048  # of no GPU that was seen are there more
_FP32 = 4


AtMost = tuple[Counts | None, Counts | None, Counts | None, Counts | None]


@dataclass(frozen=True)
class Workspace:
    """Bytes of workspace on each rank [ranks], at moments of one layer; None: nothing.

    Attributes:
        forward: bytes before its output is made.
        beside_output: bytes once its output is made.
        backward: bytes before the gradient of its input is made.
        beside_gradient: bytes once the gradient of its input is made.
        of_weight: bytes while its weights' gradients are computed, these included.
        beside_weights: bytes once the gradients of its weights are made.
        at_most: the most bytes of `beside_output`, `beside_gradient`, `of_weight` and
            `beside_weights` on any device, where they were not measured; None: they are known.
    """

    forward: Counts | None = None
    beside_output: Counts | None = None
    backward: Counts | None = None
    beside_gradient: Counts | None = None
    of_weight: Counts | None = None
    beside_weights: Counts | None = None
    at_most: AtMost = (None, None, None, None)


NO_WORKSPACE = Workspace()


class Sizes(NamedTuple):
    """The sizes of a convolution's tensors.

    Attributes:
        x: bytes of the local input [ranks].
        w: bytes of the local weight [ranks].
        y: bytes of the local output [ranks].
        itemsize: the bytes of an element.
    """

    x: Counts
    w: Counts
    y: Counts
    itemsize: int


class Workspaces:
    """The workspace of convolutions and linear layers on the devices of some ranks.

    Args:
        machine: the machine with these devices; None: they are not known.
        ranks: the numbers of the ranks in the world of the machine.
    """

    def __init__(self, machine: Machine | None, ranks: Sequence[int], precision: str) -> None:
        self._precision = precision
        self._devices = () if machine is None else tuple(map(machine.device, ranks))
        self._measured = any(device.workspaces for device in self._devices)

    def of_convolution(
        self, plan: PlacedLayers, layer: Layer, rows: Rows, sizes: Sizes
    ) -> Workspace:
        """The workspace of a convolution.

        Args:
            layer: the convolution, of kind "conv2d".
        """
        needed = self._needed(plan, layer, rows)
        if needed is None:
            over = rows.over(plan.flow.inputs[layer.name].group_size)
            return _on_one_cpu(layer, over, sizes)
        forward, of_input, of_weight = np.array(needed, dtype=np.int64).T
        return Workspace(
            beside_output=forward,
            beside_gradient=of_input,
            of_weight=None if layer.keeps_weight else of_weight + sizes.w,
        )

    def of_linear(
        self, plan: PlacedLayers, layer: Layer, rows: Rows, elements: Counts
    ) -> Workspace:
        """The workspace of a linear layer, which takes some on GPUs, where its bias is trained.

        Args:
            layer: the layer, of kind "linear".
            elements: the elements of its output [ranks].
        """
        on_gpu = np.array([takes_workspace(layer, device.kind) for device in self._devices])
        if not on_gpu.any():
            return NO_WORKSPACE
        needed = self._needed(plan, layer, rows)
        if needed is None:
            parts = _parts_at_most(elements) * on_gpu
            return Workspace(beside_weights=0 * parts, at_most=(None, None, None, parts))
        forward, of_input, of_weights = np.array(needed, dtype=np.int64).T
        return Workspace(beside_output=forward, beside_gradient=of_input, beside_weights=of_weights)

    def _needed(self, plan: PlacedLayers, layer: Layer, rows: Rows) -> list[Needed] | None:
        """What the devices have measured [ranks]; None: one of them has not."""
        if not self._measured:
            return None
        works = works_of(plan, layer, rows.own.tolist(), self._precision)
        found = [
            device.workspace(work) if takes_workspace(layer, device.kind) else Needed(0, 0, 0)
            for device, work in zip(self._devices, works, strict=True)
        ]
        known = [needed for needed in found if needed is not None]
        return known if len(known) == len(found) else None


def _on_one_cpu(layer: Layer, rows: Counts, sizes: Sizes) -> Workspace:
    """The workspace that one CPU takes, and the most that was seen on any.

    Args:
        rows: the rows that each rank passes to it [ranks].
    """
    x, w, y, itemsize = sizes
    kernel = layer.weights[0].shape[2:] if layer.weights else (1, 1)
    image, given = layer.input_shape[-2:], layer.output_shape[-2:]
    strided = given[-1] * 2 <= image[-1] + 1 and image[-1] > 1
    pointwise = kernel == (1, 1) and not strided
    unfolded = x // max(math.prod(image), 1) * math.prod(kernel) * math.prod(given)
    if itemsize != _FP32:
        columns = unfolded * (0 if pointwise else 1)
        forward, of_input, of_weight = columns, 0 * columns, columns + w
    else:
        blocked = x * (0 if layer.input_shape[0] < _FEW_CHANNELS else 1)
        beside = y + blocked
        if kernel[0] > image[0] or kernel[1] > _WIDEST:
            beside = unfolded // np.maximum(rows, 1) + _REDUCERS * w
        forward = np.maximum(blocked + w, y)
        of_input = np.maximum(y + w, x * (2 if strided else 1))
        of_weight = w + np.maximum(beside, w)
        if pointwise:  # with few rows torch multiplies matrices itself
            several = rows >= _FEW_ROWS
            forward, of_input = forward * several, of_input * several
            of_weight = np.where(several, of_weight, w)
    return Workspace(
        beside_output=forward,
        beside_gradient=of_input,
        of_weight=None if layer.keeps_weight else of_weight,
        at_most=_at_most(layer, rows, sizes, unfolded),
    )


def _at_most(layer: Layer, rows: Counts, sizes: Sizes, unfolded: Counts) -> AtMost:
    """The most bytes of `Workspace.at_most` that any device was seen to take.

    These are all tensors in blocks of channels, twice, and images unfolded; for the gradient of the
    weight, it is added up in several copies: in many, where filters have groups.
    """
    x, w, y, itemsize = sizes
    read, given = layer.input_shape[0], layer.output_shape[0]
    groups = layer.groups if read > layer.groups else 1  # depthwise ones are blocked together
    of_x, of_y = (-(-n // (groups * _BLOCK)) * groups * _BLOCK / n for n in (read, given))
    blocks = (x * of_x + y * of_y + w * (of_x * of_y)).astype(np.int64)
    images = unfolded if itemsize != _FP32 else unfolded // np.maximum(rows, 1)
    copies = _GROUPED_REDUCERS if layer.groups > 1 else _REDUCERS
    either = 2 * blocks + images
    wide = max(1, _FP32 // itemsize)  # half precision is added up in fp32
    return either, either, wide * (blocks + images + (1 + copies) * w), None


def _parts_at_most(elements: Counts) -> Counts:
    """The most bytes that any GPU takes to add up a gradient of so many elements [ranks] over rows.

    Each thread writes its part, in fp32: of 16 elements or more, as long as there are no more
    threads than the GPU can hold, and of 256 at most.
    """
    return np.maximum(np.minimum(elements * 8, _GPU_THREADS * 512), elements // 2)


def mask(elements: Counts) -> Workspace:
    """The workspace of drawing a mask for so many elements [ranks]."""
    return Workspace(forward=elements * _MASK_BYTES)


def dropped_weights(scores: Counts, elements: Counts, width: int) -> Workspace:
    """The workspace of attention that is computed step by step, to drop some of its weights.

    While the mask is drawn, there are the weights, the same with those that are masked set to 0,
    memory for the mask, and query and key, scaled; of halves query, key and value in fp32, too.

    Args:
        scores: the elements of all scores [ranks].
        elements: the elements of the output [ranks].
        width: the bytes of an element of the output.
    """
    wide, copies = max(width, _FP32), 3 if width < _FP32 else 0
    taken = scores * (_MASK_BYTES + 3 * wide) + elements * (2 * wide + copies * _FP32)
    return Workspace(forward=taken)


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
