"""Operations in place, in a graph that only records each operation's result."""

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.fx import Node
from torch.nn.modules.batchnorm import _BatchNorm

from workbench.model.errors import OperationError
from workbench.model.record.batch import (
    Changed,
    Under,
    is_users_function,
    name_of,
    operation_of,
    tensors,
)


@dataclass(frozen=True)
class Assigned:
    """`x += y` and the like without a change in place, and `x[index] = y`.

    The result has the type of x, as one that is written into x has: under autocast, x + y may have
    another one.
    """

    function: Callable[..., Any]

    @property
    def __name__(self) -> str:
        return self.function.__name__

    def __call__(self, x: Tensor, *given: Any) -> Tensor:
        """The value of x afterwards."""
        if self == SETITEM:
            copy = x.clone()
            copy[given[0]] = given[1]
            return copy
        result: Tensor = self.function(x, *given)
        if result.shape != x.shape or not torch.can_cast(result.dtype, x.dtype):
            raise RuntimeError(
                f"{result.dtype} of shape {tuple(result.shape)} cannot be written into {x.dtype} "
                f"of {tuple(x.shape)}"
            )
        return result.to(x.dtype)


SETITEM = Assigned(operator.setitem)


def read_what_was_changed(
    graph: torch.fx.Graph, root: nn.Module, record: Callable[[Node], None]
) -> None:
    """Makes readers of a tensor that an operation changed in place read the operation instead.

    What is changed may be a part, taken by an index: then readers of the whole read it with the
    changed part.

    Raises:
        OperationError: another tensor in the same memory is read afterwards.
    """
    _Changes(graph, root, record).run()


class _Changes:
    def __init__(
        self, graph: torch.fx.Graph, root: nn.Module, record: Callable[[Node], None]
    ) -> None:
        self.graph, self.root, self.record = graph, root, record
        self.place: dict[Node, float] = {node: place for place, node in enumerate(graph.nodes)}
        self.memory = {node: _memory(node) for node in graph.nodes}
        self.lying: dict[int, list[Node]] = {}  # nodes by their tensors' memory
        self.newest: dict[Node, Node] = {}  # of a tensor, itself with its changed parts
        self.made: set[Node] = set()  # those
        for node in graph.nodes:
            self._lies(node, self.memory[node])

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if not node.all_input_nodes or not changes_in_place(node, self.root):
                continue
            changed = node.kwargs.get("out") or node.all_input_nodes[0]
            assert isinstance(changed, Node)
            alike = [other for memory in self.memory[changed] for other in self.lying[memory]]
            self._write_back(node, changed)
            self._refuse_other_views(node, changed, alike)
            for reader in self._later(changed, node):
                reader.replace_input_with(changed, node)
            self._lies(node, self.memory[changed])  # also where a graph holds a copy

    def _write_back(self, node: Node, changed: Node) -> None:
        """Gives readers of the tensors that a changed one is a part of the changed part."""
        bases: list[tuple[Node, Any]] = []
        part = self._part(changed)
        while part is not None:
            base = part.args[0]
            assert isinstance(base, Node)
            bases.append((base, part.args[1]))
            part = self._part(base)
        value = node
        while bases and not self._later(self.newest.get(bases[-1][0], bases[-1][0]), node):
            bases.pop()
        for base, index in bases:
            whole = self.newest.get(base, base)
            later = self._later(whole, node)
            if base.op == "get_attr" or (later and _is_written_back(node, changed, base, later[0])):
                return
            value = self._with_part(whole, index, value)
            for reader in later:
                reader.replace_input_with(whole, value)
            self.newest[base] = value

    def _with_part(self, whole: Node, index: Any, part: Node) -> Node:
        context = part.target.context if isinstance(part.target, Under) else None
        target: Any = SETITEM if context is None else Under(SETITEM, context)
        with self.graph.inserting_after(part):
            made = self.graph.call_function(target, (whole, index, part))
        made.meta.update(line=part.meta["line"], module=part.meta["module"])
        self.record(made)
        self.place[made], self.memory[made] = self.place[part] + 1e-6, self.memory[whole]
        self._lies(made, self.memory[whole])
        self.made.add(made)
        return made

    def _refuse_other_views(self, node: Node, changed: Node, alike: Iterable[Node]) -> None:
        """Checks that a change is not seen through another tensor in the same memory.

        A change of a parameter through its `data` is always refused.
        """
        for other in alike:
            if other in (node, changed):
                continue
            if other.op == "get_attr":
                raise OperationError(
                    node,
                    f"{name_of(node)} changes {other.target!r} as the model runs, each rank by its "
                    "own rows: let the optimizer do so, or give the forward pass a new tensor",
                )
            reader = next(iter(self._later(other, node)), None)
            if reader is not None and self.place[other] < self.place[node]:
                if _is_written_back(node, changed, other, reader):
                    continue
                raise OperationError(
                    node,
                    f"{name_of(node)} changes {changed.name!r} in place, and with it "
                    f"{other.name!r}, which lies in the same memory and is read afterwards, by "
                    f"{name_of(reader)}: make a new tensor instead, with torch.cat, torch.where or "
                    "x = x + 1",
                )

    def _part(self, changed: Node) -> Node | None:
        """The operation that took a tensor as a part of another, whatever changed it since."""
        while changed.all_input_nodes and changes_in_place(changed, self.root):
            changed = changed.all_input_nodes[0]
        if operation_of(changed) is not operator.getitem:
            return None
        # One of several tensors, as of chunk, is no part of one.
        return changed if isinstance(_value(changed.args[0]), Tensor) else None

    def _later(self, read: Node, node: Node) -> list[Node]:
        """What reads a value after a node, in order."""
        later = (user for user in read.users if self.place[user] > self.place[node])
        return sorted((user for user in later if user not in self.made), key=self.place.__getitem__)

    def _lies(self, node: Node, memory: Iterable[int]) -> None:
        for one in memory:
            self.lying.setdefault(one, []).append(node)


def _is_written_back(node: Node, changed: Node, other: Node, reader: Node) -> bool:
    """Whether the first that reads a tensor writes into it what was made of its part.

    So does `x[0] *= 2`: a part is taken, changed, and assigned to where it came from.
    """
    if operation_of(changed) is not operator.getitem or operation_of(reader) != SETITEM:
        return False
    return changed.args[0] is other and reader.args == (*changed.args, node)


def _memory(node: Node) -> set[int]:
    """The storages of the tensors that a node gives."""
    return {tensor.untyped_storage()._cdata for tensor in tensors(_value(node))}


def _value(node: Any) -> Any:
    return node.meta.get("values", (None,))[0]  # the output has none of its own


def drop_unused(graph: torch.fx.Graph, root: nn.Module) -> None:
    """Removes operations whose results do not affect what the model is trained on.

    That may be a change in place whose result nothing reads (`read_what_was_changed`).

    Raises:
        OperationError: the running statistics of a batch norm would be lost.
    """
    for node in reversed(graph.nodes):
        if node.users or node.op in ("placeholder", "output"):
            continue
        if node.op == "call_module" and _keeps_statistics(root.get_submodule(str(node.target))):
            raise OperationError(
                node,
                f"{node.target!r} keeps running statistics of what nothing is trained on, and they "
                "would be lost: do not call it in forward, or declare its output as auxiliary",
            )
        if node.meta["values"][0] is not None or node.op == "get_attr":
            graph.erase_node(node)


def drop_unread_parts(graph: torch.fx.Graph) -> None:
    """Removes parts that nothing reads of what an operation gives, as of `out, _ = self.rnn(x)`.

    The batch may lie elsewhere in them, which would matter to readers alone.
    """
    for node in reversed(graph.nodes):
        if node.target is operator.getitem and not node.users:
            graph.erase_node(node)


def _keeps_statistics(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.training and module.running_mean is not None


def changes_in_place(node: Node, root: nn.Module) -> bool:
    """Whether an operation writes into its input, by torch's conventions.

    A function of the user's follows none: one that writes is refused as it is recorded.
    """
    if node.op == "call_module":
        return bool(getattr(root.get_submodule(str(node.target)), "inplace", False))
    if is_users_function(node.target):
        return False
    asked = (
        node.kwargs.get("inplace")
        or node.kwargs.get("out") is not None
        or node.meta.get("in_place")
    )
    return named_in_place(node.target) or bool(asked)


def named_in_place(target: Any) -> bool:
    """Whether a method's name, or that of a function of torch, ends as of those in place.

    Names of others mean nothing: `operator.and_` is no keyword, and changes nothing. Nor are values
    changed by `requires_grad_`.
    """
    while isinstance(target, Changed):
        target = target.target
    of_torch = str(getattr(target, "__module__", "")).partition(".")[0] == "torch"
    name = target if isinstance(target, str) else getattr(target, "__name__", "") * of_torch
    return name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
