"""The time that each device takes for its rows and its part of every sharded block, by size.

A sharded block is a set of layers that are sharded alike, since the shares of one decide those of
the others.

    leader      shards its own filters, neurons or heads
    followers   read sharded features and keep the sharding (ReLU, batch norm, pools, depthwise
                convolutions), or reduce them (`shard_in`)

Where two sharded tensors are added or multiplied, both leaders are one. Between a leader's first
layer and its last one ranks do not synchronise, so they should need the same time for all of them.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.graph.graph import Layer
from workbench.plan.machine.device import Device
from workbench.plan.machine.work import work_of
from workbench.plan.placement.layer_plan import LayerPlan
from workbench.plan.placement.placement import ROWS, Layout, Shard, apportion
from workbench.plan.placement.presets import grain_of
from workbench.plan.plans.plan import Plan
from workbench.predict.balance.time_model import Kind, Point, TimeModel

Sizes = Mapping[str, tuple[int, ...]]
"""The filters (neurons, groups, heads) of each rank of a group, for each leader."""

UNITS = 64  # into which a group's work is divided, where it is not divided by rows


@dataclass(frozen=True)
class Cuts:
    """The sharded blocks of one plan.

    Attributes:
        plan: the plan.
    """

    plan: Plan

    @cached_property
    def leader_of(self) -> dict[str, str]:
        """The leader of each layer that works on sharded features, whose shares decide its own."""
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
            if choice.group_size > 1 and choice.meant.units(layer):
                follows = _is_cut(read)
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
        """The number of filters (neurons, groups, heads) to divide, for each leader."""
        graph, layers = self.plan.graph, self.plan.layers
        leaders = dict.fromkeys(self.leader_of.values())
        return {name: layers[name].meant.units(graph[name]) for name in leaders}

    def grain(self, leader: str, grain: int) -> int:
        """The filters of a leader that stay together: whole groups of followers."""
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
            sizes: the filters of each rank of a group, for every leader.
            world_size: the number of ranks of the new plan.
            group_size: the size of all groups of the new plan; None: as they are.
        """
        graph, layers = self.plan.graph, dict[str, LayerPlan]()
        for name, choice in self.plan.layers.items():
            leader = self.leader_of.get(name)
            units = choice.meant.units(graph[name])
            shares = None if leader is None or not units else _scaled(sizes[leader], units)
            k = choice.group_size if group_size is None or choice.group_size == 1 else group_size
            layers[name] = replace(choice, group_size=k, shares=shares)
        return Plan(graph, world_size, layers, self.plan.batch_norm, self.plan.rounds)


@dataclass(frozen=True)
class PlanTimes:
    """The times of a plan's layers on some devices.

    Attributes:
        experiment: the experiment, whose batch and precision count.
        plan: the plan, which says which layers are computed row by row, sharded over groups, or
            replicated on a group.
        devices: the device of each rank [ranks].
        kind: the kind of the time models.
    """

    experiment: Experiment
    plan: Plan
    devices: Sequence[Device]
    kind: Kind

    @cached_property
    def cuts(self) -> Cuts:
        """The sharded blocks of the plan."""
        return Cuts(self.plan)

    @cached_property
    def group_size(self) -> int:
        """The size of the largest shard groups of the plan."""
        return max((c.group_size for c in self.plan.layers.values()), default=1)

    @cached_property
    def _by_rows(self) -> list[Layer]:
        flow = self.plan.flow
        return [
            layer
            for layer in self.plan.graph.layers
            if flow.inputs[layer.name] == flow.outputs[layer.name] == ROWS
        ]

    @cached_property
    def _alike(self) -> dict[str | None, list[Layer]]:
        """Layers that every rank of a group computes on all rows, by the block that follows."""
        by_rows = {layer.name for layer in self._by_rows}
        found: dict[str | None, list[Layer]] = {}
        waiting: list[Layer] = []
        for layer in self.plan.graph.layers:
            if (leader := self.cuts.leader_of.get(layer.name)) is not None:
                found.setdefault(leader, []).extend(waiting)
                waiting = []
            elif layer.name not in by_rows:
                waiting.append(layer)
        return {**found, None: waiting}

    def rows(self) -> list[TimeModel]:
        """The time model of each rank, in rows of the layers computed row by row [ranks]."""
        batch = self.experiment.batch_size
        sizes = sorted({max(1, batch // part) for part in _PARTS})
        return [
            TimeModel(
                tuple(Point(d, self._seconds(self._by_rows, device, self._one, d)) for d in sizes),
                self.kind,
            )
            for device in self.devices
        ]

    def besides_rows(self) -> list[float]:
        """Seconds of each rank whatever its rows: fixed costs and weight updates [ranks]."""
        kind = self.experiment.optimizer.kind
        each = 8 if self.experiment.precision == "fp64" else 4
        stored = each * sum(layer.parameters for layer in self._by_rows)
        return [own.step_s + stored * own.update_s_per_byte.get(kind, 0.0) for own in self.devices]

    def besides_parts(self, rows: Sequence[int], leaders: Collection[str | None]) -> list[float]:
        """Seconds of each member of a group for replicated layers before these blocks [members].

        Ranks synchronise at the end of a block, and not between replicated layers and the next
        block.

        Args:
            rows: the rows of each rank [ranks].
            leaders: the leaders of the blocks; None: the layers after the last block.
        """
        layers, found = self.plan.layers, [0.0] * len(rows)
        sizes = [layers[name].group_size for name in leaders if name is not None]
        k = max(sizes, default=self.group_size)
        for layer in (layer for leader in leaders for layer in self._alike.get(leader, ())):
            flow = self.plan.flow
            size = max(flow.inputs[layer.name].group_size, flow.outputs[layer.name].group_size)
            for rank, count in enumerate(_group_rows(rows, size)):
                found[rank] += self._seconds([layer], self.devices[rank], self._whole, count)
        return [max(found[member::k]) for member in range(k)]

    def alone(self) -> tuple[float, ...]:
        """Seconds of each device for the whole model and the whole batch [devices]."""
        layers, batch = self.plan.graph.layers, self.experiment.batch_size
        return tuple(self._seconds(layers, own, self._one, batch) for own in self.devices)

    def parts(self, rows: Sequence[int]) -> list[TimeModel]:
        """A TimeModel per group member, unit 1/64 of the sharded filters; slowest group.

        Args:
            rows: the rows of each rank [ranks].
        """
        layers = [layer for layer in self.plan.graph.layers if layer.name in self.cuts.leader_of]
        sizes = [(units, units) for units in self._pieces]
        return self._members(layers, rows, sizes, self.group_size)

    def of_leader(self, leader: str, rows: Sequence[int]) -> list[TimeModel]:
        """A TimeModel per group member, in filters of a leader, for all layers of its block."""
        graph, of = self.plan.graph, self.cuts.leader_of
        layers = [layer for layer in graph.layers if of.get(layer.name) == leader]
        sizes = {sizes[leader][0]: units for units, (_, sizes) in self._pieces.items()}
        points = [(units, d) for d, units in sizes.items() if d]
        return self._members(layers, rows, points, self.plan.layers[leader].group_size)

    def _members(
        self,
        layers: Sequence[Layer],
        rows: Sequence[int],
        sizes: Sequence[tuple[int, int]],
        k: int,
    ) -> list[TimeModel]:
        """Models of each member of groups of k, with a point for each (64ths, units)."""
        every = _group_rows(rows, k)
        return [
            TimeModel(
                tuple(
                    Point(
                        d,
                        max(
                            self._seconds(layers, self.devices[r], self._pieces[units][0], every[r])
                            for r in range(member, len(self.devices), k)
                        ),
                    )
                    for units, d in sizes
                ),
                self.kind,
            )
            for member in range(k)
        ]

    @property
    def _whole(self) -> Plan:
        """A plan in which the first rank has all of every block."""
        return self._pieces[UNITS][0]

    @cached_property
    def _one(self) -> Plan:
        return Plan.data_parallel(self.plan.graph, 1)

    @cached_property
    def _pieces(self) -> dict[int, tuple[Plan, dict[str, tuple[int, ...]]]]:
        """A plan over two ranks in which the first has so many 64ths, and its sizes, by 64ths."""
        found = {}
        for part in _PARTS:
            shares = (UNITS // part, UNITS - UNITS // part)
            sizes = {name: apportion(n, shares) for name, n in self.cuts.units.items()}
            found[UNITS // part] = self.cuts.with_sizes(sizes, 2, 2), sizes
        return found

    def _seconds(self, layers: Sequence[Layer], device: Device, plan: Plan, rows: int) -> float:
        """Seconds of the first rank of a plan, forward and backward."""
        every = (rows, *(0 for _ in range(plan.world_size - 1)))
        total = 0.0
        for layer in layers:
            if layer.kind not in ("parameter", "size"):
                work = work_of(plan, layer, 0, every, self.experiment.precision)
                estimate = device.seconds(work)
                total += estimate.forward_s + estimate.backward_s
        return total


def _group_rows(rows: Sequence[int], k: int) -> list[int]:
    """The rows of each rank's group of k ranks [ranks]."""
    return [sum(rows[rank - rank % k : rank - rank % k + k]) for rank in range(len(rows))]


def _is_cut(layout: Layout) -> bool:
    return layout.group_size > 1 and isinstance(layout.placement, Shard)


def _scaled(sizes: tuple[int, ...], units: int) -> tuple[int, ...]:
    """The same division of another number of units."""
    return tuple(size * units // sum(sizes) for size in sizes)


_PARTS = (16, 8, 4, 2, 1)
