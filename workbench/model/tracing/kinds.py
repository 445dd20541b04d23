"""The kind of a traced node, out of `graph.KINDS`.

A kind is a promise about the operation, which sharding relies on: an operation that is not known
for certain is "op", which always gets whole samples.
"""

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_arg
from torch.nn.modules.batchnorm import _BatchNorm

from workbench.model.tracing.batch import is_users_function, name_of, tensors
from workbench.model.tracing.rewrites.attention import SelfAttention, is_window_attention
from workbench.model.tracing.rewrites.linears import NamedLinear, TransposedLinear
from workbench.model.tracing.state import assigned

# Of modules the exact class counts: a subclass may compute something else.
_MODULES: dict[type[nn.Module], str] = {
    nn.Conv2d: "conv2d",
    nn.Linear: "linear",
    TransposedLinear: "linear",
    NamedLinear: "linear",
    SelfAttention: "attention",
    nn.LayerNorm: "layer_norm",
    nn.Dropout: "dropout",
    nn.MaxPool2d: "pool",
    nn.AvgPool2d: "pool",
    nn.AdaptiveAvgPool2d: "pool",
    nn.AdaptiveMaxPool2d: "pool",
    **dict.fromkeys(
        (
            nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU,
            nn.SiLU, nn.Mish, nn.Sigmoid, nn.LogSigmoid, nn.Tanh, nn.Tanhshrink, nn.Hardswish,
            nn.Hardsigmoid, nn.Hardtanh, nn.Hardshrink, nn.Softplus, nn.Softshrink, nn.Softsign,
            nn.Threshold,
        ),
        "elementwise",
    ),
}  # fmt: skip

_POOLS = {"max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d"}
_SPATIAL_REDUCTIONS = {"mean", "amax", "amin"}

_ELEMENTWISE = {
    "relu", "relu6", "leaky_relu", "elu", "celu", "selu", "gelu", "silu", "mish",
    "sigmoid", "logsigmoid", "tanh", "tanhshrink", "hardswish", "hardsigmoid", "hardtanh",
    "hardshrink", "softplus", "softshrink", "softsign", "threshold", "clamp", "clip", "abs",
    "neg", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "square", "reciprocal", "sin", "cos",
    "erf", "sign", "contiguous", "clone", "detach",
}  # fmt: skip
_WITH_NUMBER = {
    "add", "sub", "rsub", "mul", "multiply", "div", "divide", "true_divide", "truediv", "pow",
}  # fmt: skip
_SUMS = {operator.add, assigned.add, torch.add, "add", "add_"}
_PRODUCTS = {operator.mul, assigned.mul, torch.mul, torch.multiply, "mul", "mul_", "multiply"}

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# The kinds that may draw random numbers and still be sharded.
_RANDOM = ("dropout", "stochastic_depth", "attention")


def kind_of(node: Node, module: nn.Module | None) -> str:
    """The kind of a node that has its values, rows and shape.

    Args:
        node: the node of the traced graph.
        module: the module that it calls, if it calls one.
    """
    if node.op == "get_attr":
        return "parameter"
    if not tensors(node.meta["values"][0]):
        return "size"
    kind = _of_module(node, module) if module is not None else _of_function(node)
    if node.meta["draws"] and kind not in _RANDOM:
        return "op"
    if kind in ("op", "add", "mul"):
        return kind
    # Every other kind is one tensor in and one out, both with the batch's rows.
    sources: list[Node] = []
    map_arg((node.args, node.kwargs), sources.append)
    read = [source for source in sources if tensors(source.meta["values"][0])]
    alone = len(read) == 1 and isinstance(node.meta["values"][0], Tensor)
    return kind if alone and 0 < node.meta["rows"] == read[0].meta["rows"] else "op"


def _of_module(node: Node, module: nn.Module) -> str:
    if any(getattr(module, hooks) for hooks in _HOOKS):
        return "op"
    stochastic_depth = _is_stochastic_depth(type(module))
    drops = stochastic_depth or type(module) is nn.Dropout
    if drops and (module.p == 0 or not module.training):
        return "elementwise"  # the identity, which draws nothing
    if stochastic_depth:
        return "stochastic_depth"
    if isinstance(module, _BatchNorm):
        return "batch_norm"
    if is_window_attention(module):
        return "attention"
    if type(module) is nn.Embedding:
        changes_table = module.max_norm is not None
        of_batch = module.scale_grad_by_freq or module.sparse
        return "op" if changes_table or of_batch else "embedding"
    if type(module) is nn.Flatten:
        return _flatten(node, module.start_dim, module.end_dim)
    kind = _MODULES.get(type(module), "op")
    if kind == "pool" and not isinstance(node.meta["values"][0], Tensor):
        return "op"  # return_indices
    return kind


def _of_function(node: Node) -> str:
    if is_users_function(node.target):
        return "op"  # whatever its name
    name = name_of(node).removesuffix("_")  # in place or not
    if node.target is F.dropout:  # outside training, the identity
        return "dropout" if node.meta["draws"] else "elementwise"
    if node.op == "call_function" and _is_stochastic_depth(node.target):
        return "stochastic_depth" if node.meta["draws"] else "elementwise"
    if node.target in (torch.flatten, "flatten"):
        given = dict(zip(("start_dim", "end_dim"), node.args[1:], strict=False)) | node.kwargs
        return _flatten(node, given.get("start_dim", 0), given.get("end_dim", -1))
    if node.target in _SUMS and _alike(node):
        return "add"
    if node.target in _PRODUCTS and _alike(node):
        return "mul"
    if name in _ELEMENTWISE or (name in _WITH_NUMBER and "out" not in node.kwargs):
        return "elementwise" if _keeps_shape(node) else "op"
    if name in _POOLS or (name in _SPATIAL_REDUCTIONS and _is_spatial(node)):
        return "pool" if _has_channels(node) else "op"
    return "op"


def _is_stochastic_depth(called: Any) -> bool:
    """Whether it is torchvision's function or module."""
    return getattr(called, "__module__", None) == "torchvision.ops.stochastic_depth"


def _flatten(node: Node, start: Any, end: Any) -> str:
    value = node.all_input_nodes[0].meta["values"][0]
    last = value.ndim - 1
    if start not in (1, 1 - value.ndim) or end not in (-1, last):
        return "op"
    return "flatten" if value.ndim > 2 else "elementwise"


def _alike(node: Node) -> bool:
    """Whether its inputs are two activations of equal rows and channels, broadcast only behind."""
    if len(node.args) != 2 or node.kwargs:
        return False
    sources = [arg for arg in node.args if isinstance(arg, Node)]
    values = [source.meta["values"][0] for source in sources]
    if len(sources) != 2 or not all(isinstance(value, Tensor) for value in values):
        return False
    first, second = values
    return (
        first.ndim == second.ndim >= 2
        and sources[0].meta["rows"] == sources[1].meta["rows"] > 0
        and first.shape[:2] == second.shape[:2]
        and all(a == b or 1 in (a, b) for a, b in zip(first.shape, second.shape, strict=True))
    )


def _keeps_shape(node: Node) -> bool:
    first = node.all_input_nodes[0].meta["values"][0]
    value = node.meta["values"][0]
    return isinstance(first, Tensor) and isinstance(value, Tensor) and first.shape == value.shape


def _has_channels(node: Node) -> bool:
    return bool(node.all_input_nodes[0].meta["values"][0].ndim == 4)


def _is_spatial(node: Node) -> bool:
    """Whether a reduction is over dimensions after the channels."""
    dims = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    if isinstance(dims, int):
        dims = (dims,)
    if not isinstance(dims, list | tuple):
        return False
    ndim = node.all_input_nodes[0].meta["values"][0].ndim
    return all(isinstance(dim, int) and dim % ndim >= 2 for dim in dims)
