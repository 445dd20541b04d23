"""What autograd keeps of each kind of layer, from its forward pass to its backward pass.

    kind, operation                     keeps
    conv2d, linear, pool                input; max pools the place of each maximum too (int64)
    batch_norm                          input, mean and deviation of each channel
      synchronized                      the centred and the normalized input
      in eval mode                      input
    linear, weight frozen               nothing
    layer_norm                          input, mean and deviation of each normalized vector
    dropout, stochastic depth           the mask, scaled
    ReLU, sigmoid, tanh, softmax ...    output (in place or not)
    GELU, SiLU, hard-swish ...          input (in place: a copy of it)
    mul                                 both factors
    add, flatten, cat, views            nothing
    attention in windows                see `windows.py`
    multi-head attention                input, query, key, value and their product, transposed
    anything else                       input and output

Source: torch's derivatives.yaml; attention as its events show.
"""

from dataclasses import dataclass

from workbench.plan.graph import Layer
from workbench.plan.plan import Plan
from workbench.predict.memory.windows import Windows


@dataclass(frozen=True)
class Kept:
    """What one operation keeps.

    Attributes:
        input: its inputs.
        output: its output.
        view: its output is no memory of its own, but its input's, and so with the gradients.
        passes: the gradient of its input is that of its output, the same memory.
        words: elements of the activation's type for each element of the output.
        of_heads: as `words`, of what is cut with an attention layer's heads.
        bytes: for each element of the output, whatever the activation's type.
        statistics: fp32 numbers for each channel.
        constant: elements of the activation's type, however many rows there are.
    """

    input: bool = False
    output: bool = False
    view: bool = False
    passes: bool = False
    words: float = 0.0
    of_heads: float = 0.0
    bytes: float = 0.0
    statistics: int = 0
    constant: int = 0


_NOTHING = Kept()
_INPUT = Kept(input=True)
_OUTPUT = Kept(output=True)
_BOTH = Kept(input=True, output=True)
_VIEW = Kept(view=True, passes=True)
_PASSED_ON = Kept(passes=True)
_MAX_POOL = Kept(input=True, bytes=8.0)
_BATCH_NORM = Kept(input=True, statistics=2)
_SYNCHRONIZED = Kept(words=2.0)
# Of each head and position, attention also keeps one number in fp32: about one for 64 features.
_ATTENTION = Kept(words=1.0, of_heads=4.0 + 1 / 64)

_ELEMENTWISE = {
    # Dropout and stochastic depth are element-wise where they drop nothing.
    **dict.fromkeys(("identity", "contiguous", "detach", "dropout", "stochasticdepth"), _VIEW),
    **dict.fromkeys(("add", "sub"), _PASSED_ON),
    **dict.fromkeys(
        ("mul", "multiply", "div", "divide", "truediv", "true_divide", "neg"),
        _NOTHING,
    ),
    **dict.fromkeys(("rsub", "clone", "sign"), _NOTHING),
    **dict.fromkeys(
        ("relu", "sigmoid", "tanh", "exp", "expm1", "sqrt", "rsqrt", "reciprocal"), _OUTPUT
    ),
    "tanhshrink": _BOTH,
}
_VIEWS = {
    "getitem", "view", "reshape", "permute", "transpose", "expand", "unsqueeze", "squeeze",
    "chunk", "split", "unbind", "narrow", "select", "flatten", "unflatten", "getattr",
    "swapaxes",
}  # fmt: skip
_OPERATIONS = {
    **dict.fromkeys(_VIEWS, _VIEW),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack", "roll", "mean", "sum"), _NOTHING),
    **dict.fromkeys(("contiguous", "patch_merging_pad"), _NOTHING),
    **dict.fromkeys(("add", "sub"), _PASSED_ON),
    **dict.fromkeys(("mul", "matmul", "bmm", "einsum"), _INPUT),
    **dict.fromkeys(("softmax", "log_softmax"), _OUTPUT),
}


def kept_by(plan: Plan, layer: Layer) -> Kept:
    """What a layer keeps under a plan."""
    name = _name(layer)
    match layer.kind:
        case "linear":
            owner = plan.graph[layer.shared] if layer.shared else layer
            return _NOTHING if owner.keeps_weight else _INPUT
        case "conv2d" | "mul":
            return _INPUT
        case "batch_norm" if layer.evaluating:
            return _INPUT
        case "batch_norm":
            return _SYNCHRONIZED if plan.synchronizes(layer) else _BATCH_NORM
        case "layer_norm":
            return _layer_norm(layer)
        case "dropout":
            return Kept(words=1.0)
        case "add":
            return _PASSED_ON
        case "flatten":
            return _VIEW
        case "pool":
            return _pool(layer, name)
        case "elementwise":
            return _ELEMENTWISE.get(name, _INPUT)
        case "stochastic_depth":
            return _NOTHING
        case "attention":
            windows = Windows.of(layer)
            if windows is None:
                return _ATTENTION
            return Kept(words=windows.padded, of_heads=windows.of_heads, constant=windows.table)
        case "op" if name == "layer_norm":
            return _layer_norm(layer)
        case _:
            return _OPERATIONS.get(name, _BOTH)


def is_guessed(layer: Layer) -> bool:
    """Whether nothing is known of what an operation keeps."""
    return layer.kind == "op" and _name(layer) not in (*_OPERATIONS, "layer_norm")


def _name(layer: Layer) -> str:
    """The bare name of what is called, in place or not."""
    return layer.target.rpartition(".")[2].lower().strip("_")


def _layer_norm(layer: Layer) -> Kept:
    return Kept(input=True, bytes=8.0 / max(layer.output_shape[-1], 1))


def _pool(layer: Layer, name: str) -> Kept:
    if "max" in name:
        return _MAX_POOL
    means = "adaptive" in name and layer.output_shape[-2:] == (1, 1)
    repeats = "adaptive" in name and layer.input_shape[-2:] == (1, 1)
    return _NOTHING if means or repeats or name in ("mean", "amax", "amin") else _INPUT
