"""How long one rank takes for one layer, conversion, loss, load or update: all ranks at once.

Layers are timed by the machine's devices, collectives by its links. The simulation of a step and
the search for a plan use these functions, so that they agree.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from workbench.plan.device import Device
from workbench.plan.experience import Estimate
from workbench.plan.graph import Graph, Layer
from workbench.plan.layout import Conversion
from workbench.plan.machine import Machine
from workbench.plan.placement import Shard
from workbench.plan.work import PlacedLayers, work_of
from workbench.predict.time.meeting import Meeting, meeting_of
from workbench.predict.traffic.call_received import received_of
from workbench.predict.traffic.summing import Summing
from workbench.program.collective_call import CollectiveCall
from workbench.program.crossing import crossing_of
from workbench.program.hosts import Hosts
from workbench.program.rows import Counts, Rows

Seconds = NDArray[np.float64]

# A loss reads its logits, and writes exponents, sums and a gradient, in some six kernels.
_LOSS_PASSES = 4
_LOSS_CALLS = 3


class Speeds:
    """What some ranks of a world compute on, and what connects them.

    Args:
        machine: of all of them.
        ranks: of the world, in whole shard groups.

    Raises:
        MachineError: the machine has measured devices, and not one for each of these ranks.
    """

    def __init__(self, machine: Machine, ranks: Sequence[int]) -> None:
        self.machine, self.ranks = machine, np.asarray(ranks, dtype=np.int64)
        self.devices = tuple(machine.device(int(rank)) for rank in ranks)
        kinds = list(dict.fromkeys(map(id, self.devices)))
        self.kind = [kinds.index(id(device)) for device in self.devices]
        self.summing = Summing(Hosts.of(len(self.ranks)))
        self._figures: dict[str, Seconds] = {}
        self._meetings: dict[tuple[int, int, int], Meeting] = {}

    def each(self, attribute: str) -> Seconds:
        """A figure of every rank's device."""
        if attribute not in self._figures:
            found = [getattr(device, attribute) for device in self.devices]
            self._figures[attribute] = np.array(found, dtype=np.float64)
        return self._figures[attribute]

    def streaming(self, sizes: Counts, calls: int = 1) -> Seconds:
        """Seconds to pass so many bytes through memory, in operations that the host starts."""
        some = np.asarray(sizes) / self.each("bandwidth") + calls * self.each("call_s")
        return np.where(np.asarray(sizes) > 0, some, 0.0)

    def meeting(self, members: range) -> Meeting:
        """The meeting of these ranks of the world."""
        key = (members.start, members.stop, members.step)
        if key not in self._meetings:
            self._meetings[key] = meeting_of(self.machine, members)
        return self._meetings[key]

    def shard_group(self, column: int, group_size: int) -> Meeting:
        """That of the shard group of one of the ranks."""
        first = int(self.ranks[column]) // group_size * group_size
        return self.meeting(range(first, first + group_size))


@dataclass(frozen=True)
class LayerSeconds:
    """Of one layer, on each rank.

    Attributes:
        forward: seconds.
        backward: seconds.
        error: relative half width of the band around both.
        estimated: whether some rank's shape has not been measured.
    """

    forward: Seconds
    backward: Seconds
    error: Seconds
    estimated: bool

    @cached_property
    def total(self) -> float:
        """Forward and backward, over all ranks."""
        return float((self.forward + self.backward).sum())

    @cached_property
    def weighed(self) -> float:
        """The same, times the error."""
        return float(((self.forward + self.backward) * self.error).sum())


@dataclass(frozen=True)
class Leg:
    """A collective of every shard group.

    Attributes:
        op: as the recorder names it.
        seconds: on each rank, which are those of its group's slowest.
        bytes: that each rank receives.
    """

    op: str
    seconds: Seconds
    bytes: Counts


@dataclass(frozen=True)
class Crossed:
    """A conversion, on each rank: a collective, or a copy, or nothing.

    Attributes:
        forward: collective of the forward pass.
        backward: of the backward pass.
        forward_s: seconds of the copy in the forward pass.
        backward_s: in the backward pass.
    """

    forward: Leg | None
    backward: Leg | None
    forward_s: Seconds
    backward_s: Seconds


def layer_seconds(
    plan: PlacedLayers, layer: Layer, rows: Rows, precision: str, speeds: Speeds
) -> LayerSeconds:
    """Forward and backward pass of one layer.

    Args:
        plan: that places the layer.
        layer: of the plan's graph.
        rows: of each rank in the pass.
        precision: of the experiment.
        speeds: of the same ranks.
    """
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
    if len(found) == 1:  # all ranks are alike
        (one,) = found
        once = np.ones(len(own))
        return LayerSeconds(
            once * one.forward_s, once * one.backward_s, once * one.error, estimated
        )
    which = [places[look] for look in looks]
    figures = np.array([(one.forward_s, one.backward_s, one.error) for one in found])[which]
    return LayerSeconds(figures[:, 0], figures[:, 1], figures[:, 2], estimated)


def half_goes_back(graph: Graph, layer: Layer, wanted: bool) -> bool:
    """Whether a backward pass is that to the weights alone, or to the input alone.

    Args:
        graph: of the layer.
        layer: that a gradient reaches.
        wanted: whether a gradient flows on to what it reads.
    """
    owner = graph[layer.shared] if layer.shared else layer
    return not wanted or (layer.kind in ("conv2d", "linear") and owner.keeps_weight)


def conversion_seconds(step: Conversion, rows: Rows, itemsize: int, speeds: Speeds) -> Crossed:
    """Forward and backward pass of one conversion.

    Args:
        step: the conversion.
        rows: of each rank in the pass.
        itemsize: bytes of an element.
        speeds: of the same ranks.
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
    """One collective of every shard group.

    Args:
        op: as the recorder names it.
        received: bytes, on each rank.
        group_size: of the shard groups.
        speeds: of the same ranks.
    """
    most = received.reshape(-1, group_size).max(axis=1).tolist()
    known: dict[tuple[int, int], float] = {}
    seconds = []
    for group, size in enumerate(most):
        meeting = speeds.shard_group(group * group_size, group_size)
        key = (id(meeting), size)
        if key not in known:
            known[key] = _of_shards(meeting, op, size)
        seconds.append(known[key])
    return Leg(op, np.repeat(seconds, group_size), received)


def loss_seconds(logits: Counts, speeds: Speeds) -> Seconds:
    """The loss of so many bytes of logits, one way; backward takes as long.

    Where steps have been measured, it is among what every step costs besides its layers.
    """
    known = speeds.each("step_s") > 0
    return np.where(known, 0.0, speeds.streaming(_LOSS_PASSES * logits, _LOSS_CALLS))


def load_seconds(images: Counts, speeds: Speeds) -> Seconds:
    """Loading so many bytes of images."""
    return images * speeds.each("load_s_per_byte")


def update_seconds(kind: str, parameters: Seconds, copies: int, speeds: Speeds) -> Seconds:
    """An optimizer's update of so many bytes of parameters.

    On a device that has not been timed with this optimizer it reads parameters, gradients and
    the optimizer's copies, and writes all but the gradients.

    Args:
        kind: of the optimizer.
        parameters: bytes that each rank updates.
        copies: that the optimizer keeps.
        speeds: of the same ranks.
    """
    passes = 3 + 2 * copies

    def rate(device: Device) -> float:
        return device.update_s_per_byte.get(kind, passes / device.bandwidth)

    return parameters * np.array([rate(device) for device in speeds.devices])


def _pieces(plan: PlacedLayers, layer: Layer, group_size: int) -> tuple[object, ...]:
    """For each member of a group, what tells its piece of a layer from the others'."""
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


def _of_shards(meeting: Meeting, op: str, received: int) -> float:
    if op == "all_reduce":
        size = received * meeting.ranks / (2 * (meeting.ranks - 1))
        return meeting.all_reduce(size, "auto", beside=False, into_new=True).seconds
    return meeting.seconds(op, received, received if op == "reduce_scatter" else 0)
