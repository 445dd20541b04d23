"""The placement rules: the schemes and layouts that each kind of layer can have.

    kind                                   reads and keeps
    conv2d, linear, attention              the layouts of its scheme
    batch_norm, pool                       ROWS, R, S over channels
    elementwise, dropout, stochastic_depth ROWS, R, S along any dimension
    flatten                                ROWS, R, S over channels (channel-major: sizes scale)
    add, mul                               two equal layouts out of ROWS, R, S
    layer_norm, op                         ROWS; R where every input is R over the same group
    parameter, size                        independent of the batch: ROWS

    scheme         of               input        weight               output
    replicate      all              ROWS         whole                ROWS
    shard_out      conv2d, linear   R            S(0)                 S over features
    shard_in       conv2d, linear   S features   S(1)                 P
    shard_heads    attention        R            whole heads of all   P
    duplicate      all              R            whole                R

An unknown operation is never split: each rank runs it on complete samples.
"""

from workbench.plan.graph import Layer
from workbench.plan.placement.layout import ROWS, Layout
from workbench.plan.placement.placement import Partial, Replicate, Shard

SCHEMES = ("replicate", "shard_out", "shard_in", "shard_heads", "duplicate")
SPLITTABLE = ("conv2d", "linear", "attention")
# Schemes with replicated input and local weights: gradients of the input are partial sums.
SUMMED_BACK = ("shard_out", "shard_heads")

# One tensor in, one out, the layout kept; backward is linear in the gradient, so that
# summands of a gradient may pass through before they are summed.
UNARY = ("elementwise", "dropout", "stochastic_depth", "pool", "flatten")
CARRIES_PARTIAL = (*UNARY, "add", "mul")


def schemes_of(layer: Layer) -> tuple[str, ...]:
    """The schemes that a layer can have; empty where it follows its input."""
    if layer.kind not in SPLITTABLE:
        return ()
    if layer.kind == "attention":
        return ("replicate", "shard_heads", "duplicate")
    if layer.groups > 1:
        return ("replicate", "shard_out", "duplicate")
    return tuple(scheme for scheme in SCHEMES if scheme != "shard_heads")


def feature_dim(shape: tuple[int, ...], kind: str) -> int:
    """The dimension of the features: channels of images, the last one for linear layers."""
    return len(shape) if kind == "linear" else 1


def can_keep(layer: Layer, layout: Layout) -> bool:
    """Whether a layer that follows its input can read this layout and pass it on."""
    match layout.placement:
        case Partial():
            return False
        case Replicate():
            return True
        case Shard(dim=dim):
            if layer.kind in ("batch_norm", "pool", "flatten"):
                return dim == 1
            return layer.kind in ("elementwise", "dropout", "stochastic_depth", "add", "mul")


def joins(layer: Layer) -> bool:
    """Whether a layer concatenates the features of several others."""
    return layer.target.endswith("cat")


def after(layer: Layer, layout: Layout) -> Layout:
    """The output's layout of a layer that keeps its input's."""
    if layer.kind == "flatten" and isinstance(layout.placement, Shard):
        factor = layer.output_shape[0] // layer.input_shape[0]
        return Layout(layout.group_size, layout.placement.scaled(factor))
    return layout


def before(layer: Layer, layout: Layout) -> Layout:
    """The layout of the input that gives this output, where there is one; else ROWS."""
    if layer.kind == "flatten" and isinstance(layout.placement, Shard):
        factor = layer.output_shape[0] // layer.input_shape[0]
        sizes = layout.placement.sizes
        if any(size % factor for size in sizes):
            return ROWS
        cut = Shard(1, tuple(size // factor for size in sizes))
        return Layout(layout.group_size, cut)
    if layer.kind in UNARY and can_keep(layer, layout):
        return layout
    return ROWS
