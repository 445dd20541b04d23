"""The work of one rank for one layer, for which a device's time is estimated.

Two layers of equal work have the same `key`, whatever their names: the same kind, operation and
local shapes. The key leaves out the rows, since time is measured at several numbers of rows and
interpolated between them.

What the kernels of a layer take beside their tensors, as a device's allocator saw it.

It depends on the device and its libraries (instruction set, oneDNN or cuDNN, threads), and not
smoothly on shapes: each layer shape is measured by itself. Between rows it lies on lines.

Convolutions take some on any device, and linear layers whose bias is trained on GPUs: there its
gradient is added up by many blocks of threads, each of which writes its part in fp32.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol, Self

from pydantic import Field, model_validator

from workbench.plan.graph.graph import Graph, Layer
from workbench.plan.io.value import MachineValue
from workbench.plan.placement.flow import Flow, heads_of
from workbench.plan.placement.layer_plan import LayerPlan
from workbench.plan.placement.placement import Layout, Shard
from workbench.plan.plans.plan import BatchNorm

# Bytes of an element: of activations, of weights (autocast keeps weights in fp32).
_ITEMSIZE = {"fp32": (4, 4), "bf16": (2, 4), "fp16": (2, 4), "fp64": (8, 8)}


class PlacedLayers(Protocol):
    """The placement of layers: a `Plan`, or some of its layers by themselves.

    Attributes:
        flow: the placement of at least the layers that are asked for.
    """

    @property
    def graph(self) -> Graph: ...

    @property
    def flow(self) -> Flow: ...

    @property
    def layers(self) -> Mapping[str, LayerPlan]: ...

    @property
    def batch_norm(self) -> BatchNorm: ...


@dataclass(frozen=True, slots=True)
class Work:
    """One layer's forward pass on one rank.

    Attributes:
        kind: the kind of the layer (`graph.KINDS`).
        key: the operation and the local shapes of inputs, output and weights, for one sample.
        precision: "fp32", "bf16", "fp16" or "fp64".
        rows: the rows of dimension 0 that the rank computes: its group's, where the layer is
            sharded; 1 where the layer does not depend on the batch.
        flops: the floating-point operations of all rows, the local part only.
        bytes: the bytes of inputs, output and weights, for all rows.
        weight_bytes: the bytes of the local weights.
    """

    kind: str
    key: str
    precision: str
    rows: int
    flops: float
    bytes: float
    weight_bytes: float


def work_of(
    plan: PlacedLayers, layer: Layer, rank: int, rows: Sequence[int], precision: str
) -> Work:
    """The work of one layer on one rank.

    Args:
        plan: the plan that places the layer.
        layer: the layer, of the plan's graph.
        rank: the rank's number in the world.
        rows: the samples of each rank of the world in the pass [ranks].
        precision: the precision of the experiment.
    """
    flow = plan.flow
    read, given = flow.inputs[layer.name], flow.outputs[layer.name]
    k = max(read.group_size, given.group_size)
    first = rank - rank % k
    samples = rows[rank] if k == 1 else sum(rows[first : first + k])
    return _of_piece(plan, layer, rank % k, samples, precision)


def works_of(
    plan: PlacedLayers, layer: Layer, rows: Sequence[int], precision: str
) -> tuple[Work, ...]:
    """The work of one layer on every rank [ranks]; ranks with equal work share one value.

    Args:
        plan: the plan that places the layer.
        layer: the layer, of the plan's graph.
        rows: the samples of each rank of the world in the pass [ranks].
        precision: the precision of the experiment.
    """
    flow = plan.flow
    k = max(flow.inputs[layer.name].group_size, flow.outputs[layer.name].group_size)
    samples = [sum(rows[first : first + k]) for first in range(0, len(rows), k)]
    known: dict[tuple[int, int], Work] = {}
    found = []
    for rank in range(len(rows)):
        piece = (rank % k, samples[rank // k])
        if piece not in known:
            known[piece] = _of_piece(plan, layer, *piece, precision)
        found.append(known[piece])
    return tuple(found)


def _of_piece(plan: PlacedLayers, layer: Layer, member: int, samples: int, precision: str) -> Work:
    """The work of one member of a group on the group's samples."""
    graph, flow = plan.graph, plan.flow
    itemsize, weight_itemsize = _ITEMSIZE[precision]
    given, reads = flow.outputs[layer.name], _reads(graph, layer)
    inputs = [
        (local_shape(shape, flow.read(name, layer.name), member) if rows else shape, rows)
        for name, shape, rows in reads
    ]
    output = local_shape(layer.output_shape, given, member)
    owner = graph[layer.shared] if layer.shared else layer
    placed = [flow.weights[weight.name] for weight in owner.weights]
    weights = [weight.piece_shape(member) for weight in placed]
    weight_bytes = float(sum(map(math.prod, weights)) * weight_itemsize)
    heads = heads_of(layer, plan.layers.get(layer.name))
    own_heads = layer.heads if heads is None else heads[member]
    times = samples if layer.rows else 1
    activations = float(math.prod(output) * (layer.rows * samples or 1))
    activations += sum(math.prod(shape) * (rows * samples or 1) for shape, rows in inputs)
    return Work(
        kind=layer.kind,
        key=_key(layer, _how(plan, layer), [s for s, _ in inputs], output, weights, own_heads),
        precision=precision,
        rows=samples * layer.rows if layer.rows else 1,
        flops=layer.counted_flops * times * _part(plan, layer, member, output),
        bytes=activations * itemsize + weight_bytes,
        weight_bytes=weight_bytes,
    )


def _reads(graph: Graph, layer: Layer) -> list[tuple[str, tuple[int, ...], int]]:
    """(name, shape of one sample, rows for each sample) of every tensor that a layer reads."""
    reads = []
    for name in dict.fromkeys(layer.inputs):
        if name in graph.sources or graph[name].kind != "size":
            reads.append((name, graph.shape_of(name), graph.rows_of(name)))
    return reads


def local_shape(shape: tuple[int, ...], layout: Layout, member: int) -> tuple[int, ...]:
    """The shape of one sample of an activation, as this member of a group holds it."""
    cut = layout.placement
    if not isinstance(cut, Shard) or len(shape) < cut.dim or shape[cut.dim - 1] != cut.extent:
        return shape
    return (*shape[: cut.dim - 1], cut.length(member), *shape[cut.dim :])


def _part(plan: PlacedLayers, layer: Layer, member: int, output: tuple[int, ...]) -> float:
    """The share of the layer's operations that this member of a group computes, 0 to 1."""
    choice = plan.layers.get(layer.name)
    if choice is not None and choice.group_size > 1:
        read, given = plan.flow.inputs[layer.name], plan.flow.outputs[layer.name]
        division = choice.division(layer)
        return choice.meant.flops(layer, division, member, read.placement, given.placement)
    whole = math.prod(layer.output_shape)
    return math.prod(output) / whole if whole else 1.0


def _how(plan: PlacedLayers, layer: Layer) -> str:
    """The operation's name, which differs in eval mode and with frozen weights.

    Synchronised statistics have no kernel of their own.
    """
    name = layer.target.rpartition(".")[-1]
    owner = plan.graph[layer.shared] if layer.shared else layer
    if owner.keeps_weight:
        name += "Frozen"
    if layer.evaluating:
        return name + "Evaluating"
    apart = layer.of_batch and plan.batch_norm == "synchronized"
    return name + ("Synchronized" if apart else "")


def _key(
    layer: Layer,
    name: str,
    inputs: Sequence[tuple[int, ...]],
    output: tuple[int, ...],
    weights: Sequence[tuple[int, ...]],
    heads: int,
) -> str:
    """A key such as "conv2d Conv2d 3x32x32 > 64x32x32, 64x3x3x3, 64"."""
    parts = [f"{layer.kind} {name} {' + '.join(map(_text, inputs))} > {_text(output)}"]
    parts += map(_text, weights)
    if layer.groups > 1:
        parts.append(f"{layer.groups} groups")
    if layer.heads:
        parts.append(f"{heads} heads")
    return ", ".join(parts)


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "1"


def takes_workspace(layer: Layer, device: str) -> bool:
    """Whether the kernels of a layer take memory beside its tensors."""
    if layer.kind == "linear":
        learns = any(weight.trainable and len(weight.shape) == 1 for weight in layer.weights)
        return learns and device == "cuda"
    return layer.kind == "conv2d"


class Needed(NamedTuple):
    """The bytes that the kernels of one layer take beside their tensors, at the peak of each.

    Attributes:
        forward: bytes beside its input, weights and output.
        input_gradient: bytes beside these two gradients: of its output and of its input.
        weight_gradient: bytes beside these, and the gradients of its weights.
    """

    forward: int
    input_gradient: int
    weight_gradient: int


class Workspace(MachineValue):
    """The measured workspace of one layer shape."""

    key: str
    """The key of the layer shape, as in `Work`."""
    precision: str
    """The precision that it was computed in."""
    points: tuple[tuple[int, int, int, int], ...] = Field(min_length=1)
    """(rows, bytes forward, bytes for the gradient of its input, bytes for those of its weights),
    in ascending order of rows."""

    @model_validator(mode="after")
    def _ascends(self) -> Self:
        if any(left[0] >= right[0] for left, right in pairwise(self.points)):
            raise ValueError(f"points must be in ascending order of rows, got {self.points}")
        return self

    def at(self, rows: int) -> Needed | None:
        """The workspace for so many rows, on the line of the nearest two measured numbers.

        Returns:
            The bytes, none without rows; None: they are not known, for so few or many rows.
        """
        points = self.points
        if rows == 0:
            return Needed(0, 0, 0)
        if not points[0][0] <= rows <= points[-1][0]:
            return None
        place = bisect_left(points, (rows,))
        if points[place][0] == rows:
            return Needed(*points[place][1:])
        (left, *before), (right, *behind) = points[place - 1], points[place]
        share = (rows - left) / (right - left)
        return Needed(*(round(a + (b - a) * share) for a, b in zip(before, behind, strict=True)))
