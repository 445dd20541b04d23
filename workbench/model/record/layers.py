"""The kind of each traced node, out of `graph.KINDS`, and the layers of a `Graph`.

A kind is a promise about the operation, which sharding relies on: an operation that is not known
for certain is "op", which always gets whole samples.
"""

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_arg
from torch.nn.modules.batchnorm import _BatchNorm

from workbench.model.errors import TraceError
from workbench.model.record.attention import SelfAttention, is_window_attention
from workbench.model.record.batch import Moved, MovedModule, is_users_function, name_of, tensors
from workbench.model.record.extended import NamedLinear, TransposedLinear
from workbench.model.record.in_place import Assigned
from workbench.model.weights.files import DTYPES
from workbench.plan.graph.graph import Layer, Weight, carries_gradient

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
_SUMS = {operator.add, Assigned(operator.add), torch.add, "add", "add_"}
_PRODUCTS = {operator.mul, Assigned(operator.mul), torch.mul, torch.multiply}
_PRODUCTS |= {"mul", "mul_", "multiply"}

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# The kinds that may draw random numbers and still be sharded.
_RANDOM = ("dropout", "stochastic_depth", "attention")


def kind_of(node: Node, module: nn.Module | None) -> str:
    """The kind of a node that has its values, rows and shape."""
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
    if is_users_function(node.target) or isinstance(node.target, Moved):
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


def layers_of(root: nn.Module, graph: torch.fx.Graph) -> tuple[tuple[Layer, ...], tuple[str, ...]]:
    """The layers in execution order, and the names of those that the model returns.

    Parameters that the forward pass never reaches get a layer without readers, and a node in
    `graph`, so that checkpoints contain the whole model.
    """
    return _Layers(root, graph).all()


@dataclass(frozen=True)
class _Held:
    """One tensor of the model, with all its names."""

    tensor: Tensor
    names: tuple[str, ...]
    persistent: bool


class _Layers:
    def __init__(self, root: nn.Module, graph: torch.fx.Graph) -> None:
        self.root, self.graph = root, graph
        self.held = _held(root)
        self.keys = {name: key for key, held in self.held.items() for name in held.names}
        self._read_the_unreached()
        self.nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        self.sources = _sources(graph)
        self.names = self._unique_names()
        self.owner = self._owners()

    def all(self) -> tuple[tuple[Layer, ...], tuple[str, ...]]:
        layers = {self.names[node]: self._layer(node) for node in self.nodes}
        learning: set[str] = set()
        for node in self.nodes:
            layer = layers[self.names[node]]
            if carries_gradient(layer, layers.get(layer.shared), learning):
                if node.meta["learns"]:
                    learning.add(layer.name)
                else:
                    layers[layer.name] = replace(layer, detached=True)
        return tuple(layers.values()), self._outputs()

    def _layer(self, node: Node) -> Layer:
        meta = node.meta
        sources: list[Node] = []
        map_arg((node.args, node.kwargs), sources.append)
        activations = [source for source in sources if tensors(source.meta["values"][0])]
        of_batch = [source for source in activations if source.meta["rows"]]
        module = self._module(node)
        of_features = any(not way.of_tokens for way in meta["propagations"])
        kind = "op" if of_features else kind_of(node, module)  # cut as trying has shown
        used = self._used(node)
        mine = [key for key in used if self.owner[key] is node]
        shared = next((self.names[self.owner[key]] for key in used if key not in mine), "")
        return Layer(
            name=self.names[node],
            kind=kind,
            inputs=tuple(self._name(source) for source in sources),
            input_shape=next(iter([*of_batch, *activations])).meta["shape"] if activations else (),
            output_shape=meta["shape"],
            rows=meta["rows"],
            weights=tuple(self._weight(key, used[key]) for key in mine),
            flops=meta["flops"],
            activation_bytes=_bytes_of_one_sample(meta["values"]) if meta["rows"] else 0,
            unreal_bytes=_unreal_bytes(meta["values"]),
            groups=module.groups if isinstance(module, nn.Conv2d) else 1,
            heads=cast(int, module.num_heads) if module and kind == "attention" else 0,
            num_embeddings=module.num_embeddings if isinstance(module, nn.Embedding) else 0,
            target=_target(node, module),
            node=node.name,
            shared=shared,
            draws=meta["draws"],
            least_rows=_least_rows(node, module),
            least_rows_half=int(meta["least_rows_half"]),
            uncounted=kind == "op" and meta["uncounted"],
            transposed=isinstance(module, TransposedLinear | NamedLinear) and module.transposed,
            output_units=meta["units"][0],
            output_blocks=meta["units"][1],
            input_units=meta["units"][2],
            propagations=meta["propagations"],
            saved=meta["saved"] if kind in ("op", "elementwise") else None,
            evaluating=module is not None and _evaluates(module),
        )

    def _name(self, node: Node) -> str:
        return self.sources.get(node) or self.names[node]

    def _module(self, node: Node) -> nn.Module | None:
        return self.root.get_submodule(str(node.target)) if node.op == "call_module" else None

    def _outputs(self) -> tuple[str, ...]:
        returned = next(node for node in self.graph.nodes if node.op == "output").args[0]
        listed = returned if isinstance(returned, list | tuple) else [returned]
        return tuple(self._name(item) for item in listed if isinstance(item, Node))

    def _unique_names(self) -> dict[Node, str]:
        """The layers' names: a module's path, a parameter's name, else the node's, made unique."""
        names: dict[Node, str] = {}
        calls: dict[str, int] = {}
        for node in self.nodes:
            if node.op in ("call_module", "get_attr"):
                path = str(node.target)
                calls[path] = calls.get(path, 0) + 1
                names[node] = path if calls[path] == 1 else f"{path}@{calls[path]}"
        if clash := set(self.sources.values()) & set(names.values()):
            raise TraceError(
                f"the module {min(clash)!r} has the name under which a graph's layers read an "
                "input: give it another one"
            )
        taken = {*self.sources.values(), *names.values()}
        for node in self.nodes:
            if node not in names:
                name = node.name
                while name in taken:
                    name += "_"
                names[node] = name
                taken.add(name)
        return names

    def _used(self, node: Node) -> dict[int, str]:
        """The keys of the tensors that a node uses, and its names for them."""
        module = self._module(node)
        if type(module) is nn.Embedding:  # one that was extended may hold more, which others read
            return {id(module.weight): f"{node.target}.weight"}
        if isinstance(module, nn.Linear | TransposedLinear | NamedLinear):  # its parts are layers
            own = module.named_parameters(recurse=False)
            return {id(tensor): f"{node.target}.{name}" for name, tensor in own}
        if module is not None:
            return {id(t): f"{node.target}.{name}" for name, t, _ in _tensors(module)}
        of_type = node.users and all(map(_gives_type, node.users))
        if node.op == "get_attr" and not of_type:  # a type is that of any piece
            return {self.keys[str(node.target)]: str(node.target)}
        return {}

    def _owners(self) -> dict[int, Node]:
        """The node whose layer owns each tensor: a module rather than a direct read."""
        owner: dict[int, Node] = {}
        for op in ("call_module", "get_attr"):
            for node in self.nodes:
                if node.op == op:
                    for key in self._used(node):
                        owner.setdefault(key, node)
        return owner

    def _weight(self, key: int, name: str) -> Weight:
        held = self.held[key]
        is_parameter = isinstance(held.tensor, nn.Parameter)
        return Weight(
            name=name,
            shape=tuple(held.tensor.shape),
            dtype=str(held.tensor.dtype).removeprefix("torch."),
            trainable=is_parameter and held.tensor.requires_grad,
            frozen=is_parameter and not held.tensor.requires_grad,
            persistent=held.persistent,
            aliases=tuple(other for other in held.names if other != name),
        )

    def _read_the_unreached(self) -> None:
        reached = {
            key
            for node in self.graph.nodes
            if node.op in ("call_module", "get_attr")
            for key in self._used(node)
        }
        output = next(node for node in self.graph.nodes if node.op == "output")
        with self.graph.inserting_before(output):
            for key, held in self.held.items():
                if key not in reached:
                    node = self.graph.get_attr(held.names[0])
                    node.meta.update(
                        values=(held.tensor, held.tensor),
                        depends=False,
                        learns=False,
                        rows=0,
                        shape=tuple(held.tensor.shape),
                        flops=0,
                        draws=(),
                        least_rows=0,
                        least_rows_half=0,
                        uncounted=False,
                        units=(0, 1, 0),
                        propagations=(),
                        saved=None,
                    )


def _sources(graph: torch.fx.Graph) -> dict[Node, str]:
    """The names under which layers read the inputs: `plan.graph.Graph.sources` has the same."""
    read = [node for node in graph.nodes if node.op == "placeholder"]
    return {node: "input" if len(read) == 1 else f"input.{node.target}" for node in read}


def _evaluates(module: nn.Module) -> bool:
    """Whether a module is in eval mode, which a batch norm without running statistics lacks."""
    alike = isinstance(module, _BatchNorm) and module.running_mean is None
    return not module.training and not alike


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """(name, tensor, persistent) of all tensors of a module and its submodules."""
    for path, owner in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for table in (owner._parameters, owner._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    persistent = name not in owner._non_persistent_buffers_set
                    yield prefix + name, tensor, persistent


def _held(root: nn.Module) -> dict[int, _Held]:
    """The model's tensors in the order of its `state_dict`.

    Raises:
        TraceError: the `state_dict` contains something else than these, or one of them cannot be
            saved.
    """
    held: dict[int, _Held] = {}
    for name, tensor, persistent in _tensors(root):
        if tensor.dtype not in DTYPES.values():
            valid = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES.values())
            raise TraceError(
                f"{name!r} holds {str(tensor.dtype).removeprefix('torch.')}, which a file of "
                f"weights cannot hold (it can hold {valid}): of complex numbers, keep the real and "
                "the imaginary parts, torch.view_as_real(x), and make them complex in forward, "
                "torch.view_as_complex(self.x)"
            )
        known = held.get(id(tensor))
        names = (*known.names, name) if known else (name,)
        held[id(tensor)] = _Held(tensor, names, persistent)
    saved = {name for item in held.values() if item.persistent for name in item.names}
    other = saved.symmetric_difference(root.state_dict())
    if other:
        raise TraceError(
            f"the state_dict differs from the model's parameters and buffers in {sorted(other)}; "
            "a state_dict of its own making cannot be saved in pieces"
        )
    return held


def _least_rows(node: Node, module: nn.Module | None) -> int:
    """The fewest rows of a batch that a layer takes in the mode that was traced."""
    if isinstance(module, _BatchNorm):
        of_batch = module.training or module.running_mean is None
        alone = node.meta["rows"] * math.prod(node.meta["shape"][1:]) == 1
        return 2 if of_batch and alone else 0  # the variance of one value is nothing
    return int(node.meta["least_rows"])


def _bytes_of_one_sample(values: tuple[Any, Any]) -> int:
    small, large = (
        sum(tensor.numel() * tensor.element_size() for tensor in tensors(value)) for value in values
    )
    return large - small


def _unreal_bytes(values: tuple[Any, Any]) -> int:
    """Bytes of an element where all are truths, whole or complex numbers; else 0."""
    made = tensors(values[0])
    if any(tensor.is_floating_point() for tensor in made):
        return 0
    return max((tensor.element_size() for tensor in made), default=0)


def _target(node: Node, module: nn.Module | None) -> str:
    if module is not None:
        cls = type(module.inner if isinstance(module, MovedModule) else module)
        public = getattr(nn, cls.__name__, None) is cls
        return f"torch.nn.{cls.__name__}" if public else f"{cls.__module__}.{cls.__qualname__}"
    if node.op == "get_attr":
        return ""
    target: Any = node.target.target if isinstance(node.target, Moved) else node.target
    if isinstance(target, str):
        return f"Tensor.{target}"
    if target is getattr and node.args[1] in ("dtype", "device"):
        return f"Tensor.{node.args[1]}"
    name = name_of(node)
    if getattr(F, name, None) is target:
        return f"torch.nn.functional.{name}"
    where = getattr(target, "__module__", None) or "torch"
    return f"{where.removeprefix('_')}.{name}" if where != "builtins" else name


def _gives_type(node: Node) -> bool:
    return isinstance(node.meta.get("values", (None,))[0], torch.dtype | torch.device)
