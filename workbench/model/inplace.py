"""What operations in place mean for a graph, which only says what each operation gives."""

import torch.fx
from torch import nn
from torch.fx import Node
from torch.nn.modules.batchnorm import _BatchNorm

from workbench.model.batch import name_of, tensors
from workbench.model.errors import OperationError


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
    """Removes what is computed, but used by nothing that the model is trained on.

    Raises:
        TraceError: it changes a tensor in place, such as a buffer that counts, or the running
            statistics of a batch norm: the change would be lost.
    """
    for node in reversed(graph.nodes):
        if node.users or node.op in ("placeholder", "output"):
            continue
        value = node.meta["values"][0]
        if tensors(value) and _changes_in_place(node, root):
            raise OperationError(
                node,
                f"{name_of(node)} changes a tensor in place that nothing reads afterwards, and the "
                "change would be lost: state of the model itself is not supported, but for the "
                "statistics of nn.BatchNorm; of a part of a tensor, use torch.where or torch.cat",
            )
        if node.op == "call_module" and _keeps_statistics(root.get_submodule(str(node.target))):
            raise OperationError(
                node,
                f"{node.target!r} keeps running statistics of what nothing is trained on, and they "
                "would be lost: do not call it in forward, or declare its output as auxiliary",
            )
        if value is not None or node.op == "get_attr":
            graph.erase_node(node)


def _keeps_statistics(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.training and module.running_mean is not None


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
