"""What one operation makes, keeps and hands back, on all ranks: the steps of a pass."""

from collections.abc import Hashable, Mapping

import numpy as np
import numpy.typing as npt

from workbench.plan.graph import Layer
from workbench.plan.layout import Conversion
from workbench.plan.placement import Partial, Replicate
from workbench.plan.weights import heads_of
from workbench.predict import kernels
from workbench.predict.gradients import Gradients
from workbench.predict.kept import Kept, kept_by
from workbench.predict.program import HALF, Operation, Program, Value, layout_of
from workbench.predict.rows import Counts, Rows, tiled
from workbench.predict.timeline import Timeline
from workbench.predict.windows import Windows

_CONVERSION = Kept()
_SAME = Kept(view=True)
_NO_WORKSPACE = kernels.Workspace()


class Execution:
    """Runs operations, forward and back.

    Args:
        program: all of them.
        timeline: to write on.
        gradients: takes the weights' gradients.
        rows: of the pass.
    """

    def __init__(
        self, program: Program, timeline: Timeline, gradients: Gradients, rows: Rows
    ) -> None:
        self.program, self.timeline = program, timeline
        self.gradients, self.rows = gradients, rows
        self.synchronized = program.plan.batch_norm == "synchronized"
        self._spaces: dict[Value, kernels.Workspace] = {}
        self._alike: dict[Hashable, kernels.Workspace] = {}  # deep models repeat their blocks
        self._sizes: dict[tuple[Hashable, ...], Counts] = {}
        self._kept: dict[str, Kept] = {}

    def size(self, value: Value, itemsize: int | None = None) -> Counts:
        """Bytes of a value on each rank."""
        layout, shape, per_sample, own = layout_of(self.program, value)
        width = itemsize or own
        key = (
            id(layout),
            shape,
            per_sample,
            width,
        )  # a layout is slow to hash, and stays where it is
        known = self._sizes.get(key)
        if known is None:
            known = self._sizes[key] = self.rows.elements(layout, shape, per_sample) * width
        return known

    def run(self, operation: Operation, alive: Mapping[Value, int]) -> tuple[int, list[int]]:
        """(the tensor that it gives, the tensors that it keeps)."""
        timeline, keeps = self.timeline, self._keeps(operation)
        space, label = self.workspace(operation), operation.label
        timeline.pass_by(space.forward, "workspace", label)
        read = [alive[value] for value in operation.reads if value in alive]
        held: list[int] = []
        if operation.needs_gradient:
            held += self._kept_beside(operation, keeps)
        if keeps.view and read:
            tensor = timeline.hold(read[0])
        else:
            of_parameter = keeps.view and bool(operation.reads)
            size = self.size(operation.gives)
            tensor = timeline.make(size * 0 if of_parameter else size, "activations", label)
        timeline.pass_by(space.beside_output, "workspace", label)
        if operation.needs_gradient:
            if keeps.input and not self._casts_input(operation):
                held += [timeline.hold(tensor) for tensor in self._factors(operation, alive)]
            if keeps.output:
                held.append(timeline.hold(tensor))
        return tensor, held

    def _factors(self, operation: Operation, alive: Mapping[Value, int]) -> list[int]:
        """Of what it reads, what its backward pass needs."""
        reads = [value for value in operation.reads if value in alive]
        if operation.layer is not None and operation.layer.kind == "mul" and len(reads) == 2:
            wants = [self.program.needs_gradient(value) for value in reversed(reads)]
            return [alive[value] for value, needed in zip(reads, wants, strict=True) if needed]
        return [alive[value] for value in dict.fromkeys(reads)]

    def _kept_beside(self, operation: Operation, keeps: Kept) -> list[int]:
        """New tensors that it keeps: masks, places, statistics, casts."""
        layer, found = operation.layer, []
        if layer is None:
            return []
        elements = self.rows.elements(operation.layout, operation.shape, operation.rows)
        heads = self._heads(layer)
        words = keeps.words + keeps.of_heads * (1.0 if heads is None else heads)
        each = words * operation.itemsize + keeps.bytes
        if each if isinstance(each, int | float) else each.any():
            found.append((elements * each).astype(np.int64))
        elif layer.kind == "stochastic_depth":
            found.append(self.rows.elements(operation.layout, (), operation.rows) * 4)
        if keeps.constant:
            found.append(np.full_like(elements, keeps.constant * operation.itemsize))
        sizes = self.gradients.sizes
        if keeps.statistics and layer.weights and layer.weights[0].name in sizes:
            found.append(sizes[layer.weights[0].name] * keeps.statistics)
        found += self.casts(operation)
        if self._casts_input(operation):
            found.append(self.size(operation.reads[0], HALF))
        return [self.timeline.make(size, "activations", operation.label) for size in found]

    def casts(self, operation: Operation) -> list[Counts]:
        """The weights that autocast has cast for it."""
        layer, sizes = operation.layer, self.gradients.sizes
        if not self.gradients.half or layer is None or layer.kind not in ("conv2d", "linear"):
            return []
        return [sizes[w.name] // 4 * HALF for w in layer.weights if w.name in sizes]

    def _casts_input(self, operation: Operation) -> bool:
        layer = operation.layer
        if not self.gradients.half or layer is None or layer.kind not in ("conv2d", "linear"):
            return False
        return layout_of(self.program, operation.reads[0])[-1] > HALF

    def run_back(self, operation: Operation, given: int, grads: dict[Value, int]) -> dict[str, int]:
        """The gradients of what it read, from that of what it gave; gives those of its weights."""
        timeline, label = self.timeline, operation.label
        wanted = [v for v in operation.reads if self.program.needs_gradient(v)]
        for owner in [o for v in wanted if is_parameter(o := self.program.by_value[v])]:
            assert owner.layer is not None
            made = self.gradients.made(owner.layer)
            self.gradients.settle(owner.layer, made, copied=False)
        wanted = [v for v in wanted if not is_parameter(self.program.by_value[v])]
        of_weights: dict[str, int] = {}
        if self._passes_on(operation):
            of_inputs = [(value, timeline.hold(given)) for value in wanted]
        else:
            space, of_inputs = self.workspace(operation), []
            if wanted:
                timeline.pass_by(space.backward, "workspace", label)
                of_inputs = [
                    (value, timeline.make(self.size(value), "activation_gradients", label))
                    for value in dict.fromkeys(wanted)
                ]
                timeline.pass_by(space.beside_gradient, "workspace", label)
            timeline.pass_by(space.of_weight, "workspace", label)
            if operation.layer is not None:
                of_weights = self.gradients.made(operation.layer)
        timeline.drop(given)
        for value, tensor in of_inputs:
            self._add(grads, value, tensor)
        return of_weights

    def _add(self, grads: dict[Value, int], value: Value, tensor: int) -> None:
        """Adds a gradient to what has come back for a value so far."""
        before = grads.get(value)
        if before is None:
            grads[value] = tensor
        elif self.timeline.alone(before):
            self.timeline.drop(tensor)
        else:
            grads[value] = self.timeline.make(self.size(value), "activation_gradients", value[0])
            self.timeline.drop(before)
            self.timeline.drop(tensor)

    def _keeps(self, operation: Operation) -> Kept:
        if operation.layer is not None:
            name = operation.layer.name
            if name not in self._kept:
                self._kept[name] = kept_by(operation.layer, self.synchronized)
            return self._kept[name]
        assert operation.step is not None
        return _SAME if operation.step.name == "copy_to" else _CONVERSION

    def _passes_on(self, operation: Operation) -> bool:
        if operation.step is not None:
            return _returns_as_it_is(operation.step)
        return self._keeps(operation).passes

    def workspace(self, operation: Operation) -> kernels.Workspace:
        known = self._spaces.get(operation.gives)
        if known is None:
            known = self._spaces[operation.gives] = self._workspace_of(operation)
        return known

    def _workspace_of(self, operation: Operation) -> kernels.Workspace:
        layer = operation.layer
        if layer is None:
            return _NO_WORKSPACE
        if layer.kind == "conv2d" and layer.weights:
            look = self._look(operation, layer)
            if look not in self._alike:
                self._alike[look] = self._convolution(operation, layer)
            return self._alike[look]
        if layer.kind == "dropout":
            elements = self.rows.elements(operation.layout, operation.shape, operation.rows)
            return kernels.mask(elements)
        if layer.kind == "attention":
            size, heads, windows = self.size(operation.gives), self._heads(layer), Windows.of(layer)
            if windows is not None:
                return windows.workspace(size, 1.0 if heads is None else heads)
            return kernels.attention(size, heads)
        return _NO_WORKSPACE

    def _look(self, operation: Operation, layer: Layer) -> Hashable:
        """Equal for convolutions that need equal room."""
        plan = self.program.plan
        return (
            layer.input_shape,
            layer.output_shape,
            layer.weights[0].shape,
            layer.weights[0].trainable,
            plan.flow.inputs[layer.name],
            operation.layout,
            operation.itemsize,
            plan.layers.get(layer.name),
            layout_of(self.program, operation.reads[0])[0],
        )

    def _convolution(self, operation: Operation, layer: Layer) -> kernels.Workspace:
        width = operation.itemsize
        whole = self.gradients.sizes.get(layer.weights[0].name, np.zeros_like(self.rows.own))
        held = whole * width // self.program.itemsize
        x, y = self.size(operation.reads[0], width), self.size(operation.gives)
        rows = self.rows.over(self.program.plan.flow.inputs[layer.name].group_size)
        return kernels.convolution(layer, x, held, y, rows, width)

    def _heads(self, layer: Layer) -> npt.NDArray[np.float64] | None:
        """The share of an attention layer's heads that each rank has; None: it is not cut."""
        plan = self.program.plan
        choice = plan.layers.get(layer.name)
        if choice is None or choice.scheme != "shard_heads":
            return None
        return tiled(heads_of(layer, choice), plan.world_size) / layer.heads


def is_parameter(operation: Operation) -> bool:
    return operation.layer is not None and operation.layer.kind == "parameter"


def _returns_as_it_is(step: Conversion) -> bool:
    """Whether the gradient of a conversion's output is that of its input, in the same memory."""
    summed = isinstance(step.source.placement, Partial)
    whole = isinstance(step.target.placement, Replicate) and step.name == "all_reduce"
    return summed and whole and step.gradient == "same"
