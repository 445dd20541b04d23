"""Values whose batch lies elsewhere than in dimension 0, as values that have it there.

A plan places values that have the batch in dimension 0. Models permute it away: attention written
out has [3, B, heads, tokens, features], `nn.MultiheadAttention` and recurrent layers get
[tokens, B, features] unless told otherwise, and [tokens x B, features] counts it with something.
Where the batch of each value lies follows from its shapes at two batch sizes and from what it is
made of. In the graph each of them has the batch in dimension 0 (`batch.Place`):

    a permutation, or a view    nothing, where the value is then the one that it was made of
    linear layers, norms of features, embeddings, activations, dropout, sums
                                the same, which does not mind
    attention, recurrent layers the same, told to read the batch first
    any other operation         `Moved`: the batch is moved to where it lay, and back

A wrong guess of where the batch lies mixes samples, which the trials find (`independence.py`).
"""

import inspect
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch.fx
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from workbench.model.errors import OperationError
from workbench.model.record.batch import (
    BATCHES,
    FIRST,
    REMEDY,
    Moved,
    MovedModule,
    Place,
    Places,
    has_tensors,
    name_of,
    operation_of,
    tensors,
)
from workbench.model.record.extended import NamedLinear, TransposedLinear
from workbench.model.record.in_place import Assigned, changes_in_place
from workbench.model.record.layers import kind_of

_RESHAPES = {"view", "reshape", "flatten", "unflatten", "Flatten", "Unflatten"}
_VIEWS = {
    *("transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "t", "T", "mT"),
    *("contiguous", *_RESHAPES),
}
# The kinds that keep each element where it is.
_IN_ORDER = ("elementwise", "dropout", "add", "mul")
_OF_FEATURES = (nn.Linear, TransposedLinear, NamedLinear, nn.LayerNorm, nn.RMSNorm, nn.Embedding)


class _BatchFirst(nn.RNNBase):
    """A recurrent layer whose input, output and states all have the batch in dimension 0."""

    def forward(self, x: Tensor, states: Any = None) -> tuple[Tensor, Any]:
        if states is not None:
            states = tree_map(_turned, states)
        output, states = super().forward(x if self.batch_first else _turned(x), states)
        return output if self.batch_first else _turned(output), tree_map(_turned, states)


class BatchFirstLSTM(_BatchFirst, nn.LSTM):  # type: ignore[misc]
    """An LSTM whose states have the batch first."""


class BatchFirstGRU(_BatchFirst, nn.GRU):  # type: ignore[misc]
    """A GRU whose state has the batch first."""


class BatchFirstRNN(_BatchFirst, nn.RNN):  # type: ignore[misc]
    """An Elman network whose state has the batch first."""


_RECURRENT: dict[type[nn.Module], type[nn.Module]] = {
    nn.LSTM: BatchFirstLSTM,
    nn.GRU: BatchFirstGRU,
    nn.RNN: BatchFirstRNN,
}


def _turned(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous()


def put_batch_first(
    graph: torch.fx.Graph, roots: Sequence[nn.Module], record: Callable[[Node], None]
) -> None:
    """Makes all operations of a graph read and give values with the batch in dimension 0.

    Raises:
        OperationError: an operation has weights and cannot be told where the batch is, works in
            place, or gives a value of which no dimension counts the batch.
    """
    _Mover(graph, roots, record).run()


class _Mover:
    """Moves the batch of each value in order.

    Attributes:
        new: the node that stands for each of the nodes so far.
        values: each node's value at both batch sizes, as the model's own code sees it.
        sources: what it reads there.
        why: why its value cannot be had by rows, if it cannot.
        places: where the batch lies in each tensor of its value; None: nowhere.
        told: the calls of layers that read and give the batch first now.
    """

    def __init__(
        self,
        graph: torch.fx.Graph,
        roots: Sequence[nn.Module],
        record: Callable[[Node], None],
    ) -> None:
        self.graph, self.roots, self.record = graph, roots, record
        self.new: dict[Node, Node] = {}
        self.values: dict[Node, tuple[Any, Any]] = {}
        self.sources: dict[Node, list[Node]] = {}
        self.why: dict[Node, str] = {}
        self.places: dict[Node, list[Place | None]] = {}
        self.told: set[Node] = set()

    def run(self) -> None:
        self._tell_layers()
        for node in list(self.graph.nodes):
            sources: list[Node] = []
            map_arg((node.args, node.kwargs), sources.append)
            if node.op == "output":
                self._check_returned(sources)
            else:
                self.values[node], self.sources[node] = node.meta["values"], sources
                self.why[node] = node.meta["elsewhere"] or (
                    f"the rows of {name_of(node)}'s result are not those of one sample after the "
                    f"other. {REMEDY}"
                )
                self.places[node] = list(self._places(node, sources))
            node.args, node.kwargs = map_arg((node.args, node.kwargs), self.new.__getitem__)
            self.new[node] = node
            read = [place for source in sources for place in self.places[source]]
            moved = any(each and not each.is_first for each in read + self.places.get(node, []))
            if node.op != "output" and (moved or node in self.told):
                self._move(node, sources, read)
        for node in reversed(list(self.graph.nodes)):
            if self.new[node] is not node:
                self.graph.erase_node(node)
        self.graph.lint()

    def _tell_layers(self) -> None:
        """Tells attention and recurrent layers that the batch comes first."""
        calls: dict[str, list[Node]] = {}
        for node in self.graph.nodes:
            if node.op == "call_module":
                calls.setdefault(str(node.target), []).append(node)
        for path, nodes in calls.items():
            modules = [root.get_submodule(path) for root in self.roots]
            first = modules[0]
            if first._forward_hooks or first._forward_pre_hooks:
                continue
            if type(first) is nn.MultiheadAttention and not first.batch_first:
                if all(_has_tokens_first(each) for node in nodes for each in _attended(node)):
                    self.told.update(nodes)
                    for module in modules:
                        cast(Any, module).batch_first = True
            elif type(first) in _RECURRENT:
                inputs = (node.args[0] if node.args else node.kwargs["input"] for node in nodes)
                right = all(_has_tokens_first(each) != first.batch_first for each in inputs)
                if right and any(_has_states(node) or not first.batch_first for node in nodes):
                    self.told.update(nodes)
                    for module in modules:
                        module.__class__ = _RECURRENT[type(module)]

    def _check_returned(self, sources: Sequence[Node]) -> None:
        for source in sources:
            away: Node | None = source if self._is_away(source) else None
            while away is not None:  # to the first that moved it
                first, away = away, next(filter(self._is_away, self.sources[away]), None)
                if away is None:
                    raise OperationError(first, self.why[first])

    def _is_away(self, node: Node) -> bool:
        return any(place and not place.is_first for place in self.places[node])

    def _places(self, node: Node, sources: Sequence[Node]) -> Iterator[Place | None]:
        """Where the batch lies in each tensor of a node's value."""
        few, many = BATCHES
        for number, (a, b) in enumerate(zip(*map(tensors, node.meta["values"]), strict=False)):
            dims = [dim for dim, (m, n) in enumerate(zip(a.shape, b.shape, strict=False)) if m != n]
            if a.shape == b.shape:
                yield None
            elif a.ndim == b.ndim and len(dims) == 1:
                (dim,) = dims
                count, rest = divmod(a.shape[dim], few)
                if rest or b.shape[dim] != count * many:
                    raise OperationError(node, self.why[node])
                yield Place(dim, *self._around(node, sources, dim, count))
            elif number == 0:
                raise OperationError(node, self.why[node])
            else:
                yield None  # nothing can read it

    def _around(self, node: Node, sources: Sequence[Node], dim: int, count: int) -> tuple[int, int]:
        """(what is counted outside of the batch, and inside) by a dimension of so many batches."""
        read = [(one, place) for one in sources for place in self.places[one] if place]
        if count > 1 and self._name(node) in _RESHAPES and len(read) == 1:
            ((source, place),) = read
            step = place.inner * math.prod(self.values[source][0].shape[place.dim + 1 :])
            inner, rest = divmod(step, math.prod(node.meta["values"][0].shape[dim + 1 :]) or 1)
            if not rest and inner and count % inner == 0:
                return count // inner, inner
        alike = (place for _, place in read if place.outer * place.inner == count)
        found = next(alike, Place(0, 1, count))
        return found.outer, found.inner

    def _move(self, node: Node, sources: Sequence[Node], read: Sequence[Place | None]) -> None:
        """Makes an operation read and give the batch first."""
        if node.target is operator.getitem and isinstance(self.values[sources[0]][0], tuple | list):
            self.record(node)
            return
        if self._is_same(node, sources):
            self.new[node] = self.new[sources[0]]
            return
        module = self.roots[0].get_submodule(str(node.target)) if node.op == "call_module" else None
        if self._changes(node):
            raise OperationError(
                node,
                f"{name_of(node)} works in place while the batch is elsewhere than in dimension "
                "0: make a new tensor instead",
            )
        if self._is_told(node, module, read):
            return
        if module is not None and has_tensors(module):
            raise OperationError(
                node,
                f"{type(module).__name__} has weights, and gets the batch elsewhere than in "
                f"dimension 0: {REMEDY}",
            )
        into, out = tuple(read), tuple(self.places[node])
        if module is None:
            node.op, node.target = "call_function", Moved(node.target, into, out)
        else:
            node.target = self._moved_module(str(node.target), into, out)
        self.record(node)

    def _is_same(self, node: Node, sources: Sequence[Node]) -> bool:
        """Whether a value is the one that it was made of, once both have the batch first."""
        if self._name(node) not in _VIEWS or operation_of(node) is not node.target:
            return False
        source = sources[0]
        pairs = zip(self.values[node], self.values[source], strict=True)
        if not all(isinstance(each, Tensor) for pair in pairs for each in pair):
            return False
        (place,), (before,) = self.places[node], self.places[source]
        return bool(place and before) and all(
            _described(cast(Place, place).first(made)) == _described(cast(Place, before).first(x))
            for made, x in zip(self.values[node], self.values[source], strict=True)
        )

    def _is_told(self, node: Node, module: nn.Module | None, read: Sequence[Place | None]) -> bool:
        """Whether an operation does the same on values that have the batch first; then it does."""
        if node not in self.told and not self._may_be_alike(node, module, read):
            return False
        try:
            self.record(node)
        except Exception:  # whatever it is that does not fit
            return False
        if not tensors(node.meta["values"][0]):
            return bool(node.meta["values"] == self.values[node])
        places = self.places[node]
        for made, seen in zip(node.meta["values"], self.values[node], strict=True):
            due = zip(tensors(seen), places, strict=True)
            shapes = [tuple((place or FIRST).first(each).shape) for each, place in due]
            # Attention's fast path gives an empty tensor where there are no weights.
            if shapes != [tuple(each.shape) for each in tensors(made)][: len(shapes)]:
                return False
        if module is not None and has_tensors(module):
            return True
        return kind_of(node, module) in _IN_ORDER

    def _may_be_alike(
        self, node: Node, module: nn.Module | None, read: Sequence[Place | None]
    ) -> bool:
        if not tensors(self.values[node][0]):
            return True
        if not read or len({*read, *self.places[node]}) > 1:
            return False
        if module is None or not has_tensors(module):
            return True
        if type(module) not in _OF_FEATURES or module._forward_hooks or module._forward_pre_hooks:
            return False
        features = 0 if type(module) is nn.Embedding else 1
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            features = len(module.normalized_shape)
        ndim = self.values[node][0].ndim - (type(module) is nn.Embedding)
        return cast(Place, read[0]).dim < ndim - features

    def _changes(self, node: Node) -> bool:
        """Whether an operation writes into what it reads; assignments make new values."""
        if isinstance(operation_of(node), Assigned):
            return False
        return bool(node.all_input_nodes) and changes_in_place(node, self.roots[0])

    def _moved_module(self, path: str, into: Places, out: Places) -> str:
        """The path of a new module around one without weights."""
        made = f"{path}_moved"
        while any(made == name for name, _ in self.roots[0].named_modules()):
            made += "_"
        owner, _, name = made.rpartition(".")
        for root in self.roots:
            inner = root.get_submodule(path)
            root.get_submodule(owner).add_module(name, MovedModule(inner, into, out))
        return made

    def _name(self, node: Node) -> str:
        if node.op == "call_module":
            return type(self.roots[0].get_submodule(str(node.target))).__name__
        return str(node.args[1]) if node.target is getattr else name_of(node)


def _has_tokens_first(node: Any) -> bool:
    """Whether a value is one tensor that has the batch in dimension 1, and nothing beside it."""
    small, large = node.meta["values"]
    if not isinstance(small, Tensor) or small.ndim < 2:
        return False
    rest = [(*each.shape[:1], *each.shape[2:]) for each in (small, large)]
    return (small.shape[1], large.shape[1]) == BATCHES and rest[0] == rest[1]


def _attended(node: Node) -> list[Any]:
    """The query, key and value of a call of attention."""
    given = inspect.signature(nn.MultiheadAttention.forward).bind(None, *node.args, **node.kwargs)
    return [given.arguments[name] for name in ("query", "key", "value")]


def _has_states(node: Node) -> bool:
    """Whether a recurrent layer is given states, or those that it gives are read."""
    if len(node.args) + len(node.kwargs) > 1:
        return True
    return any(user.target is not operator.getitem or user.args[1] != 0 for user in node.users)


def _described(x: Tensor) -> tuple[Any, ...]:
    memory = x.untyped_storage()._cdata, x.storage_offset()
    return *memory, tuple(x.shape), x.stride(), x.dtype, x.is_conj()
