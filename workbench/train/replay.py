"""A part of a model, executed node by node instead of by its generated code.

The same operations in the same order, and every value is dropped after its last reader, as the
code does it: results and memory are the same. It takes some microseconds more for each node.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.fx
from torch.fx.node import map_arg

Runner = Callable[[torch.fx.GraphModule, torch.fx.Node, Callable[[], Any]], Any]


class Replay:
    """What takes the place of a graph module's `forward`.

    Args:
        part: a graph module.
        run: is given the part, a node that calls something and what does so; gives what it gave.
    """

    def __init__(self, part: torch.fx.GraphModule, run: Runner) -> None:
        self.part, self.run = part, run
        self.modules = {
            node: part.get_submodule(str(node.target))
            for node in part.graph.nodes
            if node.op == "call_module"
        }
        self.last_read: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        seen: set[torch.fx.Node] = set()
        for node in reversed(part.graph.nodes):
            own = dict.fromkeys(n for n in node.all_input_nodes if n not in seen)
            self.last_read[node] = list(own)
            if node not in seen and not node.users:
                self.last_read[node].append(node)  # nobody reads it
            seen.update(own)

    def __call__(self, *inputs: Any) -> Any:
        values: dict[torch.fx.Node, Any] = {}
        given = iter(inputs)
        for node in self.part.graph.nodes:
            if node.op == "output":
                return map_arg(node.args[0], values.__getitem__)
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = _attribute(self.part, str(node.target))
            else:
                values[node] = self._call(node, values)
            for read in self.last_read[node]:
                del values[read]
        raise AssertionError("a graph has an output")

    def _call(self, node: torch.fx.Node, values: dict[torch.fx.Node, Any]) -> Any:
        args: Any = map_arg(node.args, values.__getitem__)
        kwargs: Any = map_arg(node.kwargs, values.__getitem__)
        target: Any = node.target
        if node.op == "call_module":
            target = self.modules[node]
        elif node.op == "call_method":
            args, target = args[1:], getattr(args[0], target)
        return self.run(self.part, node, partial(target, *args, **kwargs))


def _attribute(root: torch.fx.GraphModule, path: str) -> Any:
    value: Any = root
    for name in path.split("."):
        value = getattr(value, name)
    return value
