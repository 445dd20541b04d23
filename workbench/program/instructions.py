"""The instructions of a step: what is done, to what, and by whom.

All ranks execute the same ones on different amounts, some of them zero: an instruction is that of
all ranks at once. It knows neither seconds nor bytes; those are answers of whoever reads it.

    load          the rows of all micro-batches
    weigh         the rows: all ranks add up their weights in the loss
    zero_grad     gradients of the last step, or round, are forgotten
    keep_weights  those that the gradients of this step are computed at, for later
    prefetch      rows of a round to come may be gathered from here on
    forward       a layer
    convert       a change of layout, forward or backward
    loss          of what the model returns, and its gradient
    recompute     the forward pass of a segment, once more
    backward      a layer
    reduce        the gradients of a bucket begin to be summed, beside what follows
    wait          for sums that have been started
    rescale       gradients that are to be means over other rows than the whole step's
    agree         all ranks on the loss and on whether to go on
    unscale       gradients of a loss that was scaled; if one is no number, nothing is updated
    adjust        gradients, by the strategy's own rule
    clip          gradients, by the norm of all of them or element by element
    update        of parameters, by the optimizer
    hand_out      parameters, from the ranks that have updated them to all that hold them
    average       parameters, every few steps
    correct       parameters that were averaged, by the strategy's own rule

What a strategy does only in every few steps is marked by how many (`every`): it is done in step s
if s + 1 is a multiple. A program is that of a step in which all is done.

The terms of torch and MPI are used where they have one: `zero_grad`, reduce, wait.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from workbench.plan.collective.algorithm import Algorithm
from workbench.plan.collective.codec import AnyCodec
from workbench.program.buckets import Buckets, Column
from workbench.program.operations import Operation, Value
from workbench.program.rows import Rows

Direction = Literal["forward", "backward"]
Updater = Literal["holders", "owners", "server"]
"""Who updates a parameter: all ranks that hold it, each the part that it owns, or one of them."""


@dataclass(frozen=True)
class Pass:
    """Rows that go through some operations together, forward and back.

    Attributes:
        round: its index in the micro-batch; None: of what runs once in the micro-batch.
        reads: the values that it is given, but for the model's input.
        gives: the values that it leaves.
        from_loss: whether its gradients come from a loss, and not from the passes that read it.
    """

    micro_batch: int
    round: int | None
    rows: Rows
    reads: tuple[Value, ...]
    gives: tuple[Value, ...]
    from_loss: bool = True

    def __str__(self) -> str:
        if self.round is None:
            return f"micro-batch {self.micro_batch}"
        return f"micro-batch {self.micro_batch}, round {self.round}"


@dataclass(frozen=True)
class Load:
    word: ClassVar[str] = "load"
    rows: Rows
    micro_batches: tuple[Rows, ...]


@dataclass(frozen=True)
class Weigh:
    """The weights of all rows in the loss are added up, over all ranks."""

    word: ClassVar[str] = "weigh"


@dataclass(frozen=True)
class ZeroGrad:
    """The gradients of these parameters are forgotten: what follows makes new ones."""

    word: ClassVar[str] = "zero_grad"
    parameters: tuple[str, ...]
    every: int = 1


@dataclass(frozen=True)
class KeepWeights:
    """Copies these parameters, which the gradients of this step will be computed at."""

    word: ClassVar[str] = "keep_weights"
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Prefetch:
    """A conversion of a pass to come may begin: a gather of rows over ranks without shared memory.

    Where ranks share memory it takes no longer than what would start it, and nothing is done.
    """

    word: ClassVar[str] = "prefetch"
    operation: Operation
    on: Pass


@dataclass(frozen=True)
class Forward:
    word: ClassVar[str] = "forward"
    operation: Operation
    on: Pass


@dataclass(frozen=True)
class Convert:
    """A change of layout: one collective, or a slice, or nothing; the backward one is its dual.

    Attributes:
        prefetch: the index of the instruction that has begun it, if any.
        gradients: how many readers hand one back, backward, for what the conversion gives, which
            are added up first.
    """

    word: ClassVar[str] = "convert"
    operation: Operation
    on: Pass
    direction: Direction = "forward"
    prefetch: int | None = None
    gradients: int = 1


@dataclass(frozen=True)
class Loss:
    word: ClassVar[str] = "loss"
    results: tuple[Value, ...]
    on: Pass


@dataclass(frozen=True)
class Recompute:
    """The forward pass of a segment, whose activations were let go of, just before its backward."""

    word: ClassVar[str] = "recompute"
    segment: int
    operations: tuple[Operation, ...]
    on: Pass


@dataclass(frozen=True)
class Backward:
    """A layer's backward pass: gradients of what it read, and of its parameters.

    Attributes:
        adds: whether its parameters have gradients already, to which these are added.
        gradients: how many readers hand one back for what the layer gives, added up first.
    """

    word: ClassVar[str] = "backward"
    operation: Operation
    on: Pass
    adds: bool
    gradients: int


@dataclass(frozen=True)
class Reduce:
    """The gradients of one bucket of each rank begin to be summed over the replicas.

    Attributes:
        members: Ranks r whose r % group size is one of these take part; the others, which fill
            theirs elsewhere or have none, do not.
        to: the ranks that get the sums: all that hold the parameters, owners their parts, or the
            server.
        after: the index, for each place of the column, of the instruction behind which ranks there
            begin; those who come first wait for the others of their group. -1: at this one.
    """

    word: ClassVar[str] = "reduce"
    column: Column
    members: tuple[int, ...]
    to: Updater
    algorithm: Algorithm
    codec: AnyCodec | None
    after: tuple[int, ...]
    every: int = 1


@dataclass(frozen=True)
class Wait:
    """Until sums are there.

    Attributes:
        reduces: the indices of the instructions that begin them.
        late: how many steps before this one they began.
    """

    word: ClassVar[str] = "wait"
    reduces: tuple[int, ...]
    late: int = 0
    every: int = 1


@dataclass(frozen=True)
class Rescale:
    """Gradients, which are sums over some rows divided by the step's, become means over these.

    Attributes:
        on: the round whose rows these are, on all ranks; None: the rows of the step on the ranks
            that hold one copy of the parameter together.
    """

    word: ClassVar[str] = "rescale"
    parameters: tuple[str, ...]
    on: Pass | None


@dataclass(frozen=True)
class Agree:
    """All ranks on the loss, on whether to stop, and on what was asked of them."""

    word: ClassVar[str] = "agree"


@dataclass(frozen=True)
class Unscale:
    """Gradients of a scaled loss become the loss's; all ranks agree on whether all are numbers.

    If not, what follows it is left out of this step, on all ranks. A program is that of a step in
    which they are.

    Attributes:
        by: who unscales each: who updates it.
    """

    word: ClassVar[str] = "unscale"
    parameters: tuple[str, ...]
    by: Updater


@dataclass(frozen=True)
class Adjust:
    """Gradients go through the strategy's own rule before they are used."""

    word: ClassVar[str] = "adjust"
    parameters: tuple[str, ...]
    every: int = 1


@dataclass(frozen=True)
class Clip:
    """Gradients that the update is to see, clipped.

    Attributes:
        norm: the greatest norm of all of them together, over which all ranks agree; None: any.
        value: the greatest magnitude of an element; None: any.
        by: the ranks that clip each, which are those that update it.
    """

    word: ClassVar[str] = "clip"
    parameters: tuple[str, ...]
    norm: float | None
    value: float | None
    by: Updater
    every: int = 1


@dataclass(frozen=True)
class Update:
    """The optimizer moves parameters.

    Attributes:
        by: the ranks that move each, of those that hold the same piece of it.
    """

    word: ClassVar[str] = "update"
    parameters: tuple[str, ...]
    by: Updater
    every: int = 1


@dataclass(frozen=True)
class HandOut:
    """Parameters go from who has updated them to the other ranks that hold them.

    Attributes:
        buckets: the buckets in which they travel; each rank takes its own in their order.
        source: the ranks that have updated them.
        fused: whether it is the second half of an all-reduce of which `Reduce` was the first.
    """

    word: ClassVar[str] = "hand_out"
    buckets: Buckets
    source: Updater
    fused: bool
    every: int = 1


@dataclass(frozen=True)
class Average:
    """Parameters, and momentum where that is averaged too, over the replicas."""

    word: ClassVar[str] = "average"
    buckets: Buckets
    every: int


@dataclass(frozen=True)
class Correct:
    """Parameters that were averaged go through the strategy's own rule."""

    word: ClassVar[str] = "correct"
    parameters: tuple[str, ...]
    every: int


Instruction = (
    Load
    | ZeroGrad
    | KeepWeights
    | Prefetch
    | Forward
    | Convert
    | Loss
    | Recompute
    | Backward
    | Reduce
    | Wait
    | Rescale
    | Agree
    | Unscale
    | Adjust
    | Clip
    | Update
    | HandOut
    | Average
    | Correct
    | Weigh
)


@dataclass(frozen=True)
class Section:
    """Instructions of a step that follow each other: of one pass and one kind, or of no pass.

    A backward section has also the sums that begin in it, and what is recomputed.

    Attributes:
        kind: what they are; "step": what lies between passes.
        on: the pass; None: of none.
        first: the number of the first of them in the step.
    """

    kind: Literal["prefetch", "forward", "loss", "backward", "step"]
    on: Pass | None
    first: int
    instructions: tuple[Instruction, ...]

    @property
    def numbered(self) -> Iterator[tuple[int, Instruction]]:
        return enumerate(self.instructions, self.first)


def turn_of(instruction: Instruction) -> int:
    """Steps from one execution to the next; gradients are forgotten in other steps than that."""
    if isinstance(instruction, ZeroGrad):
        return 1
    return int(getattr(instruction, "every", 1))
