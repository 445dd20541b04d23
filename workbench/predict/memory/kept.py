"""The tensors that autograd saves for each kind of layer, from forward to backward pass.

    kind, operation                     saves
      synchronized                      the centred and the normalized input
      in eval mode                      input
    linear, weight frozen               nothing
    embedding                           input; cut by tokens, their places and which are elsewhere
    layer_norm                          input, mean and deviation of each normalized vector
    dropout, stochastic depth           the mask, scaled
    mul                                 each factor, where the other's gradient is wanted
    add, flatten                        nothing
    attention in windows                see below
    any other, ReLU ...                 what it did when it was traced (`Saved`)

Source: torch's derivatives.yaml; attention as its events show.

Attention in shifted windows (Swin, versions 1 and 2): the tensors it saves, and its workspace.

For an activation of n elements, of which a rank has the fraction s of the heads; images are padded
to whole windows of T tokens, which makes them p times as large, and scores are T heads / features
of that. Saved from the forward pass to the backward pass:

    the image in windows                                              p n
    query, key, value, and the attended values, each separate     4 p s n
    softmax of the scores                                             scores s n
    version 2: query, key and value as they were, for their norms     3 p s n
               cosines, for the gradient of their scale               scores s n
               hidden layer of the table of positions                 offsets times hidden

No graph says whether windows are shifted; they are taken to be, as in every other layer, which
costs one more copy of the scores in the forward pass and saves nothing more.

Source: `torch.autograd`, on the operations of `torchvision.models.swin_transformer` as
`workbench/layers/local/attention.py` has them.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.plan.graph.graph import Layer
from workbench.plan.placement.placement import Partial
from workbench.plan.plans.plan import Plan
from workbench.predict.memory.workspaces import Workspace
from workbench.program.rows import Counts


@dataclass(frozen=True)
class SavedTensors:
    """The tensors that one operation saves for its backward pass.

    Attributes:
        input: whether its inputs are saved.
        output: whether its output is saved.
        view: whether its output is a view of its input, and the gradients likewise.
        passes: whether the gradient of its input is that of its output, in the same memory.
        words: elements of the activation's type for each element of the output.
        of_heads: elements like `words`, of what is sharded with an attention layer's heads.
        wide: elements like `words`, which stay in fp32 where that type is a half.
        bytes: bytes for each element of the output, whatever the activation's type.
        statistics: fp32 numbers for each channel.
        constant: elements of the activation's type, however many rows there are.
    """

    input: bool = False
    output: bool = False
    view: bool = False
    passes: bool = False
    words: float = 0.0
    of_heads: float = 0.0
    wide: float = 0.0
    bytes: float = 0.0
    statistics: int = 0
    constant: int = 0

    def beside(self, width: int, heads: Any = 1.0) -> Any:
        """Bytes for each element of the output of what is neither input nor output.

        Args:
            width: the bytes of an element of the activation.
            heads: the fraction of an attention layer's heads; or of each rank [ranks].
        """
        of_type = (self.words + self.of_heads * heads) * width
        return of_type + self.wide * max(width, _FP32) + self.bytes


_FP32 = 4  # bytes
_PLACED_TOKEN = 9  # bytes: its place in the table, an int64, and whether it is elsewhere

_NAMES = ("shiftedwindowattention", "shiftedwindowattentionv2")


@dataclass(frozen=True)
class Windows:
    """Sizes of an attention layer in windows, relative to one element of the activation.

    Attributes:
        padded: elements of the padded image.
        many: whether there are several windows; a single one is never shifted.
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
        """The sizes of an attention layer; None: it has no windows."""
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
        """Saved elements that are sharded with the heads, relative to one of the activation."""
        return 7 * self.padded + 2 * self.scores if self.second else 4 * self.padded + self.scores

    def workspace(self, size: Counts, share: npt.NDArray[np.float64] | float) -> Workspace:
        """The workspace beside the saved tensors.

        Args:
            size: bytes of the output on each rank [ranks].
            share: the fraction of the heads that each rank has, 0 to 1 [ranks].
        """
        copies = 2 if self.many else 1
        mixed = 1 if self.second else 4  # version 2 saves query, key and value anyway
        at_end = copies * self.padded + share * (mixed * self.padded + copies * self.scores)
        gradients = share * (2 * self.scores - self.padded) - 1.0
        return Workspace(
            beside_output=(size * at_end).astype(np.int64),
            backward=(size * np.maximum(gradients, 0.0)).astype(np.int64),
        )


_NOTHING = SavedTensors()

_INPUT = SavedTensors(input=True)

_BOTH = SavedTensors(input=True, output=True)

_VIEW = SavedTensors(view=True, passes=True)

_PASSED_ON = SavedTensors(passes=True)

_MAX_POOL = SavedTensors(input=True, bytes=8.0)

_BATCH_NORM = SavedTensors(input=True, statistics=2)

_SYNCHRONIZED = SavedTensors(words=2.0)

# Of each head and position, attention also keeps one number in fp32: about one for 64 features.
_ATTENTION = SavedTensors(words=1.0, of_heads=4.0 + 1 / 64)

# The gradient of a sum is that of each summand.
_SUMS = ("add", "sub")


def saved_by(plan: Plan, layer: Layer) -> SavedTensors:
    """The tensors that a layer saves under a plan."""
    name = _name(layer)
    match layer.kind:
        case "linear":
            owner = plan.graph[layer.shared] if layer.shared else layer
            return _NOTHING if owner.keeps_weight else _INPUT
        case "conv2d" | "mul":
            return _INPUT
        case "embedding":
            return _embedding(plan, layer)
        case "batch_norm" if layer.evaluating:
            return _INPUT
        case "batch_norm":
            return _SYNCHRONIZED if plan.synchronizes(layer) else _BATCH_NORM
        case "layer_norm":
            return _layer_norm(layer)
        case "dropout":
            return SavedTensors(words=1.0)
        case "add":
            return _PASSED_ON
        case "flatten":
            return _VIEW
        case "pool":
            return _pool(layer, name)
        case "stochastic_depth":
            return _NOTHING
        case "attention":
            windows = Windows.of(layer)
            if windows is None:
                return _ATTENTION
            return SavedTensors(
                words=windows.padded, of_heads=windows.of_heads, constant=windows.table
            )
        case "op" | "elementwise" if layer.saved is not None:
            wide = drops_weights(layer)
            return SavedTensors(
                input=bool(layer.saved.inputs),
                output=layer.saved.output,
                view=layer.saved.view,
                passes=layer.saved.view or name in _SUMS,
                words=0.0 if wide else layer.saved.words,
                wide=layer.saved.words if wide else 0.0,
                bytes=layer.saved.bytes,
            )
        case _:
            return _BOTH


def drops_weights(layer: Layer) -> bool:
    """Whether it is torch's attention with dropout, which is computed step by step, in fp32."""
    return bool(layer.draws) and _name(layer) == "scaled_dot_product_attention"


def is_guessed(layer: Layer) -> bool:
    """Whether it is unknown what an operation saves, or takes beside that.

    What draws saves in a way of its own. What functions that are not torch's take is not known.
    """
    if layer.kind not in ("op", "elementwise"):
        return False
    where = layer.target.rpartition(".")[0].partition(".")[0]
    is_torchs = where in ("", "torch", "Tensor", "operator")
    return layer.saved is None or bool(layer.draws) or not is_torchs


def _name(layer: Layer) -> str:
    """The bare name of an operation's function, in place or not."""
    return layer.target.rpartition(".")[2].lower().strip("_")


def _layer_norm(layer: Layer) -> SavedTensors:
    return SavedTensors(input=True, bytes=8.0 / max(layer.output_shape[-1], 1))


def _embedding(plan: Plan, layer: Layer) -> SavedTensors:
    if isinstance(plan.flow.outputs[layer.name].placement, Partial):
        return SavedTensors(bytes=_PLACED_TOKEN / layer.output_shape[-1])
    return _INPUT


def _pool(layer: Layer, name: str) -> SavedTensors:
    if "max" in name:
        return _MAX_POOL
    means = "adaptive" in name and layer.output_shape[-2:] == (1, 1)
    repeats = "adaptive" in name and layer.input_shape[-2:] == (1, 1)
    return _NOTHING if means or repeats or name in ("mean", "amax", "amin") else _INPUT
