"""The tensors of a forward and a backward pass, operation by operation.

A value lives from the operation that gives it to the last one that reads it, and beyond that while
autograd saves it. The backward pass goes through the operations in reverse: each makes the
gradients of its inputs beside that of its output, then frees what it saved. Gradients from several
readers are added in the first one's memory, unless something else holds that.

Of a recomputed segment only the inputs are saved. Once the gradients of its outputs are there, it
runs forward again, and then backward; its inputs stay until that is done.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from workbench.predict.memory.execution import Execution, is_parameter
from workbench.predict.memory.gradients import Gradients
from workbench.predict.memory.timeline import MemoryTimeline, Phase
from workbench.predict.memory.workspaces import Workspaces
from workbench.program.operations import Operation, Value
from workbench.program.rows import Counts, Rows
from workbench.program.step import Program


@dataclass
class Segment:
    """Operations that run again in the backward pass, and their saved inputs."""

    operations: tuple[Operation, ...]
    inputs: dict[Value, int]


@dataclass
class Tape:
    """The state that a forward pass leaves for its backward pass.

    Attributes:
        kept: the tensors that each operation saves, in order; segments stand where they run.
        results: the tensors of the values that were asked for.
        again: the segment that has been recomputed, and the tape of that; None: there is none.
    """

    kept: list[tuple[Operation, list[int]] | Segment] = field(default_factory=list)
    results: dict[Value, int] = field(default_factory=dict)
    again: "tuple[Segment, Tape] | None" = None


class PassMemory:
    """The memory of a pass over some of a program's operations.

    Args:
        program: the program that the operations are part of.
        timeline: the timeline that tensors are written to.
        gradients: the gradients of weights, which take what the backward pass makes.
        rows: the rows of each rank in this pass.
        workspaces: the workspace of the devices' kernels.
    """

    def __init__(
        self,
        program: Program,
        timeline: MemoryTimeline,
        gradients: Gradients,
        rows: Rows,
        workspaces: Workspaces,
    ) -> None:
        self.program, self.timeline = program, timeline
        self.gradients, self.rows = gradients, rows
        self._execution = Execution(program, timeline, gradients, rows, workspaces)

    def forward(
        self,
        operations: Iterable[Operation],
        given: Mapping[Value, int],
        wanted: Sequence[Value],
        phase: Phase = "forward",
    ) -> Tape:
        """Runs operations forward.

        Args:
            operations: the operations, in order.
            given: the tensors of values that exist already; their memory is the caller's.
            wanted: the values to keep until the tape is dropped.
            phase: the phase that the operations run in.
        """
        chosen = [operation for operation in operations if _has_memory(operation)]
        readers: dict[Value, int] = {}
        for value in wanted:
            readers[value] = readers.get(value, 0) + 1
        for operation in chosen:
            for value in _each(operation.reads):
                readers[value] = readers[value] + 1 if value in readers else 1
        alive = {value: self.timeline.hold(tensor) for value, tensor in given.items()}
        tape, casts = Tape(), list[int]()
        for run in _runs(chosen):
            segment = None
            if run[0].segment is not None and any(operation.needs_gradient for operation in run):
                inputs = {v: alive[v] for v in _read_inside(run) if v in alive}
                held = {value: self.timeline.hold(tensor) for value, tensor in inputs.items()}
                segment = Segment(tuple(run), held)
                tape.kept.append(segment)
            for operation in run:
                self.timeline.at(phase, operation.label)
                tensor, kept = self._execution.run(operation, alive)
                alive[operation.gives] = tensor
                if segment is not None:
                    casts += self._forget(operation, kept)
                elif operation.needs_gradient:
                    tape.kept.append((operation, kept))
                self._pass_on(operation, alive, readers)
        for value in [v for v in alive if v not in wanted]:
            self.timeline.drop(alive.pop(value))
        for tensor in casts:
            self.timeline.drop(tensor)
        tape.results = alive
        return tape

    def backward(self, tape: Tape, operation: Operation, grads: dict[Value, int]) -> None:
        """Runs the last operation of a tape backward.

        Args:
            tape: the tape of `forward`; what the operation saved is freed.
            operation: the operation; the gradients of a parameter are there when all its readers
                have given theirs.
            grads: the gradients of values; those of the operation's inputs replace that of its
                output.
        """
        if not _has_memory(operation):
            return
        entry = (tape if tape.again is None else tape.again[1]).kept.pop()
        assert not isinstance(entry, Segment)
        ran, kept = entry
        assert ran.gives == operation.gives, f"{ran.label} is not {operation.label}"
        self.timeline.at("backward", ran.label)
        if ran.step is not None:
            self.gradients.arriving.finish()
        given = grads.pop(ran.gives, None)
        of_weights = {} if given is None else self._execution.run_back(ran, given, grads)
        for tensor in kept:
            self.timeline.drop(tensor)
        if of_weights:
            self.gradients.settle(of_weights)
        if tape.again is not None and not tape.again[1].kept:
            for tensor in tape.again[0].inputs.values():
                self.timeline.drop(tensor)
            tape.again = None

    def size(self, value: Value, itemsize: int | None = None) -> Counts:
        """Bytes of a value on each rank [ranks]."""
        return self._execution.size(value, itemsize)

    def recompute(self, tape: Tape) -> None:
        """Runs the last segment of a tape forward once more."""
        segment = tape.kept.pop()
        assert isinstance(segment, Segment)
        operations = [operation._replace(segment=None) for operation in segment.operations]
        outputs = _read_outside(self.program, segment.operations)
        self.timeline.at("recompute", operations[0].label)
        buffers = self.timeline.make(self._buffers(operations), "workspace", operations[0].label)
        again = self.forward(operations, segment.inputs, outputs, "recompute")
        for tensor in (*again.results.values(), buffers):
            self.timeline.drop(tensor)
        tape.again = segment, again

    def _buffers(self, operations: Iterable[Operation]) -> Counts:
        """Bytes of copies of running statistics [ranks], so that a batch counts once."""
        pieces, total = self.program.pieces, np.zeros_like(self.rows.own)
        for operation in operations:
            for weight in operation.layer.weights if operation.layer is not None else ():
                if not (weight.trainable or weight.frozen):
                    total = total + pieces.sizes[weight.name]
        return total

    def _forget(self, operation: Operation, kept: list[int]) -> list[int]:
        """Frees what an operation of a segment saves; autocast still caches the weights it cast."""
        for tensor in kept:
            self.timeline.drop(tensor)
        cast = self._execution.casts(operation)
        return [self.timeline.make(size, "activations", operation.label) for size in cast]

    def _pass_on(
        self, operation: Operation, alive: dict[Value, int], readers: dict[Value, int]
    ) -> None:
        """Drops the tensors of values that have no reader left."""
        for value in _each(operation.reads):
            readers[value] -= 1
            if readers[value] == 0 and value in alive:
                self.timeline.drop(alive.pop(value))
        if operation.gives not in readers:
            self.timeline.drop(alive.pop(operation.gives))


def _each(reads: tuple[Value, ...]) -> Iterable[Value]:
    """Every value that is read, once."""
    return reads if len(reads) == 1 else dict.fromkeys(reads)


def _has_memory(operation: Operation) -> bool:
    """Whether an operation gives a new tensor: no size, and no parameter."""
    return operation.itemsize > 0 and not is_parameter(operation)


def _runs(operations: Iterable[Operation]) -> Iterator[list[Operation]]:
    """Operations of one segment together, others one by one."""
    for segment, run in groupby(operations, lambda operation: operation.segment):
        if segment is None:
            yield from ([operation] for operation in run)
        else:
            yield list(run)


def _read_inside(run: Sequence[Operation]) -> list[Value]:
    """The values that these operations read and do not give."""
    given = {operation.gives for operation in run}
    reads = dict.fromkeys(value for operation in run for value in operation.reads)
    return [value for value in reads if value not in given]


def _read_outside(program: Program, run: Sequence[Operation]) -> list[Value]:
    """The values that these operations give and others read."""
    given = {operation.gives for operation in run}
    others = (operation for operation in program.operations if operation.gives not in given)
    read = {value for operation in others for value in operation.reads} | set(
        program.operations.results
    )
    return [operation.gives for operation in run if operation.gives in read]
