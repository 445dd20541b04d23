"""How a value depends on the batch, found by running each operation at two batch sizes.

    rows   dimension 0 of the value      for example
    0      the same at both sizes        parameters, what is computed of parameters alone
    c      c times the batch size        activations (c = 1), windows of an image (c = their number)

Ranks hold rows of a batch, and each sample's result must not depend on the others: whatever
loses the batch, moves it to another dimension or combines its rows is refused by name.
Assumed and not checked: a function marked by `torch.fx.wrap` treats each sample by itself.
"""

import operator
from typing import Any

from torch import Tensor, nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from workbench.model.errors import TraceError

BATCHES = (2, 3)

_REMEDY = (
    "Every rank has only its own rows of the batch: keep the batch in dimension 0, and treat "
    "each sample by itself (x.mean(1), not x.mean(0)); batch statistics are nn.BatchNorm's"
)

_NUMBER = (
    "A decision over the whole batch (if x.sum() > 0) differs between ranks: use torch.where for "
    "a choice per element"
)

# Operations along a dimension that keep its length, and where their `dim` stands.
_ALONG = {
    "softmax": 1,
    "log_softmax": 1,
    "softmin": 1,
    "cumsum": 1,
    "cumprod": 1,
    "logcumsumexp": 1,
    "cummax": 1,
    "cummin": 1,
    "flip": 1,
    "roll": 2,
    "sort": 1,
    "argsort": 1,
    "normalize": 2,
    "cat": 1,
    "concat": 1,
    "concatenate": 1,
    "index_select": 1,
    "gather": 1,
    "take_along_dim": 2,
}
_DEFAULT_DIM = {"cat": 0, "concat": 0, "concatenate": 0, "normalize": 1, "sort": -1, "argsort": -1}

# Of the tensor that they are called on they use the type and device alone.
_FROM_NOTHING = {"new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"}

_ARITHMETIC = {
    "add", "sub", "rsub", "mul", "multiply", "div", "divide", "true_divide", "truediv",
    "floordiv", "pow", "iadd", "isub", "imul", "itruediv",
}  # fmt: skip


def tensors(value: Any) -> list[Tensor]:
    """All tensors in a value, be it one, a tuple of some, or none."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def depends_on_batch(node: Node) -> bool:
    """Whether the node's value is computed from the input's values, rather than its shape."""
    if name_of(node) in _FROM_NOTHING:
        return False
    return bool(tensors(node.meta["values"][0])) and any(
        source.meta["depends"] for source in node.all_input_nodes
    )


def name_of(node: Node) -> str:
    """The bare name of a function or method: "relu", "add"."""
    return str(getattr(node.target, "__name__", node.target))


def changes_in_place(node: Node, root: nn.Module) -> bool:
    """Whether an operation writes into what it reads, by torch's conventions."""
    name = name_of(node)
    if node.op == "call_module":
        return bool(getattr(root.get_submodule(str(node.target)), "inplace", False))
    by_name = name.endswith("_") and not name.endswith("__")
    return by_name or bool(node.kwargs.get("inplace")) or "out" in node.kwargs


def rows_and_shape(node: Node) -> tuple[int, tuple[int, ...]]:
    """(rows for each sample, shape of one sample) of a node's value; of a tuple's first tensor.

    Raises:
        TraceError: the value mixes samples.
    """
    at_two, at_three = (tensors(value) for value in node.meta["values"])
    # Of several tensors only the first counts here: the others are seen as they are taken out.
    return _compare(node, at_two[0], at_three[0]) if at_two else (0, ())


def _compare(node: Node, a: Tensor, b: Tensor) -> tuple[int, tuple[int, ...]]:
    small, large = BATCHES
    if a.shape == b.shape and not node.meta["depends"]:
        return 0, tuple(a.shape)
    shown = f"{tuple(a.shape)} for a batch of {small}, {tuple(b.shape)} for {large}"
    if a.shape == b.shape:
        number = "" if a.ndim else f" {_NUMBER}"
        raise TraceError(
            f"the result of {name_of(node)} has lost the batch: {shown}. {_REMEDY}.{number}"
        )
    if (
        a.ndim != b.ndim
        or a.shape[1:] != b.shape[1:]
        or a.shape[0] * large != b.shape[0] * small
        or a.shape[0] % small
    ):
        raise TraceError(
            f"the result of {name_of(node)} has the batch elsewhere than in dimension 0: {shown}. "
            f"{_REMEDY}"
        )
    return a.shape[0] // small, tuple(a.shape[1:])


def refuse_mixing(node: Node, module: nn.Module | None) -> None:
    """Refuses what combines rows of the batch, and cannot be told by its shape.

    Args:
        node: with its values; its sources are known to have the batch in dimension 0.
        module: what it calls, if it calls a module.

    Raises:
        TraceError: it mixes samples.
    """
    name = name_of(node)
    if isinstance(module, nn.SyncBatchNorm):
        raise TraceError(
            "nn.SyncBatchNorm has its own communication: use nn.BatchNorm2d, and "
            'batch_norm="synchronized" in the plan'
        )
    if module is not None and any(
        getattr(part, "batch_first", True) is False for part in module.modules()
    ):
        raise TraceError(
            f"{type(module).__name__} takes the batch as its second dimension, and here it would "
            "work across samples: build it with batch_first=True"
        )
    if isinstance(module, nn.Softmax | nn.LogSoftmax | nn.Softmin):
        if module.dim is not None and _is_batch(node, module.dim):
            raise TraceError(f"{type(module).__name__} acts along the batch. {_REMEDY}")
        return
    if node.op not in ("call_function", "call_method") or not node.meta["depends"]:
        return
    if name == "batch_norm" and node.meta["rows"]:
        raise TraceError(f"a function of batch statistics. {_REMEDY}")
    if name == "squeeze" and len(node.args) == 1 and not node.kwargs and node.meta["rows"]:
        raise TraceError(
            "squeeze() without dimensions also drops the batch where a rank has one row of it: "
            "name the dimensions, squeeze((2, 3)), or use flatten(1)"
        )
    if name in _ALONG:
        dim = node.kwargs.get("dim", _argument(node, _ALONG[name], _DEFAULT_DIM.get(name)))
        dims = dim if isinstance(dim, list | tuple) else (dim,)
        if any(_is_batch(node, each) for each in dims if isinstance(each, int)):
            raise TraceError(f"{name} acts along the batch. {_REMEDY}")
    if name.removesuffix("_") in _ARITHMETIC and any(
        _is_batch_size(arg) for arg in node.all_input_nodes
    ):
        raise TraceError(
            "a tensor is combined with a number that depends on the batch size, which differs "
            f"between ranks. {_REMEDY}"
        )
    if node.target is operator.getitem:
        source, index = node.args
        picks_rows = isinstance(index, Node) and isinstance(source, Node) and source.meta["rows"]
        if picks_rows and tensors(index.meta["values"][0]):  # type: ignore[union-attr]
            raise TraceError(f"rows of the batch are picked by a tensor. {_REMEDY}")


def _argument(node: Node, position: int, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else default


def _is_batch(node: Node, dim: int) -> bool:
    """Whether a dimension, counted from either end, is the batch's of the first activation."""
    source = next(source for source in node.all_input_nodes if source.meta["depends"])
    return any(dim in (0, -value.ndim) for value in tensors(source.meta["values"][0]))


def _is_batch_size(node: Node) -> bool:
    first, second = node.meta["values"]
    return isinstance(first, int | float) and bool(first != second)
