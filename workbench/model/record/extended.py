"""Torch's own layers in modules of other classes: GPT-2's `Conv1D`, norms with an activation.

A module that holds a matrix, and perhaps a bias, and multiplies what it reads by them (`F.linear`,
`torch.addmm`, `x @ self.weight`, perhaps on rows that it has flattened before and takes apart again
after) is recorded as a call of a linear layer, which plans can cut, whatever its class is and
whatever names its parameters have. What it does besides, with its parts, stays as it is; one that
holds more tensors is none.

A module that extends a batch norm or an embedding calls `F.batch_norm` with its own parameters and
statistics, or `F.embedding` with its own table. That call is recorded as one of torch's own class,
whose statistics a plan can average, synchronize and save, or whose table it can cut.
"""

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node
from torch.nn.modules.batchnorm import _BatchNorm

from workbench.model.errors import TraceError
from workbench.model.record.batch import name_of

_PRODUCTS = {torch.matmul, torch.mm, operator.matmul, "matmul", "mm"}
_RESHAPES = {"view", "reshape", "flatten", "unflatten"}
_TURNS = {"t", "T", "mT", "transpose", "swapaxes", "swapdims", "permute"}
Made = TypeVar("Made", bound=nn.Module)


class TransposedLinear(nn.Module):
    """A linear layer that holds its matrix as [in_features, out_features]."""

    weight: Tensor
    bias: Tensor | None
    transposed = True

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., in_features] to [..., out_features]."""
        return _product_of(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Returns what `print(model)` says of it."""
        into, out = self.weight.shape
        return f"in_features={into}, out_features={out}, bias={self.bias is not None}"


def _product_of(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return x @ matrix
    rows = torch.addmm(bias, x.reshape(-1, x.shape[-1]), matrix)
    return rows.view(*x.shape[:-1], matrix.shape[1])


class NamedLinear(nn.Module):
    """A linear layer whose matrix and bias have names of their own, under which they are saved."""

    def __init__(self, weight: str, bias: str | None, transposed: bool) -> None:
        super().__init__()
        self.weight_name, self.bias_name, self.transposed = weight, bias, transposed

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., in_features] to [..., out_features]."""
        by = _product_of if self.transposed else F.linear
        return by(x, self.weight, self.bias)

    @property
    def weight(self) -> Any:
        """The matrix."""
        return getattr(self, self.weight_name)

    @property
    def bias(self) -> Any:
        """The vector that is added; None: there is none."""
        return self.bias_name and getattr(self, self.bias_name)

    def usual(self) -> nn.Linear | TransposedLinear:
        """The same layer with its parameters under the usual names, and its parts."""
        return _with_parts(_linear(self.weight, self.bias, self.transposed), self)


def find_linears(
    graph: torch.fx.Graph, roots: Sequence[nn.Module], record: Callable[[Node], None]
) -> None:
    """Makes calls of linear layers of what modules with one matrix do."""
    called = {str(node.target) for node in graph.nodes if node.op == "call_module"}
    calls: dict[Node, Node] = {}  # by what gave their results before
    found: dict[str, list[_Product]] = {}
    for node in graph.nodes:
        product = _product(node)
        if product is not None:
            found.setdefault(product.owner, []).append(product)
    for path, products in found.items():
        readers = {reader for product in products for reader in product.readers}
        ways = {(product.weight, product.bias, product.transposed) for product in products}
        if not path or path in called or len(ways) > 1:
            continue
        weight, bias, transposed = ways.pop()
        if not _holds_nothing_else(roots[0].get_submodule(path), weight, bias):
            continue
        if not _is_alone(graph, [f"{path}.{name}" for name in (weight, bias)], readers):
            continue
        for root in roots:
            module = root.get_submodule(path)
            root.set_submodule(path, _layer(module, weight, bias, transposed))
        for product in products:
            calls[product.end] = product.replaced(graph, calls, record)


@dataclass(frozen=True)
class _Product:
    """A product of activations and a module's own matrix.

    Attributes:
        owner: the path of the module.
        weight: the name of the matrix in it.
        bias: the name of the bias in it; None: none is added.
        transposed: whether it holds the matrix as [in_features, out_features].
        x: the activations that are read.
        node: the product.
        end: the node of the result: the product, a sum with a bias, or a view that unflattens rows.
        readers: the nodes of which it consists that read the module's parameters.
    """

    owner: str
    weight: str
    bias: str | None
    transposed: bool
    x: Node
    node: Node
    end: Node
    readers: frozenset[Node]

    def replaced(
        self, graph: torch.fx.Graph, calls: Mapping[Node, Node], record: Callable[[Node], None]
    ) -> Node:
        """The call of the module that was put in the place of what gives the result."""
        with graph.inserting_before(self.end):
            call = graph.call_module(self.owner, (calls.get(self.x, self.x),))
        call.meta.update({name: self.node.meta[name] for name in ("line", "module")})
        record(call)
        self.end.replace_all_uses_with(call)
        _erase(graph, self.end)
        return call


def _product(node: Node) -> _Product | None:
    """What a node multiplies by a module's own matrix; None: it does something else."""
    given = _factors(node)
    if given is None:
        return None
    x, weight, bias, as_linear = given
    readers = {node}
    turned = _turned(weight)
    if turned is not None:
        readers.add(weight)
        weight = turned
    if weight.op != "get_attr" or not _has_batch(x):
        return None
    owner, _, name = str(weight.target).rpartition(".")
    end = node
    if bias is None and (added := _bias_after(node, owner)) is not None:
        end, bias = added
        readers.add(end)
    of_bias = None if bias is None else _vector(bias, owner)
    if bias is not None and of_bias is None:
        return None
    x, end = _on_flat_rows(x, end)
    transposed = as_linear == (turned is not None)
    return _Product(owner, name, of_bias, transposed, x, node, end, frozenset(readers))


def _factors(node: Node) -> tuple[Node, Node, Node | None, bool] | None:
    """(activations, matrix, bias, whether the matrix is [out, in]) of a product; else None."""
    if node.target is F.linear:
        names = ("input", "weight", "bias")
        given = dict(zip(names, node.args, strict=False)) | node.kwargs
        found = given.get("input"), given.get("weight"), given.get("bias")
    elif node.target in _PRODUCTS and not node.kwargs and len(node.args) == 2:
        found = (*node.args, None)
    elif node.target in (torch.addmm, "addmm") and not node.kwargs and len(node.args) == 3:
        found = (*node.args[1:], node.args[0])
    else:
        return None
    x, weight, bias = found
    if not isinstance(x, Node) or not isinstance(weight, Node):
        return None
    if not (bias is None or isinstance(bias, Node)):
        return None
    return x, weight, bias, node.target is F.linear


def _turned(node: Node) -> Node | None:
    """The matrix of which a node is the transposed one."""
    name = node.args[1] if node.target is getattr else name_of(node)
    if name not in _TURNS or len(node.all_input_nodes) != 1:
        return None
    (source,) = node.all_input_nodes
    before, after = source.meta["values"][0], node.meta["values"][0]
    turned = isinstance(before, Tensor) and before.ndim == 2 and after.stride() != before.stride()
    return source if turned else None


def _bias_after(node: Node, owner: str) -> tuple[Node, Node] | None:
    """(the sum, the bias) where nothing is done with a product but to add its module's bias."""
    if len(node.users) != 1:
        return None
    (reader,) = node.users
    if reader.target not in (operator.add, torch.add, "add") or reader.kwargs:
        return None
    other = [one for one in reader.args if one is not node]
    if len(other) != 1 or not isinstance(other[0], Node) or _vector(other[0], owner) is None:
        return None
    return reader, other[0]


def _on_flat_rows(x: Node, end: Node) -> tuple[Node, Node]:
    """What is read and given, if rows are flattened before a product and taken apart after it."""
    if name_of(x) not in _RESHAPES or len(end.users) != 1:
        return x, end
    source, (apart,) = x.all_input_nodes[0], end.users
    if name_of(apart) not in _RESHAPES or not _has_batch(source):
        return x, end
    for before, rows, after in zip(
        source.meta["values"], x.meta["values"], apart.meta["values"], strict=True
    ):
        if before.shape[-1:] != rows.shape[-1:] or before.shape[:-1] != after.shape[:-1]:
            return x, end
    features = end.meta["values"][0].shape[-1:]
    return (source, apart) if apart.meta["values"][0].shape[-1:] == features else (x, end)


def _has_batch(node: Node) -> bool:
    """Whether it has the rows of the batch, in dimension 0, and features behind them."""
    value = node.meta["values"][0]
    return isinstance(value, Tensor) and node.meta["rows"] > 0 and value.ndim > 1


def _vector(node: Node, owner: str) -> str | None:
    """The name in the module at a path of the vector that a node reads; None: it reads none."""
    path, _, name = str(node.target).rpartition(".")
    is_own = node.op == "get_attr" and path == owner
    return name if is_own and node.meta["values"][0].ndim == 1 else None


def _is_alone(graph: torch.fx.Graph, names: Sequence[str], readers: set[Node]) -> bool:
    """Whether nothing else reads the parameters of these names."""
    held = [node for node in graph.nodes if node.op == "get_attr" and node.target in names]
    return all(reader in readers for node in held for reader in node.users)


def _holds_nothing_else(module: nn.Module, weight: str, bias: str | None) -> bool:
    """Whether a module has a matrix and a bias of these names, and no other tensor of its own."""
    ndims = {name: tensor.ndim for name, tensor in module.named_parameters(recurse=False)}
    expected = {weight: 2} if bias is None else {weight: 2, bias: 1}
    return ndims == expected and not list(module.buffers(recurse=False))


def _layer(module: Any, weight: str, bias: str | None, transposed: bool) -> nn.Module:
    """The linear layer with the parameters of these names, and the parts, of a module."""
    if weight == "weight" and bias in ("bias", None):
        return _with_parts(_linear(module.weight, bias and module.bias, transposed), module)
    made = NamedLinear(weight, bias, transposed)
    for name in (weight, bias):
        if name is not None:
            made.register_parameter(name, getattr(module, name))
    return _with_parts(made, module)


def _linear(weight: Any, bias: Any, transposed: bool) -> nn.Linear | TransposedLinear:
    if transposed:
        return TransposedLinear(weight, bias)
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.register_parameter("weight", weight)
    made.register_parameter("bias", bias)
    return made


def _with_parts(made: Made, module: nn.Module) -> Made:
    """A layer with the parts of a module, which are layers of their own, and its mode."""
    for name, part in module.named_children():
        made.add_module(name, part)
    return made.train(module.training)


def _erase(graph: torch.fx.Graph, node: Node) -> None:
    """Removes a node that nothing reads, and what was read by it alone."""
    if node.users or node.op == "placeholder":
        return
    sources = node.all_input_nodes
    graph.erase_node(node)
    for source in sources:
        _erase(graph, source)


_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CLASSES = (*_NORMS, nn.Embedding)
_TENSORS = ("running_mean", "running_var", "weight", "bias")
_COUNT = "num_batches_tracked"
_SIGNATURES = {each: inspect.signature(each) for each in (F.batch_norm, F.embedding)}


class ExtendedLayers:
    """The batch norms and embeddings of a model that are instances of an extension of torch's."""

    def __init__(self) -> None:
        self.plain: dict[str, nn.Module] = {}
        self.counted: set[str] = set()

    def called(
        self, root: nn.Module, path: str, kind: str, target: Any, args: Any, kwargs: Any
    ) -> Node | None:
        """The input of such a layer, if an operation is what torch's own class does; else None."""
        if kind != "call_function" or target not in (F.batch_norm, F.embedding):
            return None
        module = root.get_submodule(path)
        given = _SIGNATURES[target].bind(*args, **kwargs)
        given.apply_defaults()
        is_own = _is_own_norm if target is F.batch_norm else _is_own_table
        if not is_own(module, path, given.arguments):
            return None
        self.plain[path] = plain(module)
        x = given.arguments["input"]
        return x if isinstance(x, Node) else None

    def counts(self, root: nn.Module, kind: str, target: Any, args: Any) -> bool:
        """Whether an operation adds one to the count of batches, as torch's own class does."""
        if kind != "call_method" or target != "add_" or len(args) != 2 or args[1] != 1:
            return False
        path, _, leaf = str(args[0].target).rpartition(".")
        counts = args[0].op == "get_attr" and leaf == _COUNT
        if not counts or not isinstance(root.get_submodule(path), _BatchNorm):
            return False
        self.counted.add(path)
        return True

    def put(self, *roots: nn.Module) -> None:
        """Puts torch's own modules in the place of those that extend them, once all is recorded.

        Raises:
            TraceError: a module counts batches, and is no batch norm otherwise.
        """
        for path in sorted(self.counted - {*self.plain}):
            raise TraceError(
                f"{path!r} counts its batches, and does not normalize as nn.BatchNorm does, by "
                "F.batch_norm on its own statistics, momentum and eps: extend nn.BatchNorm by what "
                "comes before or after it, or build it with track_running_stats=False"
            )
        for path in self.plain:
            for root in roots:
                root.set_submodule(path, plain(root.get_submodule(path)))
        self.plain.clear()


def plain(module: nn.Module) -> nn.Module:
    """The module of torch's own class that has the tensors, settings and parts of an extension."""
    cls = next(cls for cls in type(module).__mro__ if cls in _CLASSES)
    made: nn.Module = cls.__new__(cls)
    nn.Module.__init__(made)
    hooks = {name: table for name, table in vars(made).items() if "_hooks" in name}
    made.__dict__.update(vars(module) | hooks)  # hooks have been recorded by themselves
    return made


def _is_own_table(module: nn.Module, path: str, given: dict[str, Any]) -> bool:
    """Whether the arguments are those of torch's own embedding."""
    if type(module) is nn.Embedding or not isinstance(module, nn.Embedding):
        return False
    table, prefix = given["weight"], f"{path}." if path else ""
    if table.op != "get_attr" or table.target != f"{prefix}weight":
        return False
    options = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    return all(given[name] == getattr(module, name) for name in options)


def _is_own_norm(module: nn.Module, path: str, given: dict[str, Any]) -> bool:
    """Whether the arguments are those of torch's own batch norm."""
    if type(module) in _NORMS or not isinstance(module, _NORMS) or module.momentum is None:
        return False
    prefix = f"{path}." if path else ""
    tracked = not module.training or module.track_running_stats
    for name in _TENSORS:
        due = getattr(module, name) if tracked or "running" not in name else None
        node = given[name]
        if (node is None) != (due is None):
            return False
        if node is not None and (node.op != "get_attr" or node.target != prefix + name):
            return False
    of_batch = module.training or (module.running_mean is None and module.running_var is None)
    return bool(
        given["training"] == of_batch
        and given["momentum"] == module.momentum
        and given["eps"] == module.eps
    )
