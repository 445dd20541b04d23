"""The memory that one operation takes, saves for backward and frees, on all ranks."""

from collections.abc import Hashable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.plan.graph.graph import Layer
from workbench.plan.placement.flow import heads_of
from workbench.plan.placement.placement import Conversion, Layout, Partial, Replicate
from workbench.predict.memory.gradients import Gradients
from workbench.predict.memory.kept import SavedTensors, Windows, drops_weights, saved_by
from workbench.predict.memory.timeline import MemoryTimeline
from workbench.predict.memory.workspaces import (
    NO_WORKSPACE,
    Sizes,
    Workspace,
    Workspaces,
    attention,
    dropped_weights,
    mask,
)
from workbench.program.operations import HALF, Operation, Value, computes_in_half
from workbench.program.rows import Counts, Rows, tiled
from workbench.program.step import Program

_CONVERSION = SavedTensors()
_SAME = SavedTensors(view=True)


class _Work(NamedTuple):
    """The memory needs of all operations with equal layer, layout and shape.

    Attributes:
        size: bytes of their output on each rank [ranks].
        keeps: the tensors that autograd saves for them.
        beside: bytes of the new tensors that they save: masks, indices, statistics, casts [ranks]
            each.
        casts: bytes of those among them that are weights cast by autocast [ranks] each.
        passes_on: whether the gradient of their output is that of their input, in the same memory.
    """

    size: Counts
    keeps: SavedTensors
    space: Workspace
    beside: tuple[Counts, ...]
    casts: tuple[Counts, ...]
    passes_on: bool


class Execution:
    """Writes the tensors of operations, forward and backward."""

    def __init__(
        self,
        program: Program,
        timeline: MemoryTimeline,
        gradients: Gradients,
        rows: Rows,
        workspaces: Workspaces,
    ) -> None:
        self.program, self.timeline = program, timeline
        self.gradients, self.rows, self.workspaces = gradients, rows, workspaces
        self._parameters = {
            value for value, one in program.operations.by_value.items() if is_parameter(one)
        }
        self._works: dict[int, _Work] = {}
        self._sizes: dict[tuple[Hashable, ...], Counts] = {}
        self._of_values: dict[Value, Counts] = {}

    def size(self, value: Value, itemsize: int | None = None) -> Counts:
        """Bytes of a value on each rank [ranks]."""
        known = self._of_values.get(value) if itemsize is None else None
        if known is not None:
            return known
        layout, shape, per_sample, own = self.program.operations.layout_of(value)
        found = self._size(layout, shape, per_sample, itemsize or own)
        if itemsize is None:
            self._of_values[value] = found
        return found

    def _size(self, layout: Layout, shape: tuple[int, ...], per_sample: int, width: int) -> Counts:
        # A layout is slow to hash, and stays where it is.
        key = (id(layout), shape, per_sample, width)
        known = self._sizes.get(key)
        if known is None:
            known = self._sizes[key] = self.rows.elements(layout, shape, per_sample) * width
        return known

    def run(self, operation: Operation, alive: Mapping[Value, int]) -> tuple[int, list[int]]:
        """Runs an operation: (the tensor that it gives, the tensors that it saves)."""
        timeline, label, needed = self.timeline, operation.label, operation.needs_gradient
        work = self._works.get(operation.look) or self._work(operation)
        space, keeps = work.space, work.keeps
        timeline.pass_by(space.forward, "workspace", label)
        held: list[int] = []
        if needed and work.beside:
            held += [timeline.make(size, "activations", label) for size in work.beside]
        read = None
        if keeps.view:
            read = next((alive[value] for value in operation.reads if value in alive), None)
        if read is not None:
            tensor = timeline.hold(read)
        else:
            of_parameter = keeps.view and bool(operation.reads)
            size = work.size * 0 if of_parameter else work.size
            tensor = timeline.make(size, "activations", label)
        timeline.pass_by(space.beside_output, "workspace", label, at_most=space.at_most[0])
        if needed:
            if keeps.input:
                held += [
                    self._hold(operation, alive[value])
                    for value in _saved(operation)
                    if value in alive and not self._is_cast(operation, value)
                ]
            if keeps.output:
                held.append(timeline.hold(tensor))
        return tensor, held

    def _hold(self, operation: Operation, tensor: int) -> int:
        """Holds a tensor for a backward pass, on the ranks that have one."""
        there = self._there(operation)
        return self.timeline.hold(tensor) if there is None else self.timeline.hold_on(tensor, there)

    def _there(self, operation: Operation) -> npt.NDArray[np.bool_] | None:
        """The ranks that have a piece of a layer's weights [ranks]; None: all, or it has none."""
        layer = operation.layer
        if layer is None or layer.kind not in ("conv2d", "linear"):
            return None
        owner = self.program.plan.graph[layer.shared] if layer.shared else layer
        sizes = self.program.pieces.sizes.get(owner.weights[0].name) if owner.weights else None
        return None if sizes is None or sizes.all() else sizes > 0

    def _cast_size(self, operation: Operation, value: Value) -> Counts:
        """Bytes of a value that an operation reads, in half precision [ranks]."""
        size, there = self.size(value, HALF), self._there(operation)
        return size if there is None else size * there

    def casts(self, operation: Operation) -> tuple[Counts, ...]:
        """Bytes of the weights that autocast has cast for an operation [ranks] each."""
        return self._work(operation).casts

    def run_back(self, operation: Operation, given: int, grads: dict[Value, int]) -> dict[str, int]:
        """Runs an operation backward.

        It adds the gradients of what the operation read to `grads`, and returns those of its
        weights, by name. `given` is the gradient of its output.
        """
        timeline, label, wanted = self.timeline, operation.label, operation.wanted
        work = self._works.get(operation.look) or self._work(operation)
        if not self._parameters.isdisjoint(wanted):
            wanted = self._of_activations(wanted)
        of_weights: dict[str, int] = {}
        if work.passes_on:
            of_inputs = [(value, timeline.hold(given)) for value in wanted]
        else:
            space, of_inputs = work.space, []
            if wanted:
                timeline.pass_by(space.backward, "workspace", label)
                of_inputs = [
                    (value, timeline.make(self.size(value), "activation_gradients", label))
                    for value in (wanted if len(wanted) == 1 else dict.fromkeys(wanted))
                ]
                more = space.at_most[1]
                timeline.pass_by(space.beside_gradient, "workspace", label, at_most=more)
            timeline.pass_by(space.of_weight, "workspace", label, at_most=space.at_most[2])
            if operation.layer is not None and operation.layer.weights:
                of_weights = self.gradients.made(operation.layer)
                more = space.at_most[3]
                timeline.pass_by(space.beside_weights, "workspace", label, at_most=more)
            for value, _ in of_inputs:
                if self._is_cast(operation, value):  # its gradient comes in half precision
                    timeline.pass_by(self._cast_size(operation, value), "workspace", label)
        timeline.drop(given)
        for value, tensor in of_inputs:
            self._add(grads, value, tensor)
        return of_weights

    def _of_activations(self, wanted: tuple[Value, ...]) -> tuple[Value, ...]:
        """The activations among these values; the gradients of parameters are made here."""
        for value in wanted:
            layer = self.program.operations.by_value[value].layer
            if value in self._parameters and layer is not None:
                self.gradients.settle(self.gradients.made(layer))
        return tuple([value for value in wanted if value not in self._parameters])

    def _add(self, grads: dict[Value, int], value: Value, tensor: int) -> None:
        """Adds a gradient to the sum that has come back for a value so far."""
        before = grads.get(value)
        if before is None:
            grads[value] = tensor
        elif self.timeline.alone(before):
            self.timeline.drop(tensor)
        else:
            grads[value] = self.timeline.make(self.size(value), "activation_gradients", value[0])
            self.timeline.drop(before)
            self.timeline.drop(tensor)

    def _work(self, operation: Operation) -> _Work:
        known = self._works.get(operation.look)
        if known is None:
            known = self._works[operation.look] = self._work_of(operation)
        return known

    def _work_of(self, operation: Operation) -> _Work:
        layer, step = operation.layer, operation.step
        size = self._size(operation.layout, operation.shape, operation.rows, operation.itemsize)
        if layer is None:
            assert step is not None
            keeps = _SAME if step.name == "copy_to" else _CONVERSION
            on = _returns_as_it_is(step)
            return _Work(size, keeps, NO_WORKSPACE, (), (), on)
        keeps, casts = saved_by(self.program.plan, layer), self._casts(layer)
        beside = [*self._kept_beside(operation, layer, keeps), *casts]
        if keeps.input:
            cast = [value for value in _saved(operation) if self._is_cast(operation, value)]
            beside += [self._cast_size(operation, value) for value in cast]
        space = self._workspace_of(operation, layer)
        return _Work(size, keeps, space, tuple(beside), casts, keeps.passes)

    def _kept_beside(self, operation: Operation, layer: Layer, keeps: SavedTensors) -> list[Counts]:
        """Bytes of masks, indices and statistics that an operation saves [ranks] each."""
        found: list[Counts] = []
        elements = self.rows.elements(operation.layout, operation.shape, operation.rows)
        heads = self._heads(layer)
        each = keeps.beside(operation.itemsize, 1.0 if heads is None else heads)
        if each if isinstance(each, int | float) else each.any():
            found.append((elements * each).astype(np.int64))
        elif layer.kind == "stochastic_depth":
            found.append(self.rows.elements(operation.layout, (), operation.rows) * 4)
        if keeps.constant:
            found.append(np.full_like(elements, keeps.constant * operation.itemsize))
        if keeps.statistics and layer.weights:
            found.append(self.program.pieces.sizes[layer.weights[0].name] * keeps.statistics)
        if layer.keeps_weight and operation.wanted and self._casts_weights(layer):
            # Autocast does not cache its cast, but the backward pass needs it.
            found += [
                self.program.pieces.sizes[weight.name] // 4 * HALF
                for weight in layer.weights
                if weight.frozen and len(weight.shape) > 1
            ]
        return found

    def _casts(self, layer: Layer) -> tuple[Counts, ...]:
        sizes = self.gradients.sizes
        if not self._casts_weights(layer):
            return ()
        return tuple(sizes[w.name] // 4 * HALF for w in layer.weights if w.name in sizes)

    def _casts_weights(self, layer: Layer) -> bool:
        """Whether autocast casts a layer's weights."""
        projects = layer.kind == "attention" and Windows.of(layer) is None
        return self.gradients.half and (projects or layer.kind in ("conv2d", "linear"))

    def _is_cast(self, operation: Operation, value: Value) -> bool:
        """Whether autocast casts a value that an operation reads."""
        layer = operation.layer
        if not self.gradients.half or layer is None or not computes_in_half(layer):
            return False
        return self.program.operations.layout_of(value)[-1] > HALF

    def _workspace_of(self, operation: Operation, layer: Layer) -> Workspace:
        if layer.kind == "conv2d" and layer.weights:
            return self._convolution(operation, layer)
        elements = self.rows.elements(operation.layout, operation.shape, operation.rows)
        if layer.kind == "linear" and layer.weights:
            return self.workspaces.of_linear(self.program.plan, layer, self.rows, elements)
        if layer.kind == "dropout":
            return mask(elements)
        if layer.kind == "attention":
            size, heads, windows = self.size(operation.gives), self._heads(layer), Windows.of(layer)
            if windows is not None:
                return windows.workspace(size, 1.0 if heads is None else heads)
            return attention(size, heads)
        if drops_weights(layer):
            keys = self.program.plan.graph.shape_of(layer.inputs[1])[-2]
            scores = elements * keys // layer.output_shape[-1]
            return dropped_weights(scores, elements, operation.itemsize)
        if layer.saved is not None and (layer.saved.forward or layer.saved.backward):
            size, beside = self.size(operation.gives), (layer.saved.forward, layer.saved.backward)
            forward, backward = (np.rint(size * each).astype(np.int64) for each in beside)
            return Workspace(beside_output=forward, beside_gradient=backward)
        return NO_WORKSPACE

    def _convolution(self, operation: Operation, layer: Layer) -> Workspace:
        width = operation.itemsize
        whole = self.program.pieces.sizes[layer.weights[0].name]
        held = whole * width // self.program.itemsize
        x, y = self.size(operation.reads[0], width), self.size(operation.gives)
        return self.workspaces.of_convolution(
            self.program.plan, layer, self.rows, Sizes(x, held, y, width)
        )

    def _heads(self, layer: Layer) -> npt.NDArray[np.float64] | None:
        """The fraction of an attention layer's heads on each rank [ranks]; None: not sharded."""
        plan = self.program.plan
        heads = heads_of(layer, plan.layers.get(layer.name))
        return None if heads is None else tiled(heads, plan.world_size) / layer.heads


def _saved(operation: Operation) -> tuple[Value, ...]:
    """The values that an operation reads and its backward pass needs, if it needs any."""
    reads, layer = operation.reads, operation.layer
    if layer is not None and layer.saved is not None:
        reads = tuple([reads[place] for place in layer.saved.inputs])
    elif len(reads) == 2 and layer is not None and layer.kind == "mul":
        wants = [value in operation.wanted for value in reversed(reads)]
        reads = tuple([value for value, wanted in zip(reads, wants, strict=True) if wanted])
    return reads if len(reads) == 1 else tuple(dict.fromkeys(reads))


def is_parameter(operation: Operation) -> bool:
    return operation.layer is not None and operation.layer.kind == "parameter"


def _returns_as_it_is(step: Conversion) -> bool:
    """Whether the gradient of a conversion's output is that of its input, in the same memory."""
    summed = isinstance(step.source.placement, Partial)
    whole = isinstance(step.target.placement, Replicate) and step.name == "all_reduce"
    return summed and whole and step.gradient == "same"
