"""What it takes to add a layer's gradients to those of earlier passes of the same step.

A further gradient is made beside the first one and added to it: three passes over its memory.
The first one was copied into its bucket instead, in two, which layers' times contain; not so that
of a large linear layer, which writes it there, nor one that is in no bucket.

Source: `torch.autograd`'s AccumulateGrad; the workbench's GradientSum and Linear.
"""

import numpy as np

from workbench.plan.graph import Layer
from workbench.predict.time.duration import Seconds, Speeds
from workbench.program.parameters import KEEPS_GRADIENT_BYTES
from workbench.program.rows import Counts
from workbench.program.step import Program

_ADDED, _COPIED = 3, 2


class Additions:
    """Times them.

    Args:
        program: of the kept ranks.
        speeds: of them.
    """

    def __init__(self, program: Program, speeds: Speeds) -> None:
        self.program, self.speeds = program, speeds

    def seconds(self, layer: Layer) -> Seconds:
        """Of one layer's weights, on each rank."""
        found = np.zeros(self.program.plan.world_size)
        for place, weight in enumerate(layer.weights):
            if weight.trainable:
                size = self.program.pieces.sizes[weight.name]
                in_bucket = weight.name in self.program.buckets.names
                found = found + addition(layer, place, size, in_bucket, self.speeds)
        return found


def addition(layer: Layer, place: int, size: Counts, in_bucket: bool, speeds: Speeds) -> Seconds:
    """Seconds to add a further gradient of one weight to the first one, on each rank.

    Args:
        layer: whose weight it is.
        place: of the weight among the layer's.
        size: bytes of it, on each rank.
        in_bucket: whether it travels in a bucket.
        speeds: of the ranks.
    """
    keeps = layer.kind == "linear" and place == 0
    copied = in_bucket & ~(keeps & (size >= KEEPS_GRADIENT_BYTES))
    return speeds.streaming(size * (_ADDED - _COPIED * copied))
