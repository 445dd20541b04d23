"""How a value depends on the batch, found by running each operation at two batch sizes.

    rows   dimension 0 of the value      for example
    0      the same at both sizes        parameters, values computed from them alone
    c      c times the batch size        activations (c = 1), windows of an image (c = their number)

Ranks hold rows of a batch, and each sample's result must not depend on the others: an operation
that loses the batch or moves it to another dimension is refused here, by its shape; one that
combines rows but keeps their places is found by trying it (`independence.py`).
"""

import operator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from workbench.model.errors import InsideError
from workbench.model.tracing.contexts import Under

BATCHES = (2, 3)

REMEDY = (
    "Every rank has only its own rows of the batch: keep the batch in dimension 0, and treat "
    "each sample by itself (x.mean(1), not x.mean(0)); batch statistics are nn.BatchNorm's"
)

NUMBER = (
    "A decision over the whole batch (if x.sum() > 0) differs between ranks: use torch.where for "
    "a choice per element"
)

# Of the tensor that they are called on, or of all but that, they use the type and device alone.
_FROM_NOTHING = {"new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"}
_FROM_THE_FIRST = {"type_as", "to"}
_UNFILLED = {
    *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty"),
    *("new_empty_strided", "new"),
}


def tensors(value: Any) -> list[Tensor]:
    """All tensors in a value: one, a tuple of some, or none."""
    if isinstance(value, Tensor):  # as most values are, and pytree takes its time
        return [value]
    if type(value) in (tuple, list):
        return [tensor for part in value for tensor in tensors(part)]
    if value is None or isinstance(value, int | float | str | torch.dtype):
        return []
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def versions(value: Any) -> list[int]:
    """How often each of the tensors in a value was written to; of inference, nobody counts it."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors(value)]


def written_since(before: list[int], value: Any) -> list[Tensor]:
    """The tensors in a value that were written to since they had these `versions`."""
    now = zip(tensors(value), before, versions(value), strict=True)
    return [tensor for tensor, was, version in now if version != was]


def has_tensors(module: nn.Module) -> bool:
    """Whether a module has parameters or buffers."""
    return any(True for _ in (*module.parameters(), *module.buffers()))


def depends_on_batch(node: Node) -> bool:
    """Whether the node's value is computed from the input's values, not only its shape."""
    if name_of(node) in _FROM_NOTHING:
        return False
    read = node.all_input_nodes[:1] if name_of(node) in _FROM_THE_FIRST else node.all_input_nodes
    return bool(tensors(node.meta["values"][0])) and any(source.meta["depends"] for source in read)


def called(kind: str, target: Any, root: nn.Module, args: Any, kwargs: Any) -> Any:
    """Runs an operation of a traced graph.

    Args:
        kind: the node's `op`; "": `root` itself is called.
        target: the function or method that is called, or the path of a submodule or parameter in
            `root`.
        root: the module that was traced.
        args: the positional arguments, as values.
        kwargs: the keyword arguments, as values.
    """
    if kind == "get_attr":
        return operator.attrgetter(target)(root)
    if kind == "call_module":
        return root.get_submodule(target)(*args, **kwargs)
    if kind == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs) if kind else root(*args, **kwargs)


def cleared(node: Node, args: Any, value: Any) -> Any:
    """What an operation gives for these arguments, with zeros for memory that it does not fill.

    What is in it differs from call to call, where nothing is random; a model fills it itself.
    """
    target = node.target.target if isinstance(node.target, Under) else node.target
    unfilled = getattr(target, "__name__", target) in _UNFILLED and not is_users_function(target)
    sizes = all(isinstance(size, int | torch.Size) for size in args[1:])
    given = target == "new" and not sizes  # as in x.new([1.0, 2.0])
    if unfilled and not given and node.op != "call_module":
        for tensor in tensors(value):
            tensor.zero_()
    return value


def is_users_function(target: Any) -> bool:
    """Whether a node calls a function of the user's, which the library does not know."""
    target = target.target if isinstance(target, Under) else target
    library = str(getattr(target, "__module__", None)).partition(".")[0]
    return isinstance(target, FunctionType) and library not in ("torch", "torchvision", "workbench")


def name_of(node: Node) -> str:
    """The bare name of a function or method: "relu", "add"."""
    return str(getattr(node.target, "__name__", node.target))


def elsewhere(node: Node) -> str:
    """Why ranks cannot have rows of a node's value, or ""; of a tuple's first tensor.

    The batch is in another dimension than the first, or it is not a multiple of the samples.
    """
    small, large = BATCHES
    pairs = [(a, b) for a, b in zip(*map(tensors, node.meta["values"]), strict=False)][:1]
    if all(
        a.shape == b.shape
        or (
            a.ndim == b.ndim
            and a.shape[1:] == b.shape[1:]
            and a.shape[0] * large == b.shape[0] * small
            and a.shape[0] % small == 0
        )
        for a, b in pairs
    ):
        return ""
    return (
        f"the result of {name_of(node)} has the batch elsewhere than in dimension 0: "
        f"{_shown(*pairs[0])}. {REMEDY}"
    )


def shape_for(pair: tuple[Tensor, Tensor], count: int) -> tuple[int, ...]:
    """The shape for so many samples, from the shapes at both batch sizes."""
    small, large = pair
    few, many = BATCHES
    return tuple(
        a + (count - few) * (b - a) // (many - few)
        for a, b in zip(small.shape, large.shape, strict=True)
    )


def rows_and_shape(node: Node) -> tuple[int, tuple[int, ...]]:
    """(rows for each sample, shape of one sample) of a node's value; of a tuple's first tensor.

    Raises:
        InsideError: the value mixes samples.
    """
    at_two, at_three = (tensors(value) for value in node.meta["values"])
    # Of several tensors only the first counts here: the others are seen as they are taken out.
    return _compare(node, at_two[0], at_three[0]) if at_two else (0, ())


def _compare(node: Node, a: Tensor, b: Tensor) -> tuple[int, tuple[int, ...]]:
    if a.shape == b.shape and not node.meta["depends"]:
        return 0, tuple(a.shape)
    if a.shape == b.shape:
        number = "" if a.ndim else f" {NUMBER}"
        raise InsideError(
            f"the result of {name_of(node)} has lost the batch: {_shown(a, b)}. {REMEDY}.{number}"
        )
    return a.shape[0] // BATCHES[0], tuple(a.shape[1:])


def _shown(a: Tensor, b: Tensor) -> str:
    small, large = BATCHES
    return f"{tuple(a.shape)} for a batch of {small}, {tuple(b.shape)} for {large}"
