"""One way to divide a step's work: rows, one share of all filters, or a share for each block.

Memory bounds the shares. Rows come first: a fast device with little memory computes as many rows as
fit, and stores fewer filters.

A sharded block is a set of layers that are sharded alike, since the shares of one decide those of
the others.

    leader      shards its own filters, neurons or heads
    followers   read sharded features and keep the sharding (ReLU, batch norm, pools, depthwise
                convolutions), or reduce them (`shard_in`)

Where two sharded tensors are added or multiplied, both leaders are one. Between a leader's first
layer and its last one ranks do not synchronise, so they should need the same time for all of them.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.graph.graph import Layer
from workbench.plan.io.errors import PlanError
from workbench.plan.io.units import size
from workbench.plan.machine.device import Device
from workbench.plan.machine.work import work_of
from workbench.plan.placement.layer_plan import LayerPlan
from workbench.plan.placement.placement import ROWS, Layout, Shard, apportion
from workbench.plan.placement.presets import grain_of
from workbench.plan.plans.plan import Plan
from workbench.predict.balance.time_model import Partition, Point, TimeModel, partition
from workbench.predict.prediction import predict
from workbench.predict.search.refusal import bytes_of

Sizes = Mapping[str, tuple[int, ...]]
"""The filters (neurons, groups, heads) of each rank of a group, for each leader."""

UNITS = 64  # into which a group's work is divided, where it is not divided by rows


@dataclass(frozen=True)
class Cuts:
    """The sharded blocks of one plan."""

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
    """

    experiment: Experiment
    plan: Plan
    devices: Sequence[Device]

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


Limit = float | str | Sequence[float | str]


def limits_of(limit: Limit, ranks: int) -> tuple[int, ...]:
    """The memory limit of each rank, in bytes.

    Args:
        limit: the limit of all ranks, or one for each; numbers, or text such as "2GiB".
        ranks: the number of ranks.

    Raises:
        PlanError: an invalid number of bytes, or not one for each rank.
    """
    if isinstance(limit, str | int | float):
        return (bytes_of(limit),) * ranks
    if len(limit) != ranks:
        raise PlanError(f"memory_limit has {len(limit)} entries for {ranks} ranks: {limit!r}")
    return tuple(map(bytes_of, limit))


def most_rows(experiment: Experiment, limits: Sequence[int], times: PlanTimes) -> list[int]:
    """The rows that fit on each rank, at most the batch, if it holds no sharded filters."""
    batch, world, k = experiment.batch_size, len(limits), times.group_size

    def needed(rank: int, rows: int) -> int:
        plan = times.plan if k == 1 else _with_parts(times, rank % k, 0)
        shared_out = plan.with_rows(_one_has(rank, rows, batch, world))
        return predict(shared_out, None, experiment).memory[rank].peak_bytes

    return [_most(batch, limit, partial(needed, rank)) for rank, limit in enumerate(limits)]


def most_parts(
    experiment: Experiment, limits: Sequence[int], times: PlanTimes, rows: Sequence[int]
) -> list[int]:
    """The 64ths of the sharded filters that fit on each member of a group, with these rows.

    Raises:
        PlanError: a rank has no room for its rows alone.
    """
    k = times.group_size

    def needed(rank: int, units: int) -> int:
        plan = _with_parts(times, rank % k, units).with_rows(rows)
        return predict(plan, None, experiment).memory[rank].peak_bytes

    for rank, limit in enumerate(limits):
        if (least := needed(rank, 0)) > limit:
            raise PlanError(
                f"rank {rank} needs {size(least)} for its {rows[rank]} rows, without any part of "
                f"what is cut, and has {size(limit)}"
            )
    found = [_most(UNITS, limit, partial(needed, rank)) for rank, limit in enumerate(limits)]
    return [min(found[member::k]) for member in range(k)]


def _most(upper: int, limit: int, needed: Callable[[int], int]) -> int:
    """The largest number up to `upper` that needs no more than the limit; 0: none does."""
    low, high = 0, upper
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if needed(middle) <= limit else (low, middle - 1)
    return low


def _one_has(index: int, count: int, total: int, receivers: int) -> tuple[float, ...]:
    """Shares that give one receiver so much of a total, and the others equal parts of the rest."""
    rest = (total - count) / max(1, receivers - 1)
    return tuple(float(count) if i == index else rest for i in range(receivers))


def _with_parts(times: PlanTimes, member: int, units: int) -> Plan:
    """The plan in which one member of every group has so many 64ths of the sharded filters.

    Raises:
        PlanError: the groups have several sizes.
    """
    if len({times.plan.layers[name].group_size for name in times.cuts.units}) > 1:
        raise PlanError("memory is shared out over groups of one size, and the plan has several")
    shares = _one_has(member, units, UNITS, times.group_size)
    sizes = {name: apportion(n, shares) for name, n in times.cuts.units.items()}
    return times.cuts.with_sizes(sizes, times.plan.world_size)


Split = Literal["rows", "filters"]
SPLITS: tuple[Split, ...] = ("rows", "filters")
_NAMED = 3
Most = Sequence[int | None]


@dataclass(frozen=True)
class Shared:
    """The result of a division.

    Attributes:
        plan: the plan with the shares.
        partition: the division of rows, or of 64ths of all filters.
        by_layer: the division of each sharded block, by its leader; empty where one share holds for
            all.
        besides_s: the seconds that the shares do not divide.
    """

    plan: Plan
    partition: Partition
    by_layer: Mapping[str, Partition]
    besides_s: float

    def without(self) -> list[str]:
        """Notes on ranks that were given nothing."""
        notes = []
        for rank, units in enumerate(self.partition.sizes):
            if units == 0 and not self.by_layer:
                notes.append(f"rank {rank} is left out")
        for rank in range(len(self.partition.sizes) if self.by_layer else 0):
            none = [
                name
                for name, part in self.by_layer.items()
                if part.sizes[rank % len(part.sizes)] == 0
            ]
            if none:
                more = f", ... {len(none) - _NAMED} more" if len(none) > _NAMED else ""
                notes.append(f"rank {rank} has none of {', '.join(none[:_NAMED])}{more}")
        return notes


@dataclass(frozen=True)
class Sharing:
    """The division to find; the fields are the arguments of `balanced`, and its layers' times."""

    times: PlanTimes
    split: Split
    per_layer: bool
    least: int
    most: Most | None
    limits: tuple[int, ...] | None
    overheads_s: Sequence[float] | None
    grain: int

    def found(self) -> Shared:
        """Finds the shares.

        Raises:
            PlanError: the bounds allow no division.
        """
        times, world = self.times, self.times.plan.world_size
        batch = times.experiment.batch_size
        if self.split == "rows":
            rows = self._shared(
                "rows", batch, times.rows(), times.besides_rows(), self._most_rows, self.least
            )
            each = self._each(rows.sizes)
            plan = times.plan
            if each:
                plan = times.cuts.with_sizes(_sizes(each), world)
            return Shared(plan.with_rows(rows.sizes), rows, each, self._besides_s(rows.sizes))
        self._require_filters()
        equal = times.plan.rows_of(batch)
        besides = times.besides_parts(equal, times.cuts.units)
        parts = self._shared(
            "filters", UNITS, times.parts(equal), besides, self._most_parts(equal), self.least
        )
        each = self._each(equal)
        if each:
            plan = times.cuts.with_sizes(_sizes(each), world)
        else:
            plan = Plan.filters(times.plan.graph, world, parts.sizes, grain=self.grain)
        plan = plan.with_batch_norm(times.plan.batch_norm).with_rows(parts.sizes)
        return Shared(plan, parts, each, self._besides_s(plan.rows_of(batch)))

    def equal_s(self) -> float:
        """Seconds of computation with equal shares."""
        times = self.times
        batch, world = times.experiment.batch_size, times.plan.world_size
        rows = Plan.data_parallel(times.plan.graph, world).rows_of(batch)
        total = self._besides_s(rows)
        if self.split == "rows":
            total += _slowest(times.rows(), rows, times.besides_rows())
        elif not self.per_layer:
            besides = times.besides_parts(rows, times.cuts.units)
            total += _slowest(times.parts(rows), apportion(UNITS, (1,) * world), besides)
        if self.per_layer:
            total += self._cuts_s(rows, None)
        return total

    def _each(self, rows: tuple[int, ...]) -> dict[str, Partition]:
        """The division of every sharded block, if each gets shares of its own."""
        if not self.per_layer:
            return {}
        times, bounds = self.times, self._most_parts(rows)
        least = self.least if self.split == "filters" else 0
        found = {}
        for name, units in times.cuts.units.items():
            most = (
                None
                if bounds is None
                else [None if b is None else b * units // UNITS for b in bounds]
            )
            models, grain = times.of_leader(name, rows), times.cuts.grain(name, self.grain)
            what, besides = f"filters of layer {name!r}", times.besides_parts(rows, [name])
            found[name] = self._shared(what, units, models, besides, most, least, grain)
        return found

    def _shared(
        self,
        what: str,
        total: int,
        models: Sequence[TimeModel],
        besides_s: Sequence[float],
        most: Most | None,
        least: int,
        grain: int = 1,
    ) -> Partition:
        try:
            return partition(
                total,
                models,
                least=least,
                most=most,
                grain=grain,
                overheads_s=self.overheads_s,
                besides_s=besides_s,
            )
        except ValueError as error:
            raise PlanError(f"no {what} can be shared out like this: {error}") from error

    @cached_property
    def _most_rows(self) -> Most | None:
        if self.limits is None:
            return self.most
        return _tighter(self.most, most_rows(self.times.experiment, self.limits, self.times))

    def _most_parts(self, rows: tuple[int, ...]) -> Most | None:
        own = self.most if self.split == "filters" else None
        if self.limits is None or not self.times.cuts.units:
            return own
        return _tighter(own, most_parts(self.times.experiment, self.limits, self.times, rows))

    def _besides_s(self, rows: tuple[int, ...]) -> float:
        times = self.times
        total = max(times.besides_parts(rows, [None]))
        if self.split == "filters":
            total += _slowest(times.rows(), rows, times.besides_rows())
        elif not self.per_layer:
            total += self._cuts_s(rows, times.plan)
        return total

    def _cuts_s(self, rows: tuple[int, ...], plan: Plan | None) -> float:
        """Seconds of all sharded blocks, with a plan's shares or equal ones."""
        times, total = self.times, 0.0
        for name, units in times.cuts.units.items():
            choice = times.plan.layers[name]
            shares = None if plan is None else plan.layers[name].shares
            sizes = apportion(units, shares or (1,) * choice.group_size)
            besides = times.besides_parts(rows, [name])
            total += _slowest(times.of_leader(name, rows), sizes, besides)
        return total

    def _require_filters(self) -> None:
        """Checks that every rank can get filters of every layer.

        Raises:
            PlanError: a layer has too few; the text names it, its filters and what is valid.
        """
        k = self.times.group_size
        for name, units in self.times.cuts.units.items():
            if self.least > 0 and units < k:
                raise PlanError(
                    f"layer {name!r} has {units} filters for {k} ranks, so that not every one can "
                    f"have some; valid are least=0, which leaves ranks without, and at most "
                    f"{units} ranks"
                )


def _sizes(each: Mapping[str, Partition]) -> Sizes:
    return {name: part.sizes for name, part in each.items()}


def _slowest(
    models: Sequence[TimeModel], sizes: Sequence[int], besides_s: Sequence[float]
) -> float:
    each = zip(models, sizes, besides_s, strict=True)
    return max(float(model.seconds(size)[size]) + besides for model, size, besides in each)


def _tighter(one: Most | None, other: Sequence[int]) -> Most:
    if one is None:
        return other
    return [b if a is None else min(a, b) for a, b in zip(one, other, strict=True)]
