"""What operations in place mean for a graph, which only says what each operation gives."""

import torch.fx
from torch import nn
from torch.fx import Node

from workbench.model.batch import name_of, tensors
from workbench.model.errors import TraceError


def read_what_was_changed(graph: torch.fx.Graph, root: nn.Module) -> None:
    """Lets whatever reads a tensor after an operation changed it in place read the operation."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.all_input_nodes and _changes_in_place(node, root):
            changed = node.kwargs.get("out") or node.all_input_nodes[0]
            assert isinstance(changed, Node)
            for reader in list(changed.users):
                if place[reader] > place[node]:
                    reader.replace_input_with(changed, node)


def drop_unused(graph: torch.fx.Graph, root: nn.Module) -> None:
    """Removes sizes and parameters that were looked at, but are used by nothing.

    Raises:
        TraceError: a tensor is changed in place and used by nothing afterwards, such as a
            buffer that counts: the change would be lost.
    """
    for node in reversed(graph.nodes):
        if node.users or node.op in ("placeholder", "output"):
            continue
        value = node.meta["values"][0]
        if node.op == "get_attr" or not (tensors(value) or value is None):
            graph.erase_node(node)
        elif _changes_in_place(node, root):
            raise TraceError(
                f"{name_of(node)} changes a tensor in place that nothing reads afterwards, and the "
                "change would be lost: state of the model itself is not supported, but for the "
                "statistics of nn.BatchNorm"
            )


def _changes_in_place(node: Node, root: nn.Module) -> bool:
    """Whether an operation writes into what it reads, by torch's conventions."""
    name = name_of(node)
    if node.op == "call_module":
        return bool(getattr(root.get_submodule(str(node.target)), "inplace", False))
    by_name = name.endswith("_") and not name.endswith("__")
    asked = (
        node.kwargs.get("inplace")
        or node.kwargs.get("out") is not None
        or node.meta.get("in_place")
    )
    return by_name or bool(asked)
