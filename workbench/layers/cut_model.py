"""One rank's part of a model, and the groups in which it communicates."""

from collections.abc import Iterable, Mapping
from typing import Any, Self

import torch.fx
from torch import Tensor, nn

from workbench.comm.groups.group import Group
from workbench.layers.local.context import BatchContext
from workbench.layers.recompute import with_segments
from workbench.plan.graph.graph import Graph
from workbench.plan.placement.flow import WeightPlacement
from workbench.plan.placement.placement import (
    replica_group,
    replica_groups,
    shard_group,
    shard_groups,
)
from workbench.plan.plans.plan import Plan

RankGroups = Mapping[tuple[str, tuple[int, ...]], Group]


def group_specs(plan: Plan) -> list[tuple[str, tuple[int, ...]]]:
    """Returns every (purpose, ranks) that a plan communicates in, in one order for all ranks.

    "shard" carries activations, "replica" gradients, "norm" statistics of batch norm: apart,
    since they are in flight at the same time.
    """
    flow, world = plan.flow, plan.world_size
    in_groups = _group_sizes(plan) | _group_sizes(plan.evaluation)
    held_in = {weight.group_size for weight in flow.weights.values()} | {1}
    specs = [("shard", ranks) for k in sorted(in_groups) for ranks in shard_groups(k, world)]
    specs += [("replica", ranks) for k in sorted(held_in) for ranks in replica_groups(k, world)]
    norms = [layer for layer in plan.graph.layers if plan.synchronizes(layer)]
    sizes = sorted({flow.inputs[layer.name].group_size for layer in norms})
    specs += [("norm", ranks) for k in sizes for ranks in replica_groups(k, world)]
    return specs


def _group_sizes(plan: Plan) -> set[int]:
    """Returns the sizes of the groups in which activations are converted, and losses computed."""
    flow = plan.flow
    crossings = [step for steps in (*flow.edges.values(), *flow.returns.values()) for step in steps]
    returned = {flow.returned(name).group_size for name in plan.graph.outputs}
    return returned | {step.group_size for step in crossings}


def input_node(nodes: torch.fx.Graph, graph: Graph, source: str) -> torch.fx.Node:
    """Returns the node of a traced model that stands for an input, by its name in the graph."""
    read = [node for node in nodes.nodes if node.op == "placeholder"]
    return read[list(graph.sources).index(source)]


class CutModel(nn.Module):
    """One rank's part of a model under a plan.

    `forward(x)` takes this rank's rows [rows, ...], or those of each input in the graph's order,
    and returns the model's outputs as the plan's flow lays them. Parameters and buffers have the
    whole model's names and this rank's pieces. In training mode, parts that are in eval mode while
    the model trains stay there.

    Attributes:
        compute: the same with the plan's segments recomputed, which a forward pass calls.
        context: the rows of the batch, known to all layers; to be set before each forward pass.
    """

    def __init__(
        self, traced: torch.fx.GraphModule, plan: Plan, context: BatchContext, groups: RankGroups
    ) -> None:
        super().__init__()
        self.traced, self.plan, self.context, self.groups = traced, plan, context, groups
        self.compute = with_segments(traced, plan)
        self._evaluating = [part for part in self.traced.modules() if not part.training]

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for part in self._evaluating:
            part.training = False
        return self

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self.compute(*inputs)

    @property
    def code(self) -> str:
        """The rewritten model as Python: every conversion is a call in it."""
        return self.traced.code

    @property
    def placements(self) -> Mapping[str, WeightPlacement]:
        """The placement of each parameter and buffer, by name in the whole model's state_dict."""
        return self.plan.flow.weights

    def pieces(self) -> dict[str, Tensor]:
        """Returns this rank's pieces of parameters and buffers, by name in the state_dict."""
        found = dict(self._named(self.traced.named_parameters()))
        return found | dict(self._named(self.traced.named_buffers()))

    def trainable(self) -> dict[str, nn.Parameter]:
        """Returns this rank's pieces that receive gradients, by name in the state_dict."""
        named = self._named(self.traced.named_parameters())
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    def _named(self, pairs: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, Any]]:
        first = {}
        for layer in self.plan.graph.layers:
            for weight in layer.weights:
                first.update(dict.fromkeys(weight.aliases, weight.name))
                if layer.kind == "linear":  # whatever the names are, in a piece they are the usual
                    usual = "weight" if len(weight.shape) > 1 else "bias"
                    first[f"{layer.name}.{usual}"] = weight.name
        for name, tensor in pairs:
            name = name.replace("unused_bias", "bias")
            yield first.get(name, name), tensor

    def shard_group(self, group_size: int) -> Group:
        """Returns the ranks that hold the pieces of one copy, this one among them."""
        return self.groups["shard", shard_group(self.context.rank, group_size)]

    def replica_group(self, group_size: int) -> Group:
        """Returns the ranks that hold the same piece as this one."""
        world = self.plan.world_size
        return self.groups["replica", replica_group(self.context.rank, group_size, world)]
