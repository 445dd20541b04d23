"""A traced structure as bytes, to be sent to the engines of this session (never to a file).

Nodes and submodules are packed, rather than the module as it was written: an engine need not
know its class, nor what a notebook marked by `torch.fx.wrap`. Nodes are packed one by one,
since `torch.fx.Graph` is pickled from node to node, and many nodes exceed Python's recursion.
"""

import io
import pickle
import zlib
from dataclasses import dataclass
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from workbench.model.errors import TraceError
from workbench.model.vision import torchvision


@dataclass(frozen=True)
class _Reference:
    """Stands for the node at this place."""

    place: int


def pack(traced: GraphModule) -> bytes:
    """A traced structure as bytes.

    Raises:
        TraceError: something in the module cannot be pickled.
    """
    submodules = nn.Module()
    for table in ("_parameters", "_buffers", "_modules"):
        getattr(submodules, table).update(getattr(traced, table))
    name = type(traced).__name__
    try:
        return zlib.compress(cloudpickle.dumps((name, submodules, _records(traced.graph))))
    except Exception as error:
        raise TraceError(
            f"{name} cannot be sent to engines, since it holds something that cannot be pickled: "
            f"{error}"
        ) from error


class _Unpickler(pickle.Unpickler):
    """Imports torchvision, where its classes are needed, also where its operators do not load."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name.partition(".")[0] == "torchvision":
            torchvision()
        return super().find_class(module_name, global_name)


def unpack(packed: bytes) -> GraphModule:
    """The inverse of `pack`."""
    name, submodules, records = _Unpickler(io.BytesIO(zlib.decompress(packed))).load()
    graph = Graph()
    nodes: list[Node] = []

    def node(leaf: Any) -> Any:
        return nodes[leaf.place] if isinstance(leaf, _Reference) else leaf

    for op, target, arguments, node_name in records:
        args, kwargs = map_aggregate(arguments, node)
        nodes.append(graph.create_node(op, target, args, kwargs, node_name))
    return GraphModule(submodules, graph, class_name=name)


def _records(graph: Graph) -> list[tuple[str, Any, Any, str]]:
    place = {node: _Reference(index) for index, node in enumerate(graph.nodes)}

    def reference(node: Node) -> Any:
        return place[node]

    return [
        (node.op, node.target, map_arg((node.args, node.kwargs), reference), node.name)
        for node in graph.nodes
    ]
