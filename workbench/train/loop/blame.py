"""Which layer first gave a value that is no number."""

from typing import Any

import torch
import torch.fx
from torch import Tensor

from workbench.comm.collectives import all_gather
from workbench.comm.groups.group import Group
from workbench.layers.cut_model import CutModel
from workbench.plan.placement import Shard


def first_bad_layer(model: CutModel, images: Tensor, world: Group) -> str:
    """Runs the forward pass once more and names the first layer with a NaN or infinity.

    Every rank takes part, since the forward pass communicates; all get the same answer.
    """
    nodes = [node.name for node in model.traced.graph.nodes]
    watch = _Watch(model.traced)
    with torch.no_grad():
        watch.run(images)
    mine = nodes.index(watch.first) if watch.first else len(nodes)
    every = all_gather(torch.tensor([mine]), Shard(0, (1,) * world.size), world, layer="blame")
    first = int(every.min())
    if first == len(nodes):
        return "the loss"
    by_node = {layer.node: layer.name for layer in model.plan.graph.layers}
    return f"layer {by_node.get(nodes[first], nodes[first])!r}"


class _Watch(torch.fx.Interpreter):
    first = ""

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        if not self.first and isinstance(value, Tensor) and not torch.isfinite(value).all():
            self.first = n.name
        return value
