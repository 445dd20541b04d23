"""Which layers of a plan are cut alike, since the shares of one decide those of others.

    leader      cuts its own filters, neurons or heads
    followers   read cut features and keep the cut (ReLU, batch norm, pools, depthwise
                convolutions), or sum it up (`shard_in`)

Where two cut tensors are added or multiplied, both leaders are one. Between a leader's first layer
and its last one ranks do not meet, so that they should need the same time for all of them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from workbench.plan.choice import LayerPlan
from workbench.plan.filters import grain_of
from workbench.plan.graph import Layer
from workbench.plan.layout import Layout
from workbench.plan.placement import Shard
from workbench.plan.plan import Plan
from workbench.plan.rules import feature_dim

Sizes = Mapping[str, tuple[int, ...]]
"""For each leader, the filters (neurons, groups, heads) of each rank of a group."""


@dataclass(frozen=True)
class Cuts:
    """The cuts of one plan.

    Attributes:
        plan: the plan.
    """

    plan: Plan

    @cached_property
    def leader_of(self) -> dict[str, str]:
        """For each layer that works on cut features, whose shares decide its own."""
        graph, flow = self.plan.graph, self.plan.flow
        given: dict[str, str] = {}
        found: dict[str, str] = {}
        joined: dict[str, str] = {}

        def root(name: str) -> str:
            while name in joined:
                name = joined[name]
            return name

        for layer in graph.layers:
            read, gives = flow.inputs[layer.name], _is_cut(flow.outputs[layer.name])
            choice = self.plan.layers.get(layer.name, LayerPlan())
            cut_alike = [
                given[name] for name in layer.inputs if name in given and flow.outputs[name] == read
            ]
            if choice.scheme in ("shard_out", "shard_in", "shard_heads"):
                follows = choice.scheme == "shard_in" or layer.groups > 1
                found[layer.name] = cut_alike[0] if follows and cut_alike else layer.name
            elif cut_alike and (gives or _is_cut(read)):
                found[layer.name] = root(cut_alike[0])
                for other in map(root, cut_alike):
                    if other != root(found[layer.name]):
                        joined[other] = root(found[layer.name])
            if gives and layer.name in found:
                given[layer.name] = found[layer.name]
        return {name: root(leader) for name, leader in found.items()}

    @cached_property
    def units(self) -> dict[str, int]:
        """For each leader, what it has to hand out."""
        graph, layers = self.plan.graph, self.plan.layers
        leaders = dict.fromkeys(self.leader_of.values())
        return {name: _units(graph[name], layers[name]) for name in leaders}

    def grain(self, leader: str, grain: int) -> int:
        """Filters of a leader that are handed out together: whole groups of those that follow."""
        graph, k = self.plan.graph, self.plan.layers[leader].group_size
        factor = graph[leader].output_shape[0] // self.units[leader]
        apart = grain_of(self.units[leader], k, grain)
        for name, of in self.leader_of.items():
            if of == leader and graph[name].groups > 1 and name in self.plan.layers:
                each = graph[name].input_shape[0] // graph[name].groups
                apart = math.lcm(apart, each // math.gcd(each, factor))
        return apart

    def with_sizes(self, sizes: Sizes, world_size: int, group_size: int | None = None) -> Plan:
        """The plan with these sizes, and those that follow from them.

        Args:
            sizes: of every leader.
            world_size: of the new plan.
            group_size: of all groups of the new plan; None: as they are.
        """
        graph, layers = self.plan.graph, dict[str, LayerPlan]()
        for name, choice in self.plan.layers.items():
            leader = self.leader_of.get(name)
            units = _units(graph[name], choice)
            shares = None if leader is None else _scaled(sizes[leader], units)
            k = choice.group_size if group_size is None or choice.group_size == 1 else group_size
            layers[name] = replace(choice, group_size=k, shares=shares)
        return Plan(graph, world_size, layers, self.plan.batch_norm, self.plan.rounds)


def _is_cut(layout: Layout) -> bool:
    return layout.group_size > 1 and isinstance(layout.placement, Shard)


def _units(layer: Layer, choice: LayerPlan) -> int:
    """What a layer's shares hand out: heads, groups, or channels (of its input, for `shard_in`)."""
    if choice.scheme == "shard_heads":
        return layer.heads
    if choice.scheme == "shard_in":
        return layer.input_shape[feature_dim(layer.input_shape, layer.kind) - 1]
    if layer.groups > 1:
        return layer.groups
    return layer.output_shape[feature_dim(layer.output_shape, layer.kind) - 1]


def _scaled(sizes: tuple[int, ...], units: int) -> tuple[int, ...]:
    """The same cut of another number of units."""
    return tuple(size * units // sum(sizes) for size in sizes)
