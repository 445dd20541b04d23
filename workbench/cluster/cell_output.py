"""What a cell came to on each rank, for people."""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from workbench.train.cell_files import Ending

_MARKS = {"running": "…", "done": "✓", "raised": "✗", "interrupted": "■"}


@dataclass(frozen=True)
class RankOutput:
    """What a cell came to on one rank.

    Attributes:
        rank: which.
        state: "running", "done", "raised" or "interrupted".
        printed: what it printed.
        value: of the last expression, as text; None where there is none.
        error: "KeyError: 'x'", or "".
        traceback: from the cell on, or "".
        seconds: that it took.
    """

    rank: int
    state: str
    printed: str
    value: str | None = None
    error: str = ""
    traceback: str = ""
    seconds: float = 0.0

    @classmethod
    def of(cls, rank: int, printed: str, ending: Ending | None) -> "RankOutput":
        """From what is in the rank's files."""
        if ending is None:
            return cls(rank, "running", printed)
        return cls(
            rank,
            ending.state,
            printed,
            ending.value,
            ending.error,
            ending.traceback,
            ending.seconds,
        )

    @property
    def text(self) -> str:
        """All that there is to read."""
        return "\n".join(part for part in self._parts() if part)

    def _parts(self) -> Iterator[str]:
        yield self.printed.rstrip("\n")
        yield self.value or ""
        yield self.traceback.rstrip("\n") if self.state == "raised" else ""


@dataclass(frozen=True)
class CellOutput:
    """What a cell came to.

    Ranks that say the same are shown once; the first of all is unfolded, and so is the first
    that raised, with its whole traceback.

    Attributes:
        number: of the cell.
        ranks: those that ran it.
    """

    number: int
    ranks: tuple[RankOutput, ...]

    @property
    def failed(self) -> tuple[RankOutput, ...]:
        """Ranks that raised."""
        return tuple(each for each in self.ranks if each.state == "raised")

    @property
    def is_over(self) -> bool:
        """Whether no rank is at it any more."""
        return all(each.state != "running" for each in self.ranks)

    def __getitem__(self, rank: int) -> RankOutput:
        for each in self.ranks:
            if each.rank == rank:
                return each
        raise KeyError(f"rank {rank} did not run this cell; {_named(self.ranks)} did")

    def __repr__(self) -> str:
        return "\n".join(f"[{_title(those)}]\n{those[0].text}" for those in self._alike())

    def _repr_html_(self) -> str:
        """Inline styles only: what a notebook that is not trusted keeps."""
        failed = self.failed[:1]
        blocks = []
        for index, those in enumerate(self._alike()):
            unfolded = " open" if index == 0 or (failed and failed[0] in those) else ""
            color = "" if those[0].state != "raised" else "color:#b3261e;"
            text = those[0].text or "(nothing printed)"
            blocks.append(
                f"<details{unfolded}><summary style='{color}cursor:pointer'>{escape(_title(those))}"
                f"</summary><pre style='margin:0 0 .5em 1.2em;white-space:pre-wrap'>{escape(text)}"
                "</pre></details>"
            )
        return f"<div>{''.join(blocks)}</div>"

    def _alike(self) -> list[tuple[RankOutput, ...]]:
        """Ranks that say the same, together, in the order of their first."""
        found: dict[tuple[str, str], list[RankOutput]] = {}
        for each in self.ranks:
            found.setdefault((each.state, each.text), []).append(each)
        return [tuple(those) for those in found.values()]


def _title(those: tuple[RankOutput, ...]) -> str:
    state, slowest = those[0].state, max(each.seconds for each in those)
    told = f"{_MARKS.get(state, '')} {_named(those)}"
    if state == "raised":
        return f"{told}: {those[0].error.splitlines()[0]}"
    return f"{told}: {state}" + (f", {slowest:.3g} s" if state != "running" else "")


def _named(those: tuple[RankOutput, ...]) -> str:
    numbers = ", ".join(str(each.rank) for each in those)
    return f"rank {numbers}" if len(those) == 1 else f"ranks {numbers}"
