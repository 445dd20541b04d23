"""The operations of a pass: layers and conversions in their order.

Layers keep the model's order; a conversion follows what it converts at once, and readers whose
conversions start alike share them.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.graph.graph import Input, Layer
from workbench.plan.placement.placement import ROWS, Conversion, Layout
from workbench.plan.placement.rounds import Tail
from workbench.program.buckets import BYTES, Pieces

# What a conversion or a layer gives: the layer's name, and the conversions since.
Value = tuple[str, tuple[Conversion, ...]]

HALF = 2
# What autocast computes in half precision, whatever it is given.
_CAST = ("conv2d", "linear", "attention")
_CAST_OPERATIONS = ("matmul", "einsum", "bmm", "scaled_dot_product_attention")


class Operation(NamedTuple):
    """A layer, or a conversion of what a layer gave.

    Attributes:
        label: the layer; of a conversion, the reader that it was made for.
        layer: None for a conversion.
        step: None for a layer.
        reads: the values that it reads.
        gives: its value.
        layout: the layout of that value.
        shape: the shape of that value, for one sample.
        rows: the rows of that value, for one sample.
        itemsize: bytes of an element of that value.
        needs_gradient: whether a backward pass reaches it.
        look: a number that operations share which compute alike, as in the equal blocks of a deep
            model: they are predicted once.
        wanted: the values that it reads to which a gradient flows back.
        segment: the number of the segment with which it is recomputed; None: it is not.
    """

    label: str
    layer: Layer | None
    step: Conversion | None
    reads: tuple[Value, ...]
    gives: Value
    layout: Layout
    shape: tuple[int, ...]
    rows: int
    itemsize: int
    needs_gradient: bool
    look: int
    wanted: tuple[Value, ...]
    segment: int | None = None

    @property
    def computes(self) -> bool:
        """Whether it is a layer that runs: sizes are no tensors, and parameters are there."""
        layer = self.layer
        return layer is not None and layer.kind != "parameter" and self.itemsize > 0


@dataclass(frozen=True)
class Operations:
    """The operations of a forward pass.

    Attributes:
        by_value: each of them by what it gives, in order; the model's inputs are given by none.
        inputs: the model's inputs, by the names under which layers read them.
    """

    by_value: Mapping[Value, Operation]
    results: tuple[Value, ...]
    inputs: Mapping[str, Input]
    itemsize: int

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.by_value.values())

    def layout_of(self, value: Value) -> tuple[Layout, tuple[int, ...], int, int]:
        """(layout, one sample's shape, its rows, bytes of an element) of a value."""
        known = self.by_value.get(value)
        if known is None:
            read = self.inputs[value[0]]
            return ROWS, read.shape, 1, read.itemsize(self.itemsize)
        return known.layout, known.shape, known.rows, known.itemsize

    def needs_gradient(self, value: Value) -> bool:
        operation = self.by_value.get(value)
        return operation is not None and operation.needs_gradient

    def parted(self, tail: Tail) -> tuple[list[Operation], list[Operation]]:
        """What runs once, and what runs in every round."""
        parts: tuple[list[Operation], list[Operation]] = ([], [])
        for operation in self:
            name, steps = operation.gives
            behind = name in tail.layers or (name == tail.boundary and bool(steps))
            parts[behind].append(operation)
        return parts


def operations_of(experiment: Experiment, pieces: Pieces) -> Operations:
    return _Writing(experiment, pieces).written()


class _Writing:
    def __init__(self, experiment: Experiment, pieces: Pieces) -> None:
        self.experiment, self.plan, self.pieces = experiment, experiment.plan, pieces
        self.graph, self.flow = self.plan.graph, self.plan.flow
        self.half = experiment.half
        self.itemsize = BYTES[experiment.precision]
        self.by_value: dict[Value, Operation] = {}
        self._learning = self.graph.learning
        self._reached = self._values_reached()
        self._looks: dict[Hashable, int] = {}
        self._alike = dict(self.graph.alike)
        # What holds no real numbers.
        self._whole = {name for name, one in self.graph.sources.items() if not one.is_real}
        self._whole |= {
            layer.name for layer in self.graph.layers if layer.kind == "size" or layer.unreal_bytes
        }

    def written(self) -> Operations:
        conversions = self._conversions()
        for name in self.graph.sources:
            for value, label in conversions.get(name, ()):
                self._convert(value, label)
        for layer in self.graph.layers:
            self._run(layer)
            for value, label in conversions.get(layer.name, ()):
                self._convert(value, label)
        results = tuple((name, self.flow.returns[name]) for name in self.graph.outputs)
        for index, names in enumerate(self.plan.segments):
            self._fold(index, names)
        return Operations(self.by_value, results, self.graph.sources, self.itemsize)

    def _values_reached(self) -> set[Value]:
        """Converted values to which a gradient comes back: not all readers have one."""
        ends = [
            (name, self.flow.edges[name, layer.name])
            for layer in self.graph.layers
            if layer.name in self._learning
            for name in layer.inputs
        ]
        ends += [(name, self.flow.returns[name]) for name in self.graph.outputs]
        return {(name, steps[:count]) for name, steps in ends for count in range(len(steps) + 1)}

    def _fold(self, index: int, names: tuple[str, ...]) -> None:
        """Marks what lies from the first layer of a segment to its last one, but parameters."""
        order = list(self.by_value)
        first, last = (order.index((name, ())) for name in (names[0], names[-1]))
        for value in order[first : last + 1]:
            operation = self.by_value[value]
            if operation.layer is None or operation.layer.kind != "parameter":
                self.by_value[value] = operation._replace(segment=index)

    def _conversions(self) -> dict[str, list[tuple[Value, str]]]:
        """For each producer, the converted values in the order in which they are made."""
        found: dict[str, list[tuple[Value, str]]] = {}
        for name, steps, reader in self._crossings():
            made = found.setdefault(name, [])
            place = 0
            for count in range(1, len(steps) + 1):
                value = (name, steps[:count])
                values = [known for known, _ in made]
                if value not in values:
                    made.insert(place, (value, reader))  # directly behind what it converts
                    values.insert(place, value)
                place = values.index(value) + 1
        return found

    def _crossings(self) -> Iterator[tuple[str, tuple[Conversion, ...], str]]:
        """(producer, conversions, the reader that they are named after)."""
        for layer in self.graph.layers:
            for name in dict.fromkeys(layer.inputs):
                if self.flow.edges[name, layer.name]:
                    yield name, self.flow.edges[name, layer.name], layer.name
        for name in self.graph.outputs:
            if self.flow.returns[name]:
                yield name, self.flow.returns[name], name

    def _run(self, layer: Layer) -> None:
        reads = tuple([(name, self.flow.edges[name, layer.name]) for name in layer.inputs])
        given = [self.by_value.get(value) for value in reads]
        learns = layer.name in self._learning
        wanted = _wanted(reads, given) if learns else ()
        value, layout = (layer.name, ()), self.flow.outputs[layer.name]
        itemsize = self._itemsize(layer, given)
        look = self._look(layer, layout, itemsize, given)
        self.by_value[value] = Operation(
            layer.name,
            layer,
            None,
            reads,
            value,
            layout,
            layer.output_shape,
            layer.rows,
            itemsize,
            learns,
            self._looks.setdefault(look, len(self._looks)),
            wanted,
        )

    def _convert(self, value: Value, label: str) -> None:
        name, steps = value
        above, step = (name, steps[:-1]), steps[-1]
        known = self.by_value.get(above)
        if known is None:
            itemsize = self.graph.sources[name].itemsize(self.itemsize)
        else:
            itemsize = known.itemsize
        wanted = _wanted((above,), (known,)) if value in self._reached else ()
        self.by_value[value] = Operation(
            label,
            None,
            step,
            (above,),
            value,
            step.target,
            step.shape,
            step.rows,
            itemsize,
            bool(wanted),
            self._looks.setdefault((step, itemsize, bool(wanted)), len(self._looks)),
            wanted,
        )

    def _look(
        self, layer: Layer, layout: Layout, itemsize: int, given: Sequence[Operation | None]
    ) -> Hashable:
        """What a layer's seconds and bytes depend on; layouts are slow to hash, and stay."""
        owner = self.graph[layer.shared] if layer.shared else layer
        sizes = self.pieces.sizes
        return (
            self._alike[layer.name],
            itemsize,
            id(self.flow.inputs[layer.name]),
            id(layout),
            self.plan.layers.get(layer.name),
            tuple([id(sizes[w.name]) for w in owner.weights]),
            tuple([_seen(g) if g else name for name, g in zip(layer.inputs, given, strict=True)]),
        )

    def _itemsize(self, layer: Layer, given: Sequence[Operation | None]) -> int:
        if layer.kind == "size":
            return 0
        if self.half and computes_in_half(layer):
            return HALF
        if layer.kind == "embedding":
            return self.itemsize
        if layer.unreal_bytes:
            return layer.unreal_bytes
        real = [
            one for name, one in zip(layer.inputs, given, strict=True) if name not in self._whole
        ]
        sizes = [self.itemsize if one is None else one.itemsize for one in real]
        return max(sizes, default=self.itemsize)


def computes_in_half(layer: Layer) -> bool:
    """Whether autocast casts what a layer reads, and its weights."""
    return layer.kind in _CAST or layer.target.endswith(_CAST_OPERATIONS)


def _wanted(reads: Sequence[Value], given: Sequence[Operation | None]) -> tuple[Value, ...]:
    pairs = zip(reads, given, strict=True)
    return tuple([value for value, one in pairs if one is not None and one.needs_gradient])


def _seen(operation: Operation) -> Hashable:
    """What a reader sees of a value."""
    return (
        None if operation.layer is None else operation.layer.kind,
        id(operation.layout),
        operation.shape,
        operation.rows,
        operation.itemsize,
        operation.needs_gradient,
    )
