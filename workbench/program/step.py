"""A step as a value: what all ranks execute, in order."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, cast

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.question import experiment_of, required_machine, required_plan
from workbench.plan.experiment.sync import warm
from workbench.plan.io.html import Markup, save
from workbench.plan.machine.machine import Machine
from workbench.plan.placement.placement import shard_groups
from workbench.plan.plans.plan import Plan
from workbench.program.buckets import Bucket, Buckets, Pieces, buckets_of, handed_out, late
from workbench.program.collectives import CollectiveCall, Collectives
from workbench.program.instructions import (
    Average,
    Convert,
    HandOut,
    Instruction,
    Prefetch,
    Reduce,
    Section,
)
from workbench.program.operations import Operation, Operations, operations_of
from workbench.program.rows import HostLayout, Representatives
from workbench.program.show import ProgramDisplay
from workbench.program.unrolling import unrolled

if TYPE_CHECKING:
    import pandas

MANY_RANKS = 64
"""Beyond, few of them stand for all."""


@dataclass(frozen=True, eq=False)
class Program:
    """What all ranks execute in one step in the middle of a run, in order.

    Programs are equal whose ranks execute the same instructions.

    Attributes:
        experiment: the experiment of the ranks that are written for.
        pieces: the pieces of its weights.
        operations: the operations of its plan.
        hosts: the hosts of its ranks.
        representatives: these ranks, of a larger world; None: all ranks are written for.
        batches: the rows of each rank in each micro-batch; None: those of a whole batch.
        carried: states of each parameter that the strategy keeps for steps to come.
    """

    experiment: Experiment
    pieces: Pieces
    operations: Operations
    hosts: HostLayout
    representatives: Representatives | None = None
    batches: tuple[tuple[int, ...], ...] | None = None
    carried: int = 0

    @property
    def warmup(self) -> int:
        """The number of first steps that are unlike the others: synchronous."""
        found: int = self.experiment.sync.timing.warmup
        return found

    @cached_property
    def warm(self) -> "Program":
        """What the first steps execute."""
        sync = self.experiment.sync
        experiment = self.experiment.replace(sync=warm(sync))
        return replace(self, experiment=experiment, carried=len(sync.timing.remembers))

    @property
    def remembered(self) -> int:
        """How many states of each parameter the strategy remembers."""
        return self.carried + len(self.experiment.sync.timing.remembers)

    def at(self, step: int) -> "Program":
        """What a step executes, if all that is done every few steps is done in it."""
        return self.warm if step < self.warmup else self

    @property
    def plan(self) -> Plan:
        return cast(Plan, self.experiment.plan)

    @property
    def itemsize(self) -> int:
        """Bytes of an element of a weight."""
        return self.operations.itemsize

    @cached_property
    def ranks(self) -> Representatives:
        return self.representatives or Representatives.all_of(self.experiment)

    @cached_property
    def buckets(self) -> Buckets:
        """Those in which its gradients travel."""
        return buckets_of(self.experiment, self.pieces)

    @cached_property
    def handed(self) -> Buckets:
        """Those in which weights travel that other ranks have updated."""
        if late(self.experiment):
            return handed_out(self.experiment, self.pieces)
        return self.buckets

    @cached_property
    def collectives(self) -> Collectives:
        return Collectives(self.experiment, self.operations, self.ranks.world_size)

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The instructions in order, by what is done together."""
        batches = self.batches or self.ranks.batches
        return unrolled(self.experiment, self.operations, self.buckets, self.handed, batches)

    @cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """All of them, in order."""
        return tuple(chain.from_iterable(section.instructions for section in self.sections))

    def of(self, rank: int) -> "RankProgram":
        """What one rank executes, to be looked at.

        Raises:
            IndexError: there is no such rank.
        """
        world = self.ranks.world_size
        if not 0 <= rank < world:
            raise IndexError(f"no rank {rank}: there are 0 to {world - 1}")
        return RankProgram(self, rank)

    def _shown(self, rank: int | None = None) -> ProgramDisplay:
        column = None if rank is None else int(self.ranks.column[rank])
        return ProgramDisplay(
            self.experiment, self.ranks, self.instructions, self.collectives, rank, column
        )

    def __repr__(self) -> str:
        return f"<Program {self._shown().title}>"

    def __str__(self) -> str:
        return self._shown().text()

    def to_frame(self) -> "pandas.DataFrame":
        """One line for each instruction."""
        return self._shown().frame()

    def save(self, path: str | Path) -> None:
        """Writes its table into a file: "x.html" or "x.csv".

        Raises:
            ValueError: the name has another ending.
        """
        save(self, path)

    def _repr_html_(self) -> Markup:
        return self._shown().html()

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Program)
            and self.ranks == other.ranks
            and self.instructions == other.instructions
        )

    def __hash__(self) -> int:
        return hash(self.ranks)


@dataclass(frozen=True)
class RankProgram:
    """What one rank executes.

    Attributes:
        program: the program of all ranks.
        rank: the rank of the world.
    """

    program: Program
    rank: int

    @cached_property
    def warm(self) -> "RankProgram":
        """What it executes in the first steps, which are synchronous."""
        return self.program.warm.of(self.rank)

    def calls(self) -> Iterator[CollectiveCall]:
        """The collectives that it takes part in, in the order in which it begins them.

        It begins to sum a bucket when its own gradients are there, whoever else is not as far, and
        takes the buckets that all ranks hand out or average in its own order.
        """
        program, column = self.program, self._column
        begun = self._begun()
        for index, instruction in enumerate(program.instructions):
            calls = program.collectives.of(instruction)
            match instruction:
                case Reduce(after=after, column=bucket) if after[bucket.place[column]] >= 0:
                    continue
                case Prefetch(operation, on) if not self._shares(operation):
                    calls = program.collectives.of_operation(operation, on.rows, "forward")
                case Convert(operation, prefetch=int()) if not self._shares(operation):
                    continue
                case HandOut(buckets) | Average(buckets):
                    place = int(buckets.place[column])
                    own = buckets.of_place[place]
                    both = zip(buckets.columns(), calls, strict=True)
                    mine = {one.of_place[place]: call for one, call in both}
                    calls = (mine[bucket] for bucket in own)
            yield from (c for c in calls if c.takes is None or c.takes[column])
            yield from begun.get(index, ())

    def _begun(self) -> Mapping[int, Sequence[CollectiveCall]]:
        """The sums that it begins behind each instruction, in the order of its buckets."""
        order = {name: place for place, name in enumerate(reversed(self.program.pieces.names))}
        found: dict[int, list[tuple[int, CollectiveCall]]] = {}
        for instruction in self.program.instructions:
            if isinstance(instruction, Reduce):
                part = self.part_of(instruction)
                if part is not None:
                    bucket, after = part
                    (call,) = self.program.collectives.of(instruction)
                    found.setdefault(after, []).append((order[bucket.names[0]], call))
        return {
            after: [call for _, call in sorted(calls, key=lambda one: one[0])]
            for after, calls in found.items()
        }

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Those in which its gradients travel, in the order in which they begin."""
        return self.program.buckets.of_place[int(self.program.buckets.place[self._column])]

    @property
    def handed(self) -> tuple[Bucket, ...]:
        """Those in which weights travel that other ranks have updated."""
        return self.program.handed.of_place[int(self.program.handed.place[self._column])]

    def part_of(self, reduce: Reduce) -> tuple[Bucket, int] | None:
        """Its bucket that is summed, and the index of the instruction behind which that begins.

        -1: it begins at the instruction itself. None: it takes no part.
        """
        place = int(reduce.column.place[self._column])
        bucket = reduce.column.of_place[place]
        if bucket is None or self._column % reduce.column.group_size not in reduce.members:
            return None
        return bucket, reduce.after[place]

    @property
    def _column(self) -> int:
        """The rank that stands for it, of those that are written for."""
        return int(self.program.ranks.column[self.rank])

    def _shares(self, operation: Operation) -> bool:
        """Whether all ranks that a conversion goes over share memory with this one."""
        assert operation.step is not None
        world, k = len(self.program.ranks.ranks), operation.step.group_size
        return int(self.program.hosts.mates(shard_groups(k, world))[self._column]) == k

    def __str__(self) -> str:
        return self.program._shown(self.rank).text()

    def __repr__(self) -> str:
        return f"<RankProgram {self.program._shown(self.rank).title}>"

    def to_frame(self) -> "pandas.DataFrame":
        """One line for each instruction that it takes part in."""
        return self.program._shown(self.rank).frame()

    def save(self, path: str | Path) -> None:
        """Writes its table into a file: "x.html" or "x.csv".

        Raises:
            ValueError: the name has another ending.
        """
        save(self, path)

    def _repr_html_(self) -> Markup:
        return self.program._shown(self.rank).html()


def program_of(experiment: Experiment, ranks_per_host: int | None = None) -> Program:
    """What all ranks of an experiment execute.

    Args:
        ranks_per_host: how many ranks share memory; None: all ranks of the world do.
    """
    hosts = HostLayout.of(experiment.plan.world_size, ranks_per_host)
    pieces = Pieces.of(experiment)
    return Program(experiment, pieces, operations_of(experiment, pieces), hosts)


def reduced(experiment: Experiment, ranks: Representatives) -> Program:
    """What a few ranks execute that stand for all."""
    own = ranks.reduced(experiment)
    pieces = Pieces.of(own)
    hosts = HostLayout.of(own.plan.world_size)
    return Program(own, pieces, operations_of(own, pieces), hosts, ranks)


def program(
    plan: Plan | Experiment,
    machine: Machine | None = None,
    experiment: Experiment | None = None,
) -> Program:
    """What the ranks of an experiment execute in one step, to be looked at and compared.

    Of a world of more than 64 ranks a few are written for, which stand for the others.

    Args:
        plan: the plan; or an experiment, whose own plan is meant.
        machine: the machine that says how many ranks share memory; None: all ranks of the world do.
        experiment: the experiment that runs it; its own plan is replaced by `plan`. None: a step
            of momentum SGD with 32 samples for each rank.

    Raises:
        PlanError: no plan.
        ExperimentError: no experiment, or one that cannot run this plan; or two.
        MachineError: no machine.
    """
    chosen = required_plan("program", plan)
    hosts = None if machine is None else required_machine("program", machine).ranks_per_host
    step = experiment_of("program", plan, chosen, experiment)
    if chosen.world_size > MANY_RANKS:
        return reduced(step, Representatives.of(step, None))
    return program_of(step, hosts)
