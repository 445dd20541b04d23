"""One call of a collective, on all ranks at once: which, among whom, and of how many elements."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from workbench.plan.all_reduce import Algorithm
from workbench.plan.codec import Codec
from workbench.plan.layout import Conversion, Layout
from workbench.plan.mesh import replica_groups, shard_groups
from workbench.program.hosts import Groups
from workbench.program.rows import Counts, Rows

Phase = Literal["forward", "backward", "step"]
Purpose = Literal["shard", "replica", "norm", "control"]


class Exchange(NamedTuple):
    """An all-to-all: from which layout to which, of how many rows."""

    step: Conversion
    source: Layout
    target: Layout
    rows: Rows


class Summed(NamedTuple):
    """An all-reduce that is started, and goes on beside what follows.

    Attributes:
        algorithm: as asked for.
        buffer: whether what is summed lies in memory made for it, shared where ranks share.
        codec: through which it travels.
    """

    algorithm: Algorithm
    buffer: bool
    codec: Codec | None = None


@dataclass(frozen=True, eq=False, slots=True)
class CollectiveCall:
    """One call of a collective on every rank that takes part.

    Attributes:
        op: "all_gather", "reduce_scatter", "all_to_all", "all_reduce", "reduce" or "broadcast".
        label: the layer, or "gradients", "parameters", "status", "labels".
        phase: of the step.
        purpose: of its groups: "shard" is over shard groups, "replica" and "norm" are over
            ranks that hold the same piece, "control" is over the world.
        group_size: of the shard groups.
        numel: elements of each rank: of an all_gather, of its own piece; of a reduce_scatter, of
            the piece that it gets; else of the whole that it has.
        itemsize: bytes of an element.
        takes: 1 for each rank that takes part, else 0; None: all do.
        how: of an all-to-all; or of an all-reduce that goes on beside what follows; None: callers
            wait in it.
        server: of a reduce or a broadcast: 1 for each rank that is the root of its group.
        every: steps from one to the next; 1: it is in every step.
    """

    op: str
    label: str
    phase: Phase
    purpose: Purpose
    group_size: int
    numel: Counts
    itemsize: int
    takes: Counts | None = None
    how: Exchange | Summed | None = None
    server: Counts | None = None
    every: int = 1

    def groups(self, world_size: int) -> Groups:
        """The ranks that take part together."""
        match self.purpose:
            case "shard":
                return shard_groups(self.group_size, world_size)
            case "control":
                return shard_groups(world_size, world_size)
            case _:
                return replica_groups(self.group_size, world_size)
