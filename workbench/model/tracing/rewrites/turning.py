"""New operations in a traced graph that bring the batch to dimension 0, and back from there."""

import operator
from collections.abc import Callable
from typing import Any, cast

import torch.fx
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from workbench.model.tracing.batch import BATCHES, name_of, tensors

Recorder = Callable[[Node], None]
"""Runs a new node at both batch sizes, and sets its `meta`."""

_SWAPS = {"transpose", "swapaxes", "swapdims"}


class Turning:
    """Makes operations in the place of one.

    Args:
        graph: the traced graph of a `ValueTracer`, with its values.
        node: the operation, which stands at the same line of the same module.
        record: sets the `meta` of a new node.
    """

    def __init__(self, graph: torch.fx.Graph, node: Node, record: Recorder) -> None:
        self._graph, self._record = graph, record
        self._of_node = {name: node.meta[name] for name in ("line", "module")}
        self._turned: dict[Node, Node] = {}

    def turned(self, value: Node) -> Node:
        """The value with its dimensions 0 and 1 swapped; what was swapped before is itself."""
        if value not in self._turned:
            before = _swapped(value)
            made = before or self._new(self._graph.call_method, "transpose", (value, 0, 1))
            self._turned[value] = made
        return self._turned[value]

    def part(self, whole: Node, place: int) -> Node:
        """One of the values that an operation gives."""
        return self._new(self._graph.call_function, operator.getitem, (whole, place))

    def call(self, node: Node, args: Any, kwargs: Any) -> Node:
        """The same operation of other values."""
        return self._new(self._graph.create_node, node.op, node.target, args, kwargs)

    def _new(self, make: Callable[..., Node], *arguments: Any) -> Node:
        made = make(*arguments)
        made.meta.update(self._of_node)
        self._record(made)
        return made


def _swapped(value: Node) -> Node | None:
    """What a value is with its dimensions 0 and 1 swapped; None: it is nothing of that kind."""
    source = value.args[0] if value.args else None
    if not isinstance(source, Node) or value.kwargs or value.op == "call_module":
        return None
    name, dims = name_of(value), tuple(value.args[1:])
    if name == "permute":
        dims = tuple(dims[0]) if isinstance(dims[0], tuple | list) else dims
        return source if dims == (1, 0, *range(2, len(dims))) else None
    flat = name in ("t", "T") and value.meta["values"][0].ndim == 2
    return source if flat or (name in _SWAPS and dims in ((0, 1), (1, 0))) else None


def is_turned(node: Node) -> bool:
    """Whether a value is one tensor that has the batch in dimension 1."""
    few, many = BATCHES
    small, large = (tensors(value) for value in node.meta["values"])
    if not isinstance(node.meta["values"][0], Tensor) or len(small) != 1 or small[0].ndim < 2:
        return False
    as_first = [(each[0].shape[1], each[0].shape[0], *each[0].shape[2:]) for each in (small, large)]
    return [first for first, *_ in as_first] == [few, many] and as_first[0][1:] == as_first[1][1:]


def read_types_before_swaps(graph: torch.fx.Graph) -> None:
    """Makes what asks for the type or device of a swapped value ask for that of what was swapped.

    So a mask that is made of that type has nothing to do with where the batch is.
    """
    for node in graph.nodes:
        if node.target is getattr and node.args[1] in ("dtype", "device"):
            source, name = node.args
            while (before := _swapped(source)) is not None:
                source = before
            node.args = (source, name)


def drop_unread(graph: torch.fx.Graph) -> None:
    """Erases swaps that nothing reads: their readers read what was swapped."""
    for node in reversed(graph.nodes):
        if not node.users and node.op in ("call_method", "call_function"):
            if _swapped(node) is not None:
                graph.erase_node(node)


def give(graph: torch.fx.Graph, old: Node, new: Any) -> None:
    """Makes the readers of a value, or of parts of it, read others instead, and erases it."""
    for user in list(old.users):
        if isinstance(new, tuple) and user.target is operator.getitem:
            give(graph, user, new[cast(int, user.args[1])])
        else:
            user.args = _with(user.args, old, new)
            user.kwargs = _with(user.kwargs, old, new)
    graph.erase_node(old)


def _with(arguments: Any, old: Node, new: Any) -> Any:
    return map_aggregate(arguments, lambda each: new if each is old else each)
