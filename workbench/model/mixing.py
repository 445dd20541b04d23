"""Operations that combine rows of the batch, and cannot be told by their shapes."""

import operator
from typing import Any

from torch import nn
from torch.fx import Node

from workbench.model.batch import REMEDY, name_of, tensors
from workbench.model.errors import TraceError

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
_DEFAULT_DIM = {
    "cat": 0,
    "concat": 0,
    "concatenate": 0,
    "normalize": 1,
    "sort": -1,
    "argsort": -1,
    "roll": 0,  # rolls the flattened tensor
}

_ARITHMETIC = {
    "add", "sub", "rsub", "mul", "multiply", "div", "divide", "true_divide", "truediv",
    "floordiv", "pow", "iadd", "isub", "imul", "itruediv",
}  # fmt: skip


def refuse_mixing(node: Node, module: nn.Module | None) -> None:
    """Refuses what combines rows of the batch, and cannot be told by its shape.

    Args:
        node: with its values; its sources are known to have the batch in dimension 0.
        module: what it calls, if it calls a module.

    Raises:
        TraceError: it mixes samples.
    """
    if module is not None:
        _refuse_module(node, module)
    elif node.op in ("call_function", "call_method") and tensors(node.meta["values"][0]):
        _refuse_function(node, name_of(node).removesuffix("_"))


def _refuse_module(node: Node, module: nn.Module) -> None:
    name = type(module).__name__
    if isinstance(module, nn.SyncBatchNorm):
        raise TraceError(
            "nn.SyncBatchNorm has its own communication: use nn.BatchNorm2d, and "
            'batch_norm="synchronized" in the plan'
        )
    if any(getattr(part, "batch_first", True) is False for part in module.modules()):
        raise TraceError(
            f"{name} takes the batch as its second dimension, and here it would work across "
            "samples: build it with batch_first=True"
        )
    softmax = isinstance(module, nn.Softmax | nn.LogSoftmax | nn.Softmin)
    if softmax and node.meta["depends"] and _is_batch(node, _softmax_dim(node, module.dim)):
        raise TraceError(f"{name} acts along the batch. {REMEDY}")


def _refuse_function(node: Node, name: str) -> None:
    sized = any(source.meta["is_size"] for source in node.all_input_nodes)
    if sized and not node.meta["rows"]:
        raise TraceError(
            f"{name} makes a tensor of the batch's size, which differs between ranks, that has no "
            f"row for each sample. {REMEDY}"
        )
    if not node.meta["depends"]:
        return
    if name == "batch_norm":
        raise TraceError(f"a function of batch statistics. {REMEDY}")
    if name == "squeeze" and len(node.args) == 1 and not node.kwargs:
        raise TraceError(
            "squeeze() without dimensions also drops the batch where a rank has one row of it: "
            "name the dimensions, squeeze((2, 3)), or use flatten(1)"
        )
    if name in _ALONG and any(_is_batch(node, dim) for dim in _dims(node, name)):
        raise TraceError(f"{name} acts along the batch. {REMEDY}")
    if name in _ARITHMETIC and sized:
        raise TraceError(
            "a tensor is combined with a number that depends on the batch size, which differs "
            f"between ranks. {REMEDY}"
        )
    if node.target is operator.getitem and _picks_rows(*node.args):
        raise TraceError(f"rows of the batch are picked by a tensor. {REMEDY}")


def _dims(node: Node, name: str) -> list[Any]:
    """The dimensions along which an operation of `_ALONG` acts, said or not."""
    named = [node.kwargs[key] for key in ("dim", "dims") if key in node.kwargs]
    given: Any = [*node.args[_ALONG[name] :], *named, None][0]
    if "soft" in name:
        given = _softmax_dim(node, given)
    elif given is None:
        given = _DEFAULT_DIM.get(name)
    return list(given) if isinstance(given, list | tuple) else [given]


def _softmax_dim(node: Node, given: Any) -> Any:
    """Of a softmax; torch's own default depends on the number of dimensions."""
    if given is not None:
        return given
    return 0 if node.all_input_nodes[0].meta["values"][0].ndim in (1, 3) else 1


def _is_batch(node: Node, dim: Any) -> bool:
    """Whether a dimension, counted from either end, is the batch's of the first activation."""
    source = next(source for source in node.all_input_nodes if source.meta["depends"])
    return any(dim in (0, -value.ndim) for value in tensors(source.meta["values"][0]))


def _picks_rows(source: Any, index: Any) -> bool:
    return (
        isinstance(index, Node)
        and isinstance(source, Node)
        and source.meta["rows"] > 0
        and bool(tensors(index.meta["values"][0]))
    )
