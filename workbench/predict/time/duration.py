"""Seconds of one layer, conversion, loss, load or update, for all ranks at once.

Layers are timed by the machine's devices, collectives by its links. The simulation of a step and
the search for a plan use these functions, so that they agree.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from workbench.plan.experiment.optimizers import AnyOptimizer
from workbench.plan.graph.graph import Graph, Layer
from workbench.plan.machine.device import Estimate
from workbench.plan.machine.machine import Machine
from workbench.plan.machine.work import PlacedLayers, work_of
from workbench.plan.placement.placement import Conversion, Shard
from workbench.predict.time.group_topology import GroupTopology, topology_of
from workbench.predict.traffic.collective_costs import Summing, received_of
from workbench.program.collectives import CollectiveCall, crossing_of
from workbench.program.rows import Counts, HostLayout, Rows

Seconds = NDArray[np.float64]

# A loss reads its logits, and writes exponents, sums and a gradient, in some six kernels.
_LOSS_PASSES = 4
_LOSS_CALLS = 3


class Speeds:
    """The devices of some ranks, and the links between them.

    Args:
        ranks: the ranks' numbers in the world, in whole shard groups.

    Raises:
        MachineError: the machine has measured devices, and not one for each of these ranks.
    """

    def __init__(self, machine: Machine, ranks: Sequence[int]) -> None:
        self.machine, self.ranks = machine, np.asarray(ranks, dtype=np.int64)
        self.devices = tuple(machine.device(int(rank)) for rank in ranks)
        kinds = list(dict.fromkeys(map(id, self.devices)))
        self.kind = [kinds.index(id(device)) for device in self.devices]
        self.summing = Summing(HostLayout.of(len(self.ranks)))
        self._figures: dict[str, Seconds] = {}
        self._topologies: dict[tuple[int, int, int], GroupTopology] = {}

    def each(self, attribute: str) -> Seconds:
        """A figure of every rank's device, by the name of its attribute [ranks]."""
        if attribute not in self._figures:
            found = [getattr(device, attribute) for device in self.devices]
            self._figures[attribute] = np.array(found, dtype=np.float64)
        return self._figures[attribute]

    def streaming(self, sizes: Counts, calls: int = 1) -> Seconds:
        """Seconds to pass so many bytes through memory, in `calls` kernel launches [ranks]."""
        some = np.asarray(sizes) / self.each("bandwidth") + calls * self.each("call_s")
        return np.where(np.asarray(sizes) > 0, some, 0.0)

    def topology(self, members: range) -> GroupTopology:
        """The topology of these ranks of the world."""
        key = (members.start, members.stop, members.step)
        if key not in self._topologies:
            self._topologies[key] = topology_of(self.machine, members)
        return self._topologies[key]

    def shard_group(self, column: int, group_size: int) -> GroupTopology:
        """The topology of the shard group of one of the ranks."""
        first = int(self.ranks[column]) // group_size * group_size
        return self.topology(range(first, first + group_size))


@dataclass(frozen=True)
class LayerSeconds:
    """The time of one layer on each rank.

    Attributes:
        forward: seconds of the forward pass [ranks].
        backward: seconds of the backward pass [ranks].
        error: relative half width of the error band around both [ranks].
        estimated: whether some rank's shape has not been measured.
    """

    forward: Seconds
    backward: Seconds
    error: Seconds
    estimated: bool

    @cached_property
    def total(self) -> float:
        """Seconds of the forward and backward pass, summed over all ranks."""
        return float((self.forward + self.backward).sum())

    @cached_property
    def weighed(self) -> float:
        """Seconds of the forward and backward pass, each times its error, summed over all ranks."""
        return float(((self.forward + self.backward) * self.error).sum())


@dataclass(frozen=True)
class Leg:
    """A collective within every shard group.

    Attributes:
        op: the collective's name in the recorder, such as "all_gather".
        seconds: seconds on each rank, equal within a group: those of its slowest rank [ranks].
        bytes: bytes that each rank receives [ranks].
    """

    op: str
    seconds: Seconds
    bytes: Counts


@dataclass(frozen=True)
class Crossed:
    """The time of one conversion on each rank: a collective, a copy, or nothing.

    Attributes:
        forward: the collective of the forward pass, if there is one.
        backward: the collective of the backward pass, if there is one.
        forward_s: seconds of the copy in the forward pass [ranks].
        backward_s: seconds of the copy in the backward pass [ranks].
    """

    forward: Leg | None
    backward: Leg | None
    forward_s: Seconds
    backward_s: Seconds


def layer_seconds(
    plan: PlacedLayers, layer: Layer, rows: Rows, precision: str, speeds: Speeds
) -> LayerSeconds:
    """The seconds of one layer's forward and backward pass on each rank."""
    read, given = plan.flow.inputs[layer.name], plan.flow.outputs[layer.name]
    k = max(read.group_size, given.group_size)
    samples, own = rows.over(k).tolist(), rows.own.tolist()
    pieces = _pieces(plan, layer, k)
    looks = list(zip(samples, pieces * (len(own) // k), speeds.kind, strict=True))
    places = {look: place for place, look in enumerate(dict.fromkeys(looks))}
    found: list[Estimate] = []
    for look in places:
        column = looks.index(look)
        work = work_of(plan, layer, column, own, precision)
        found.append(speeds.devices[column].seconds(work))
    estimated = any(one.source == "estimated" for one in found)
    if len(found) == 1:  # all ranks are equal
        (one,) = found
        once = np.ones(len(own))
        return LayerSeconds(
            once * one.forward_s, once * one.backward_s, once * one.error, estimated
        )
    which = [places[look] for look in looks]
    figures = np.array([(one.forward_s, one.backward_s, one.error) for one in found])[which]
    return LayerSeconds(figures[:, 0], figures[:, 1], figures[:, 2], estimated)


def half_goes_back(graph: Graph, layer: Layer, wanted: bool) -> bool:
    """Whether a backward pass computes the gradient of the weights alone, or of the input alone.

    Args:
        wanted: whether the gradient of the layer's input is needed.
    """
    owner = graph[layer.shared] if layer.shared else layer
    return not wanted or (layer.kind in ("conv2d", "linear") and owner.keeps_weight)


def conversion_seconds(step: Conversion, rows: Rows, itemsize: int, speeds: Speeds) -> Crossed:
    """The seconds of one conversion's forward and backward pass on each rank.

    Args:
        itemsize: bytes of an element.
    """
    crossing = crossing_of(step, rows, itemsize)
    forward_s = backward_s = np.zeros(rows.world_size)
    if crossing.forward is None and step.source != step.target:
        sliced = rows.elements(step.target, step.shape, step.rows) * itemsize
        forward_s = speeds.streaming(2 * sliced)
    if crossing.backward is None and step.name.startswith("all_gather"):
        sliced = rows.elements(step.source, step.shape, step.rows) * itemsize
        backward_s = speeds.streaming(2 * sliced)
    return Crossed(
        _leg(crossing.forward, step.group_size, speeds),
        _leg(crossing.backward, step.group_size, speeds),
        forward_s,
        backward_s,
    )


def leg_seconds(op: str, received: Counts, group_size: int, speeds: Speeds) -> Leg:
    """The time of one collective within every shard group.

    Args:
        op: the collective's name in the recorder, such as "all_gather".
        received: bytes that each rank receives [ranks].
        group_size: the number of ranks in a shard group.
    """
    most = received.reshape(-1, group_size).max(axis=1).tolist()
    known: dict[tuple[int, int], float] = {}
    seconds = []
    for group, size in enumerate(most):
        topology = speeds.shard_group(group * group_size, group_size)
        key = (id(topology), size)
        if key not in known:
            known[key] = _of_shards(topology, op, size)
        seconds.append(known[key])
    return Leg(op, np.repeat(seconds, group_size), received)


def loss_seconds(logits: Counts, speeds: Speeds) -> Seconds:
    """Seconds of the loss for so many bytes of logits, forward; backward takes as long [ranks].

    Zero where whole steps have been measured: there `step_s` contains it.
    """
    known = speeds.each("step_s") > 0
    return np.where(known, 0.0, speeds.streaming(_LOSS_PASSES * logits, _LOSS_CALLS))


def load_seconds(images: Counts, speeds: Speeds) -> Seconds:
    """Seconds to load so many bytes of images [ranks]."""
    return images * speeds.each("load_s_per_byte")


def update_seconds(optimizer: AnyOptimizer, parameters: Seconds, speeds: Speeds) -> Seconds:
    """Seconds of an optimizer's update of so many bytes of parameters [ranks].

    On a device that has not been timed with this optimizer it reads and writes as much as torch's
    kernels do.

    Args:
        optimizer: the optimizer; its groups count as all others.
        parameters: bytes of parameters that each rank updates [ranks].
    """
    kind, passes = optimizer.kind, optimizer.passes
    rates = [d.update_s_per_byte.get(kind, passes / d.bandwidth) for d in speeds.devices]
    return parameters * np.array(rates)


def _pieces(plan: PlacedLayers, layer: Layer, group_size: int) -> tuple[object, ...]:
    """For each member of a group, a key that differs for different pieces of a layer."""
    if group_size == 1:
        return ((),)
    flow = plan.flow
    owner = plan.graph[layer.shared] if layer.shared else layer
    placements = [flow.inputs[layer.name].placement, flow.outputs[layer.name].placement]
    placements += [flow.weights[weight.name].placement for weight in owner.weights]
    cuts: list[Callable[[int], int]] = [p.length for p in placements if isinstance(p, Shard)]
    return tuple(tuple(length(member) for length in cuts) for member in range(group_size))


def _leg(call: CollectiveCall | None, group_size: int, speeds: Speeds) -> Leg | None:
    if call is None:
        return None
    return leg_seconds(call.op, received_of(call, speeds.summing).bytes, group_size, speeds)


def _of_shards(topology: GroupTopology, op: str, received: int) -> float:
    if op == "all_reduce":
        size = received * topology.ranks / (2 * (topology.ranks - 1))
        return topology.all_reduce(size, "auto", beside=False, into_new=True).seconds
    return topology.seconds(op, received, received if op == "reduce_scatter" else 0)
