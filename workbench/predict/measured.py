"""A measured step, in the same spans as a predicted one."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.plan.experiment.metrics import Span
from workbench.plan.io.html import Markup, element, save
from workbench.predict.drawing import picture, save_trace, spans_frame
from workbench.predict.time.simulation import PARTS

if TYPE_CHECKING:
    import pandas

_MOST_RANKS = 8


@dataclass(frozen=True)
class Timeline:
    """One measured step, on all ranks.

    Its origin is the beginning of the rank that began first. Since clocks of ranks may differ, they
    are aligned at the end of the last step's status all-reduce, to within the time between the
    first and the last rank to leave it.

    Attributes:
        step: the index of the step.
        of_rank: the spans of each rank, in the order in which they begin [ranks].
        lasted: seconds of each rank's step, from its own beginning to its own end [ranks].
    """

    step: int
    of_rank: tuple[tuple[Span, ...], ...]
    lasted: tuple[float, ...]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.of_rank)

    @property
    def seconds(self) -> float:
        """Seconds of the step on the rank that took longest."""
        return max(self.lasted)

    def spans(self, rank: int) -> tuple[Span, ...]:
        """The spans of one rank, in the order in which they begin.

        Raises:
            IndexError: the world has no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise IndexError(f"no rank {rank}: there are 0 to {self.world_size - 1}")
        return self.of_rank[rank]

    def breakdown(self, rank: int) -> dict[str, float]:
        """Seconds of one rank's step for each of `schedule.PARTS`; they add up to it.

        "step" is what belongs to none of the others.
        """
        found = dict.fromkeys(PARTS, 0.0)
        for span in self.spans(rank):
            if span.lane == "compute":
                found["communication" if span.what == "collective" else span.what] += span.seconds
        found["step"] += self.lasted[rank] - sum(found.values())
        return found

    def save_trace(self, path: str | Path) -> None:
        """Writes the step for Perfetto (ui.perfetto.dev) or chrome://tracing."""
        save_trace((span for own in self.of_rank for span in own), path)

    def to_frame(self) -> "pandas.DataFrame":
        """One line for each span: rank, lane, what, label, start_s, seconds, op, phase, bytes."""
        return spans_frame(span for own in self.of_rank for span in own)

    def svg(self) -> str:
        """Two lanes for each of the first ranks, as a picture; a document of its own."""
        rows: Mapping[str, tuple[Span, ...]] = {
            f"rank {rank:,}": self.spans(rank) for rank in range(self.world_size)[:_MOST_RANKS]
        }
        return picture(rows, self._caption)

    def save(self, path: str | Path) -> None:
        """Writes it into a file: "x.svg" is the picture, "x.html" a page, "x.csv" the spans.

        Raises:
            ValueError: the name has another ending.
        """
        save(self, path, self.svg)

    @property
    def _caption(self) -> str:
        return f"Step {self.step} as measured: {self.seconds * 1e3:,.4g} ms"

    def __repr__(self) -> str:
        count = sum(map(len, self.of_rank))
        return (
            f"<Timeline of step {self.step}: {self.seconds * 1e3:,.4g} ms on "
            f"{self.world_size} ranks, {count:,} spans>"
        )

    def _repr_html_(self) -> Markup:
        return element("div", element("p", self._caption), self.svg())
