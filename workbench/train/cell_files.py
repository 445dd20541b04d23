"""Cells that a notebook lets ranks run, and what came of them: files in one folder.

    0001.cell           what to run, and on which ranks; written whole
    0001.interrupt      whoever is still at it is interrupted
    0001.rank-2.out     what rank 2 printed so far
    0001.rank-2.json    how it ended there; written whole, and last

Whoever asks writes and looks; nothing is sent through the controller, so what a cell prints may be
as long as it likes.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

MOST_SHOWN = 1 << 20  # bytes of what one rank printed: its end

State = Literal["done", "raised", "interrupted", "skipped"]


@dataclass(frozen=True)
class Cell:
    """What ranks run.

    Attributes:
        source: Python; the value of a last expression is told.
        ranks: that run it; the others do nothing.
        anew: makes world, groups and model again before: the ranks parted in the cell before.
    """

    source: str
    ranks: tuple[int, ...]
    anew: bool = False


@dataclass(frozen=True)
class Ending:
    """How a cell ended on one rank.

    Attributes:
        state: what happened.
        value: of the last expression, as text; None where there is none.
        error: "KeyError: 'x'", or "".
        traceback: from the cell on, or "".
        seconds: that it took.
    """

    state: State
    value: str | None = None
    error: str = ""
    traceback: str = ""
    seconds: float = 0.0


_CELL, _ENDING = TypeAdapter(Cell), TypeAdapter(Ending)


@dataclass(frozen=True)
class CellFiles:
    """The files of all cells of one set of ranks.

    Attributes:
        folder: of them; there while the ranks serve.
    """

    folder: Path

    def ask(self, number: int, cell: Cell) -> None:
        """Has the ranks run a cell; numbers count from 1."""
        _write(self.folder / f"{number:04d}.cell", json.dumps(asdict(cell)))

    def asked(self, number: int) -> Cell | None:
        """What to run, once it is there."""
        text = _read(self.folder / f"{number:04d}.cell")
        return None if text is None else _CELL.validate_json(text)

    def interrupt(self, number: int) -> None:
        """Says that who is interrupted now is to end this cell, and not to leave."""
        (self.folder / f"{number:04d}.interrupt").touch()

    def is_interrupted(self, number: int) -> bool:
        """Whether this cell was."""
        return (self.folder / f"{number:04d}.interrupt").exists()

    def end(self, number: int, rank: int, ending: Ending) -> None:
        """Says how a cell ended on a rank."""
        _write(self.folder / f"{number:04d}.rank-{rank}.json", json.dumps(asdict(ending)))

    def ending(self, number: int, rank: int) -> Ending | None:
        """How a cell ended on a rank, once it has."""
        text = _read(self.folder / f"{number:04d}.rank-{rank}.json")
        return None if text is None else _ENDING.validate_json(text)

    def printed_to(self, number: int, rank: int) -> Path:
        """Where a rank prints."""
        return self.folder / f"{number:04d}.rank-{rank}.out"

    def printed(self, number: int, rank: int) -> str:
        """What a rank printed so far; of very much, the end."""
        try:
            with self.printed_to(number, rank).open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - MOST_SHOWN))
                text = file.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
        return text if size <= MOST_SHOWN else f"[... {size - MOST_SHOWN:,} bytes before]\n{text}"


def _write(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.replace(path)


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
