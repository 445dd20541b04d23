"""Operations in place, in a graph that only records each operation's result."""

import operator
from collections.abc import Iterable
from typing import Any

import torch.fx
from torch import nn
from torch.fx import Node
from torch.nn.modules.batchnorm import _BatchNorm

from workbench.model.errors import OperationError
from workbench.model.tracing import assigned
from workbench.model.tracing.batch import is_users_function, name_of, tensors
from workbench.model.tracing.contexts import Under


def read_what_was_changed(graph: torch.fx.Graph, root: nn.Module) -> None:
    """Makes readers of a tensor that an operation changed in place read the operation instead.

    Raises:
        OperationError: another tensor in the same memory is read afterwards.
    """
    place = {node: index for index, node in enumerate(graph.nodes)}
    lying: dict[int, list[Node]] = {}  # nodes by their tensors' memory
    for node in graph.nodes:
        for memory in _memory(node):
            lying.setdefault(memory, []).append(node)
    for node in graph.nodes:
        if node.all_input_nodes and changes_in_place(node, root):
            changed = node.kwargs.get("out") or node.all_input_nodes[0]
            assert isinstance(changed, Node)
            alike = (other for memory in _memory(changed) for other in lying[memory])
            _refuse_other_views(node, changed, alike, place)
            for reader in list(changed.users):
                if place[reader] > place[node]:
                    reader.replace_input_with(changed, node)


def _refuse_other_views(
    node: Node, changed: Node, alike: Iterable[Node], place: dict[Node, int]
) -> None:
    """Checks that a change is not seen through another tensor, such as one that this is a view of.

    A change of a parameter through its `data` is always refused.
    """
    for other in alike:
        if other in (node, changed):
            continue
        if other.op == "get_attr":
            raise OperationError(
                node,
                f"{name_of(node)} changes {other.target!r} as the model runs, each rank by its own "
                "rows: let the optimizer do so, or give the forward pass a new tensor",
            )
        later = [user for user in other.users if place[user] > place[node]]
        reader = min(later, key=place.__getitem__, default=None)
        if reader is not None and place[other] < place[node]:
            if _is_written_back(node, changed, other, reader):
                continue
            raise OperationError(
                node,
                f"{name_of(node)} changes {changed.name!r} in place, and with it {other.name!r}, "
                f"which lies in the same memory and is read afterwards, by {name_of(reader)}: "
                "make a new tensor instead, with torch.cat, torch.where or x = x + 1",
            )


def _is_written_back(node: Node, changed: Node, other: Node, reader: Node) -> bool:
    """Whether the first that reads a tensor writes into it what was made of its part.

    So does `x[0] *= 2`: a part is taken, changed, and assigned to where it came from.
    """
    if changed.target is not operator.getitem or reader.target is not assigned.setitem:
        return False
    return changed.args[0] is other and reader.args == (*changed.args, node)


def _memory(node: Node) -> set[int]:
    """The storages of the tensors that a node gives."""
    values = node.meta.get("values", (None,))  # the output has none of its own
    return {tensor.untyped_storage()._cdata for tensor in tensors(values[0])}


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
    target = target.target if isinstance(target, Under) else target
    of_torch = str(getattr(target, "__module__", "")).partition(".")[0] == "torch"
    name = target if isinstance(target, str) else getattr(target, "__name__", "") * of_torch
    return name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
