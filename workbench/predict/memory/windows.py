"""Attention inside shifted windows (Swin, versions 1 and 2): what it keeps, and what it needs.

Of an activation of n elements, of which a rank has the share s of the heads; images are padded to
whole windows of T tokens, which makes them p times as large, and scores are T heads / features of
that. Kept from the forward pass to the backward pass:

    the image in windows                                              p n
    query, key, value, and what is read of the values, each apart     4 p s n
    softmax of the scores                                             scores s n
    version 2: query, key and value as they were, for their norms     3 p s n
               cosines, for the gradient of their scale               scores s n
               hidden layer of the table of positions                 offsets times hidden

Whether windows are shifted no graph says; they are taken to be, which is so in every other layer,
and costs one more copy of the scores in the forward pass, while nothing more is kept.

Source: `torch.autograd`, on the operations of `torchvision.models.swin_transformer` as
`workbench/layers/window_attention.py` has them.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workbench.plan.graph import Layer
from workbench.predict.memory.kernels import Workspace
from workbench.program.rows import Counts

_NAMES = ("shiftedwindowattention", "shiftedwindowattentionv2")


@dataclass(frozen=True)
class Windows:
    """Sizes, each for one element of the activation.

    Attributes:
        padded: elements of the padded image.
        many: whether there are several windows; else nothing is shifted.
        scores: elements of all heads' scores.
        second: whether it is version 2.
        table: elements of version 2's hidden layer of offsets, however many rows there are.
    """

    padded: float
    many: bool
    scores: float
    second: bool
    table: int

    @classmethod
    def of(cls, layer: Layer) -> "Windows | None":
        """Of an attention layer; None: not in windows."""
        if layer.target.rpartition(".")[2].lower() not in _NAMES:
            return None
        shapes = {
            weight.name.removeprefix(f"{layer.name}."): weight.shape for weight in layer.weights
        }
        tokens = math.isqrt(math.prod(shapes["relative_position_index"]))
        side = math.isqrt(tokens)
        *image, features = layer.input_shape
        count = math.prod(-(-length // side) for length in image)
        padded = count * tokens / math.prod(image)
        hidden = shapes.get("cpb_mlp.0.bias", (0,))[0]
        offsets = (2 * side - 1) ** 2
        scores = padded * tokens * layer.heads / features
        return cls(padded, count > 1, scores, hidden > 0, offsets * hidden)

    @property
    def of_heads(self) -> float:
        """Elements that are kept of what is cut with the heads."""
        return 7 * self.padded + 2 * self.scores if self.second else 4 * self.padded + self.scores

    def workspace(self, size: Counts, share: npt.NDArray[np.float64] | float) -> Workspace:
        """Besides what is kept.

        Args:
            size: bytes of the output.
            share: of the heads.
        """
        copies = 2 if self.many else 1
        mixed = 1 if self.second else 4  # version 2 keeps query, key and value anyhow
        at_end = copies * self.padded + share * (mixed * self.padded + copies * self.scores)
        gradients = share * (2 * self.scores - self.padded) - 1.0
        return Workspace(
            beside_output=(size * at_end).astype(np.int64),
            backward=(size * np.maximum(gradients, 0.0)).astype(np.int64),
        )
