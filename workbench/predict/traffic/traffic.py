"""What each rank receives in every collective of a step: calls, messages and bytes; exact.

The rows are those of the workbench's recorder, which counts what a rank receives. They are computed
instruction by instruction of the step's program, for each rank or each pair.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from workbench.plan.io.errors import ExperimentError
from workbench.plan.io.html import Markup, frame_html, frame_of, save
from workbench.predict.traffic.collective_costs import Received, Summing, Table, received_of
from workbench.program.buckets import late
from workbench.program.collectives import CollectiveCall, Phase, Purpose
from workbench.program.rows import Counts
from workbench.program.step import Program

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Collective:
    """All calls of one collective in a step, on all ranks.

    Attributes:
        op: "all_gather", "reduce_scatter", "all_to_all", "all_reduce", "reduce" or "broadcast".
        layer: the name of the layer that it is for.
        phase: the phase of the step.
        purpose: the purpose of its groups, such as "shard".
        groups: the groups of ranks that take part together.
        calls: the number of calls on each rank of the world [ranks].
        messages: the non-empty messages that each rank receives [ranks].
        bytes: the bytes of these messages [ranks].
        every: the number of steps from one call to the next; 1: it is in every step.
    """

    op: str
    layer: str
    phase: Phase
    purpose: Purpose
    groups: tuple[tuple[int, ...], ...]
    calls: tuple[int, ...]
    messages: tuple[int, ...]
    bytes: tuple[int, ...]
    every: int = 1


_OF_AN_UPDATE = ("parameters", "clip")


@dataclass(frozen=True)
class Traffic:
    """The collectives of one step.

    Attributes:
        collectives: the collectives, in the order of the step.
        first: those of the first steps, where these are unlike the others.
        warmup: how many first steps that are.
        late: how many steps after these move no weights, as no sum has come yet.
    """

    collectives: tuple[Collective, ...]
    first: tuple[Collective, ...] = ()
    warmup: int = 0
    late: int = 0

    def received_bytes(self, rank: int) -> float:
        """Bytes that one rank receives in a step; what comes every n steps counts an n-th."""
        return sum(c.bytes[rank] / c.every for c in self.collectives)

    @property
    def most_received_bytes(self) -> float:
        """Bytes that the rank receives that receives most."""
        return max(self.received_bytes(rank) for rank in range(self.world_size))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.collectives[0].bytes)

    def to_frame(self) -> "pandas.DataFrame":
        """One line for each collective: what the rank receives that receives most of it."""
        rows = (
            {
                "op": one.op,
                "layer": one.layer,
                "phase": one.phase,
                "purpose": one.purpose,
                "calls": max(one.calls),
                "messages": max(one.messages),
                "bytes": max(one.bytes),
                "every": one.every,
            }
            for one in self.collectives
        )
        columns = ("op", "layer", "phase", "purpose", "calls", "messages", "bytes", "every")
        return frame_of(rows, columns)

    def save(self, path: str | Path) -> None:
        """Writes its table into a file: "x.html" or "x.csv".

        Raises:
            ValueError: the name has another ending.
        """
        save(self, path)

    def __repr__(self) -> str:
        most = f"{self.most_received_bytes / 1e6:,.2f} MB" if self.collectives else "nothing"
        return f"<Traffic of {len(self.collectives):,} collectives: a rank receives at most {most}>"

    def _repr_html_(self) -> Markup:
        title = f"{repr(self).strip('<>')} in a step"
        return frame_html(title, self.to_frame(), "collectives")

    def rows(
        self, rank: int, step: int | None = None
    ) -> tuple[tuple[str, str, str, str, int, int, int], ...]:
        """(group, op, layer, phase, calls, messages, bytes) of one rank, as a recorder has them.

        Args:
            rank: the rank's number in the world.
            step: the number of the step, since some are unlike others; None: a step behind the
                first ones that has all collectives.
        """
        found: list[tuple[str, str, str, str, int, int, int]] = []
        is_first = step is not None and step < self.warmup
        fills = step is not None and 0 <= step - self.warmup < self.late
        for one in self.first if is_first else self.collectives:
            ranks = next(group for group in one.groups if rank in group)
            name = f"{one.purpose}({','.join(map(str, ranks))})"
            counts = (one.calls[rank], one.messages[rank], one.bytes[rank])
            due = step is None or (step + 1) % one.every == 0
            if fills and one.layer in _OF_AN_UPDATE:
                continue
            if one.calls[rank] and due:
                found.append((name, one.op, one.layer, one.phase, *counts))
        return tuple(found)


def traffic_of(program: Program) -> Traffic:
    """The collectives of one step of an experiment, and of its first steps."""
    found = Counting(program).found()
    if program.warmup:
        first = Counting(program.warm).found().collectives
        found = replace(found, first=first, warmup=program.warmup)
    return replace(found, late=late(program.experiment))


Key = tuple[str, str, Phase, Purpose, tuple[tuple[int, ...], ...], int]


class Counting:
    """Adds up what every collective of a step brings.

    Args:
        program: the program of the step.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.world = program, program.plan.world_size
        self.everywhere = np.ones(self.world, dtype=np.int64)
        self.summing = Summing(program.hosts)
        self._sums: dict[Key, tuple[Counts, Counts, Counts]] = {}

    def found(self) -> Traffic:
        """The collectives, in the order in which they first occur."""
        collectives = self.program.collectives
        for instruction in self.program.instructions:
            for call in collectives.of(instruction):
                self._add(call)
        found = []
        for (op, layer, phase, purpose, groups, every), sums in self._sums.items():
            calls, messages, sizes = map(_listed, sums)
            found.append(
                Collective(op, layer, phase, purpose, groups, calls, messages, sizes, every)
            )
        return Traffic(tuple(found))

    def _add(self, call: CollectiveCall) -> None:
        got, calls = received_of(call, self.summing), call.takes
        if calls is None:
            calls = self.everywhere
        groups = tuple(map(tuple, call.groups(self.world)))
        key = (call.op, call.label, call.phase, call.purpose, groups, call.every)
        sums = self._sums.setdefault(key, self._nothing())
        for total, more in zip(sums, (calls, got.messages * calls, got.bytes * calls), strict=True):
            total += more
        self.count(key, got, calls)

    def count(self, key: Key, got: Received, calls: Counts) -> None:
        """Notes a collective and each rank's calls; does nothing here, for subclasses."""

    def _nothing(self) -> tuple[Counts, Counts, Counts]:
        none = np.zeros_like(self.everywhere)
        return none, none.copy(), none.copy()


def _listed(counts: Counts) -> tuple[int, ...]:
    return tuple(counts.tolist())


MOST_RANKS = 512


@dataclass(frozen=True, eq=False)
class Pairs:
    """All calls of one collective in a step, for each pair of ranks.

    Attributes:
        op: the collective's name in the recorder, such as "all_gather".
        layer: the name of the layer that it is for.
        phase: the phase of the step.
        purpose: the purpose of its groups, such as "shard".
        every: the number of steps from one call to the next; 1: it is in every step.
        bytes: bytes that a rank receives of another one [receiver, sender].
    """

    op: str
    layer: str
    phase: Phase
    purpose: Purpose
    every: int
    bytes: Table


def pairs_of(program: Program) -> tuple[Pairs, ...]:
    """The collectives of one step, for each pair of ranks; rows add up to those of `traffic_of`.

    Raises:
        ExperimentError: more than 512 ranks, of which there are too many pairs.
    """
    world = program.plan.world_size
    if world > MOST_RANKS:
        raise ExperimentError(
            f"pairs of ranks are counted for up to {MOST_RANKS} ranks, got {world:,}; "
            "prediction.at(world_size=...) has the same plan on fewer"
        )
    return _Pairing(program).pairs()


class _Pairing(Counting):
    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._tables: dict[Key, Table] = {}

    def pairs(self) -> tuple[Pairs, ...]:
        self.found()
        return tuple(
            Pairs(op, layer, phase, purpose, every, table)
            for (op, layer, phase, purpose, _, every), table in self._tables.items()
        )

    def count(self, key: Key, got: Received, calls: Counts) -> None:
        if key not in self._tables:
            self._tables[key] = np.zeros((self.world, self.world), dtype=np.int64)
        for give in got.senders:
            give(self._tables[key], calls)
