"""The memory that a step needs on every rank: how much, of what, for which layer, and when."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, overload

from workbench.plan.io.html import Markup, frame_html, frame_of, save
from workbench.plan.io.units import size
from workbench.plan.machine.machine import Machine
from workbench.predict.memory.kept import is_guessed
from workbench.predict.memory.step import timeline_of
from workbench.predict.memory.timeline import CATEGORIES, Category, Moment, Peak
from workbench.program.step import Program

if TYPE_CHECKING:
    import pandas

_REST = 0.01  # of a peak: how far it may be off besides


@dataclass(frozen=True)
class RankMemory:
    """The peak of one rank's tensors in a step.

    Attributes:
        rank: the rank's number in the world.
        peak_bytes: bytes of all tensors that are alive at the peak, shared memory included.
        moment: the moment of the peak: the phase of the step, and the layer at work.
        held: bytes alive at the peak, for each category and layer; they add up to `peak_bytes`.
        band: the least and the most bytes that the peak may have, where it is not known what
            kernels take beside their tensors; else both are `peak_bytes`.
    """

    rank: int
    peak_bytes: int
    moment: Moment
    held: Mapping[tuple[Category, str], int]
    band: tuple[int, int]

    @property
    def categories(self) -> dict[Category, int]:
        """Bytes of each category at the peak."""
        return {
            category: sum(size for (kind, _), size in self.held.items() if kind == category)
            for category in CATEGORIES
        }

    def of_layer(self, layer: str) -> dict[Category, int]:
        """Bytes of each category that a layer has at the peak."""
        return {kind: size for (kind, owner), size in self.held.items() if owner == layer}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "held": dict(self.held)}

    def __setstate__(self, state: dict[str, object]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class RankMemories(Sequence[RankMemory]):
    """The peaks of all ranks of a world, a few of which represent the others.

    Attributes:
        kept: the peaks of the representatives.
        column: the index in `kept` of each rank's representative [ranks]; None: `kept`
            has all ranks.
    """

    kept: tuple[RankMemory, ...]
    column: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.kept if self.column is None else self.column)

    @overload
    def __getitem__(self, index: int) -> RankMemory: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[RankMemory, ...]: ...

    def __getitem__(self, index: int | slice) -> RankMemory | tuple[RankMemory, ...]:
        ranks = range(len(self))[index]
        return self._of(ranks) if isinstance(ranks, int) else tuple(map(self._of, ranks))

    def _of(self, rank: int) -> RankMemory:
        return replace(self.kept[rank if self.column is None else self.column[rank]], rank=rank)


@dataclass(frozen=True)
class Memory:
    """The memory of all ranks.

    Attributes:
        ranks: the peak of each rank, in the order of ranks.
        guessed: the names of layers of which it is not known what they save for the backward pass,
            or take beside that, which may be more than is predicted: those that draw random
            numbers, and functions that are not torch's.
        unmeasured: the names of layers for which the machine has not measured what their kernels
            take beside their tensors; `band` says how much that may change.
    """

    ranks: "RankMemories"
    guessed: tuple[str, ...] = ()
    unmeasured: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The peak of the rank that needs most, in bytes."""
        return max(rank.peak_bytes for rank in self.ranks.kept)

    @property
    def band(self) -> tuple[int, int]:
        """The least and the most bytes of `peak_bytes`, as in `RankMemory`."""
        least, most = zip(*(rank.band for rank in self.ranks.kept), strict=True)
        return max(least), max(most)

    def __getitem__(self, rank: int) -> RankMemory:
        return self.ranks[rank]

    def to_frame(self) -> "pandas.DataFrame":
        """One line for each rank that is written for: bytes at the peak, and of each category."""
        rows = (
            {
                "rank": rank.rank,
                "peak_bytes": rank.peak_bytes,
                "least_bytes": rank.band[0],
                "most_bytes": rank.band[1],
                **rank.categories,
            }
            for rank in self.ranks.kept
        )
        return frame_of(rows, ("rank", "peak_bytes", "least_bytes", "most_bytes", *CATEGORIES))

    def save(self, path: str | Path) -> None:
        """Writes its table into a file: "x.html" or "x.csv".

        Raises:
            ValueError: the name has another ending.
        """
        save(self, path)

    def __repr__(self) -> str:
        least, most = self.band
        band = f" ({size(least)} .. {size(most)}, as kernels are)" if least < most else ""
        return f"<Memory of {len(self.ranks):,} ranks: at most {size(self.peak_bytes)}{band}>"

    def _repr_html_(self) -> Markup:
        return frame_html(f"{repr(self).strip('<>')}; in bytes", self.to_frame(), "ranks")


def memory_of(program: Program, machine: Machine | None = None) -> Memory:
    """The memory of a step in the middle of an experiment's run, or of its first ones.

    Where the first steps are unlike the others, each rank has the larger peak.

    It counts torch's allocator on CPUs, and the memory that ranks share: all ranks are taken to be
    on one host. `workbench.train.run.memory.PeakMeter` measures the same.

    Args:
        program: the program of the experiment.
        machine: the machine, for the workspace of its devices' kernels; None: it is not known.
    """
    if program.warmup:
        return _larger(_memory_of(program, machine), _memory_of(program.warm, machine))
    return _memory_of(program, machine)


def _band(peak: Peak) -> tuple[int, int]:
    """The band of a peak, a little wider than kernels make it; empty, where these are known."""
    least, most = peak.band
    if least == most:
        return peak.band
    return round(least * (1 - _REST)), round(most * (1 + _REST))


def _larger(middle: Memory, first: Memory) -> Memory:
    """For each rank the larger peak; both are written for the same ranks."""
    both = zip(middle.ranks.kept, first.ranks.kept, strict=True)
    kept = tuple(max(ranks, key=lambda one: one.peak_bytes) for ranks in both)
    return replace(middle, ranks=replace(middle.ranks, kept=kept))


def _memory_of(program: Program, machine: Machine | None) -> Memory:
    guessed = tuple(layer.name for layer in program.plan.graph.layers if is_guessed(layer))
    held: dict[int, Mapping[tuple[Category, str], int]] = {}  # equal ranks share it
    ranks, timeline = [], timeline_of(program, machine)
    for peak in timeline.peaks():
        same = held.setdefault(id(peak.held), MappingProxyType(peak.held))
        ranks.append(RankMemory(peak.rank, peak.total, peak.moment, same, _band(peak)))
    alike = timeline.alike
    column = None if alike is None else tuple(alike.column.tolist())
    return Memory(RankMemories(tuple(ranks), column), guessed, timeline.unsure)
