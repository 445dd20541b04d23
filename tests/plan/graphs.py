"""Small graphs, written by hand, for tests that need no torch."""

import math

from workbench.plan.graph.graph import Graph, Input, Layer, Source, Weight
from workbench.plan.graph.saved import Saved

Shape = tuple[int, ...]


class Builder:
    """Adds layers one after the other; each reads the last one unless told otherwise."""

    def __init__(self, input_shape: Shape) -> None:
        self.input_shape = self.shape = input_shape
        self.last = "input"
        self.layers: list[Layer] = []
        self.shapes = {"input": input_shape}

    def add(self, name: str, kind: str, shape: Shape, *inputs: str, **fields: object) -> "Builder":
        read = inputs or (self.last,)
        layer = Layer(name, kind, read, self.shapes[read[0]], shape, node=name, **fields)
        self.layers.append(layer)
        self.last, self.shapes[name] = name, shape
        return self

    def linear(self, name: str, out: int, *inputs: str) -> "Builder":
        shape = self.shapes[(inputs or (self.last,))[0]]
        weights = (Weight(f"{name}.weight", (out, shape[-1])), Weight(f"{name}.bias", (out,)))
        flops = 2 * math.prod(shape) * out
        return self.add(name, "linear", (*shape[:-1], out), *inputs, weights=weights, flops=flops)

    def conv(self, name: str, out: int, *inputs: str, groups: int = 1) -> "Builder":
        channels, *image = self.shapes[(inputs or (self.last,))[0]]
        weight = Weight(f"{name}.weight", (out, channels // groups, 3, 3))
        weights = (weight, Weight(f"{name}.bias", (out,)))
        return self.add(name, "conv2d", (out, *image), *inputs, weights=weights, groups=groups)

    def attention(self, name: str, heads: int) -> "Builder":
        """Self-attention under the names of nn.MultiheadAttention."""
        tokens, e = shape = self.shapes[self.last]
        weights = (
            Weight(f"{name}.in_proj_weight", (3 * e, e)),
            Weight(f"{name}.in_proj_bias", (3 * e,)),
            Weight(f"{name}.out_proj.weight", (e, e)),
            Weight(f"{name}.out_proj.bias", (e,)),
        )
        flops = 8 * tokens * e * e + 4 * tokens * tokens * e
        return self.add(name, "attention", shape, weights=weights, heads=heads, flops=flops)

    def same(self, name: str, kind: str, *inputs: str) -> "Builder":
        saved = Saved(output=True) if kind == "elementwise" else None  # as ReLU does
        return self.add(name, kind, self.shapes[(inputs or (self.last,))[0]], *inputs, saved=saved)

    def norm(self, name: str) -> "Builder":
        c = self.shapes[self.last][0]
        weights = (
            Weight(f"{name}.weight", (c,)),
            Weight(f"{name}.running_mean", (c,), trainable=False),
            Weight(f"{name}.num_batches_tracked", (), "int64", trainable=False),
        )
        return self.add(name, "batch_norm", self.shapes[self.last], weights=weights)

    def graph(self) -> Graph:
        out = self.shapes[self.last]
        source = Source("module", "Toy")
        return Graph(source, (Input(self.input_shape),), out[-1], tuple(self.layers), (self.last,))


def mlp(*features: int) -> Graph:
    """Linear layers `fc0`, `fc1`, ... with ReLU between."""
    first, *rest = features
    builder = Builder((first,))
    for index, out in enumerate(rest):
        if index:
            builder.same(f"relu{index - 1}", "elementwise")
        builder.linear(f"fc{index}", out)
    return builder.graph()


def transformer() -> Graph:
    """Tokens, one block without residuals, a head."""
    builder = Builder((4, 6)).linear("embed", 12).same("norm", "layer_norm")
    builder.attention("attention", 3).same("drop", "dropout").same("norm2", "layer_norm")
    builder.linear("fc0", 48).same("gelu", "elementwise").linear("fc1", 12)
    return builder.add("pick", "op", (12,)).linear("head", 2).graph()


def vgg() -> Graph:
    """A convolution, and a classifier behind a pool that repeats 16 features to 784."""
    builder = Builder((3, 8, 8)).conv("conv", 16).same("relu", "elementwise")
    builder.add("pool", "pool", (16, 1, 1)).add("avgpool", "pool", (16, 7, 7))
    builder.add("flatten", "flatten", (784,)).linear("fc0", 64).same("relu0", "elementwise")
    builder.linear("fc1", 64).same("relu1", "elementwise").same("dropout1", "dropout")
    return builder.linear("fc2", 10).graph()
