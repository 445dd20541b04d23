"""The placement rules: the layouts that each kind of layer can have; schemes are in `schemes.py`.

    kind                                   reads and keeps
    conv2d, linear, embedding, attention   the layouts of its scheme
    batch_norm, pool                       ROWS, R, S over channels
    elementwise, dropout, stochastic_depth ROWS, R, S along any dimension
    flatten                                ROWS, R, S over channels (channel-major: sizes scale)
    add, mul                               two equal layouts out of ROWS, R, S
    layer_norm, op                         ROWS; R where every input is R over the same group
    op with propagations                   S also, where trying it has shown so: attention by heads
    parameter, size                        independent of the batch: ROWS

An unknown operation is never split by itself: each rank runs it on complete samples. A scheme of a
person's own may split it.
"""

from workbench.plan.graph import Layer
from workbench.plan.placement.layout import ROWS, Layout
from workbench.plan.placement.placement import Partial, Replicate, Shard
from workbench.plan.placement.propagated import given, way_of

SPLITTABLE = ("conv2d", "linear", "embedding", "attention")
# One tensor in, one out, the layout kept; backward is linear in the gradient, so that
# summands of a gradient may pass through before they are summed.
UNARY = ("elementwise", "dropout", "stochastic_depth", "pool", "flatten")
CARRIES_PARTIAL = (*UNARY, "add", "mul")


def feature_dim(shape: tuple[int, ...], kind: str) -> int:
    """The dimension of the features: channels of images, the last one of what has tokens."""
    return len(shape) if kind in ("linear", "embedding") else 1


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
            if layer.propagations:
                return way_of(layer, layout) is not None
            return layer.kind in ("elementwise", "dropout", "stochastic_depth", "add", "mul")


def joins(layer: Layer) -> bool:
    """Whether a layer concatenates the features of several others."""
    return layer.target.endswith("cat")


def after(layer: Layer, layout: Layout) -> Layout:
    """The output's layout of a layer that keeps its input's."""
    if layer.kind == "size":
        return ROWS
    if layer.kind == "flatten" and isinstance(layout.placement, Shard):
        factor = layer.output_shape[0] // layer.input_shape[0]
        return Layout(layout.group_size, layout.placement.scaled(factor))
    return given(layer, layout) or layout


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
