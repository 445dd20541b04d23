"""Linear layers in modules that are not torch's: GPT-2's `Conv1D`, extensions of `nn.Linear`.

Such a module holds a matrix, and perhaps a bias, and multiplies what it reads by them: by
`F.linear`, `torch.addmm` or `x @ self.weight`, perhaps on rows that it has flattened before and
takes apart again after. That is what a linear layer does, whatever its class is and whatever names
its parameters have, and it is recorded as a call of one, which plans can cut. What such a module
does besides, with its parts, stays as it is; one that holds more tensors is none.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from workbench.model.tracing.batch import name_of

_PRODUCTS = {torch.matmul, torch.mm, operator.matmul, "matmul", "mm"}
_RESHAPES = {"view", "reshape", "flatten", "unflatten"}
_TURNS = {"t", "T", "mT", "transpose", "swapaxes", "swapdims", "permute"}
Made = TypeVar("Made", bound=nn.Module)


class TransposedLinear(nn.Module):
    """A linear layer that holds its matrix as [in_features, out_features].

    Args:
        weight: the matrix.
        bias: the vector that is added [out_features]; None: there is none.
    """

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
    """A linear layer whose matrix and bias have names of their own, under which they are saved.

    Args:
        weight: the name of the matrix.
        bias: the name of the vector that is added; None: there is none.
        transposed: whether the matrix is [in_features, out_features].
    """

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
    """Makes calls of linear layers of what modules with one matrix do.

    Args:
        graph: the traced graph of a `ValueTracer`, with its values.
        roots: the module that was traced, and its copies; each gets the new modules.
        record: sets the `meta` of a new node.
    """
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
        """The call of the module that was put in the place of what gives the result.

        Args:
            graph: the traced graph.
            calls: the calls that were put in other places before, one of which it may read.
            record: sets the `meta` of a new node.
        """
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
