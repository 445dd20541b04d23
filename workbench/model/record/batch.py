"""How a value depends on the batch, found by running each operation at two batch sizes.

    rows   dimension 0 of the value      for example
    0      the same at both sizes        parameters, values computed from them alone
    c      c times the batch size        activations (c = 1), windows of an image (c = their number)

Ranks hold rows of a batch, and each sample's result must not depend on the others: an operation
that loses the batch or moves it to another dimension is refused here, by its shape; one that
combines rows but keeps their places is found by trying it (`independence.py`).
"""

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from workbench.model.errors import InsideError

BATCHES = (2, 3)

REMEDY = (
    "Every rank has only its own rows of the batch: keep the batch in dimension 0, and treat "
    "each sample by itself (x.mean(1), not x.mean(0)); batch statistics are nn.BatchNorm's"
)

NUMBER = (
    "A decision over the whole batch (if x.sum() > 0) differs between ranks: use torch.where for "
    "a choice per element"
)

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Context:
    """What operations are under.

    Attributes:
        gradients: whether their gradients are recorded.
        autocast: whether autocast may choose their precision.
    """

    gradients: bool = True
    autocast: bool = True

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enters the context, whatever it is entered from."""
        were = {device: torch.is_autocast_enabled(device) for device in DEVICES}
        with torch.set_grad_enabled(self.gradients and torch.is_grad_enabled()):
            try:
                for device in were if not self.autocast else ():
                    torch.set_autocast_enabled(device, False)
                yield
            finally:
                for device, was in were.items():
                    torch.set_autocast_enabled(device, was)


class Place(NamedTuple):
    """Where the batch lies in a tensor: its dimension `dim` counts [outer, batch, inner]."""

    dim: int = 0
    outer: int = 1
    inner: int = 1

    @property
    def is_first(self) -> bool:
        """Whether dimension 0 has the rows of one sample after the other."""
        return self.dim == 0 and self.outer == 1

    def first(self, x: Tensor) -> Tensor:
        """A view of a tensor that has the batch here, which has it in dimension 0."""
        if self.is_first:
            return x
        around = self.outer * self.inner
        if around > 1:
            sizes = (self.outer, x.shape[self.dim] // around, self.inner)
            x = x.unflatten(
                self.dim, [size for at, size in enumerate(sizes) if at == 1 or size > 1]
            )
        return x.movedim(self.dim + (self.outer > 1), 0)

    def back(self, x: Tensor) -> Tensor:
        """The tensor of which `first` is a view."""
        if self.is_first:
            return x
        x = x.movedim(0, self.dim + (self.outer > 1))
        return x.flatten(self.dim, self.dim + (self.outer > 1) + (self.inner > 1))


FIRST = Place()
Places = tuple[Place | None, ...]
"""Of the tensors in a value, in order; None: it has no batch."""


@dataclass(frozen=True)
class Changed:
    """A function that runs an operation in a way of its own.

    Attributes:
        target: the function; of a method, its name.
    """

    target: Any

    @property
    def __name__(self) -> str:
        return str(getattr(self.target, "__name__", self.target))

    def run(self, args: Any, kwargs: Any) -> Any:
        """Runs the operation as it is."""
        if isinstance(self.target, str):
            return getattr(args[0], self.target)(*args[1:], **kwargs)
        return self.target(*args, **kwargs)


@dataclass(frozen=True)
class Under(Changed):
    """A function that runs an operation under a context."""

    context: Context

    @property
    def __name__(self) -> str:
        """The name of the operation, after the context's."""
        return (
            f"no_autocast_{super().__name__}"
            if self.context.gradients
            else f"no_grad_{super().__name__}"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.context.entered():
            return self.run(args, kwargs)


@dataclass(frozen=True)
class Moved(Changed):
    """A function that runs an operation whose values have the batch elsewhere.

    Attributes:
        into: where the operation has the batch in each tensor that it reads; here it comes first.
        out: where it has it in each tensor that it gives.
    """

    into: Places
    out: Places

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _moved(self.run, (args, kwargs), self.into, self.out)


class MovedModule(nn.Module):
    """A module without weights, as `Moved`."""

    def __init__(self, inner: nn.Module, into: Places, out: Places) -> None:
        super().__init__()
        self.inner, self.into, self.out = inner, into, out
        self.train(inner.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _moved(lambda a, k: self.inner(*a, **k), (args, kwargs), self.into, self.out)


def _moved(run: Callable[[Any, Any], Any], given: Any, into: Places, out: Places) -> Any:
    places = iter(into)

    def back(x: Tensor) -> Tensor:
        place = next(places)
        return x if place is None else place.back(x)

    result = run(*pytree.tree_map_only(Tensor, back, given))
    made = iter(out)

    def first(x: Tensor) -> Tensor:
        place = next(made)
        return x if place is None else place.first(x)

    return pytree.tree_map_only(Tensor, first, result)


def operation_of(node: Node) -> Any:
    """What a node calls, whatever it is under, and wherever the batch lies."""
    target: Any = node.target
    while isinstance(target, Changed):
        target = target.target
    return target


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
    """Runs an operation of a traced graph; of kind "" it is `root` itself."""
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
    target = operation_of(node)
    unfilled = getattr(target, "__name__", target) in _UNFILLED and not is_users_function(target)
    sizes = all(isinstance(size, int | torch.Size) for size in args[1:])
    given = target == "new" and not sizes  # as in x.new([1.0, 2.0])
    if unfilled and not given and node.op != "call_module":
        for tensor in tensors(value):
            tensor.zero_()
    return value


def is_users_function(target: Any) -> bool:
    """Whether a node calls a function of the user's, which the library does not know."""
    while isinstance(target, Changed):
        target = target.target
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
