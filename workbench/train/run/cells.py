"""Runs a notebook's cells on one rank, with its part of the model in reach.

Cells, and what came of them, are files in one folder:

    0001.cell           what to run, and on which ranks; written whole
    0001.interrupt      whoever is still at it is interrupted
    0001.rank-2.out     what rank 2 printed so far
    0001.rank-2.json    how it ended there; written whole, and last

Whoever asks writes and looks; nothing is sent through the controller, so what a cell prints may be
as long as it likes.
"""

import ast
import builtins
import json
import linecache
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from workbench.comm.groups.world import World
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.io.files import write_whole
from workbench.plan.placement.placement import RankConfig
from workbench.train.run.rank import RankState, group_specs_of

MOST_SHOWN = 1 << 20  # bytes of what one rank printed: its end

State = Literal["done", "raised", "interrupted", "skipped"]


@dataclass(frozen=True)
class Cell:
    """What ranks run.

    Attributes:
        anew: whether world, groups and model are made again before: the ranks parted in the cell
            before.
    """

    source: str
    ranks: tuple[int, ...]
    anew: bool = False


@dataclass(frozen=True)
class Ending:
    """How a cell ended on one rank.

    Attributes:
        value: the value of the last expression, as text; None where there is none.
    """

    state: State
    value: str | None = None
    error: str = ""
    traceback: str = ""
    seconds: float = 0.0


_CELL, _ENDING = TypeAdapter(Cell), TypeAdapter(Ending)


@dataclass(frozen=True)
class CellFiles:
    folder: Path

    def ask(self, number: int, cell: Cell) -> None:
        """Has the ranks run a cell; numbers count from 1."""
        write_whole(self.folder / f"{number:04d}.cell", json.dumps(asdict(cell)), durable=False)

    def asked(self, number: int) -> Cell | None:
        text = _read(self.folder / f"{number:04d}.cell")
        return None if text is None else _CELL.validate_json(text)

    def interrupt(self, number: int) -> None:
        """Says that who is interrupted now is to end this cell, and not to leave."""
        (self.folder / f"{number:04d}.interrupt").touch()

    def is_interrupted(self, number: int) -> bool:
        return (self.folder / f"{number:04d}.interrupt").exists()

    def end(self, number: int, rank: int, ending: Ending) -> None:
        write_whole(
            self.folder / f"{number:04d}.rank-{rank}.json",
            json.dumps(asdict(ending)),
            durable=False,
        )

    def ending(self, number: int, rank: int) -> Ending | None:
        text = _read(self.folder / f"{number:04d}.rank-{rank}.json")
        return None if text is None else _ENDING.validate_json(text)

    def printed_to(self, number: int, rank: int) -> Path:
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


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None


LOOK_EVERY_S = 0.01
_MOST_CHARACTERS = 20_000  # characters of a value, and of a traceback


def serve(config: RankConfig, experiment: Experiment, *, weights: Path, folder: Path) -> None:
    """Runs one cell after another, until this rank is interrupted while none runs.

    A cell finds what the cells before it made, and
    `wb`, `comm`, `torch`, `dist`; `rank`, `world_size`, `world`, `device`;
    `group` (all ranks), `groups` (by purpose and ranks); `experiment`, `plan`;
    `model`: this rank's part;
    `state`: `state.stepper.run(step)` leaves gradients, `state.stepper.update()` applies them.
    """
    room = _Room(config, experiment, weights, CellFiles(folder))
    number, cell = room.next(1)
    while True:
        with World.open(room.config(number)) as world:
            room.enter(world)
            while True:
                room.perform(number, cell)
                number, cell = room.next(number + 1)
                if cell.anew:
                    break


class _Room:
    def __init__(
        self, config: RankConfig, experiment: Experiment, weights: Path, files: CellFiles
    ) -> None:
        self._config, self._experiment, self._weights = config, experiment, weights
        self._files = files
        self._names: dict[str, Any] = {"__name__": "__ranks__", "__builtins__": builtins}

    def config(self, number: int) -> RankConfig:
        """In a world that begins with this cell."""
        return replace(self._config, prefix=f"{self._config.prefix}-{number}")

    def enter(self, world: World) -> None:
        """Puts into reach what belongs to a world; the model keeps the values that it has."""
        held = self._names.get("model")
        groups = world.groups(group_specs_of(self._experiment.plan))
        state = RankState.start(self._experiment, world, groups, self._weights, None)
        if held is not None:
            before = held.pieces()
            with torch.no_grad():
                for name, piece in state.model.pieces().items():
                    piece.copy_(before[name])
        self._names |= {
            "wb": sys.modules["workbench"],
            "comm": sys.modules["workbench.comm"],
            "torch": torch,
            "dist": dist,
            "world": world,
            "rank": world.rank,
            "world_size": world.size,
            "device": world.device,
            "group": state.everyone,
            "groups": groups,
            "experiment": self._experiment,
            "plan": self._experiment.plan,
            "model": state.model,
            "state": state,
        }

    def next(self, number: int) -> tuple[int, Cell]:
        while (cell := self._files.asked(number)) is None:
            try:
                time.sleep(LOOK_EVERY_S)
            except KeyboardInterrupt:
                # Meant for the cell that had just ended.
                if number == 1 or not self._files.is_interrupted(number - 1):
                    raise
        return number, cell

    def perform(self, number: int, cell: Cell) -> None:
        """Runs a cell and says how it ended; raises only what is to end this rank."""
        rank = self._config.rank
        ending = Ending("skipped")
        if rank in cell.ranks:
            started = time.perf_counter()
            try:
                with self._printing(number):
                    ending = Ending("done", self._value(number, cell.source))
            except KeyboardInterrupt:
                if not self._files.is_interrupted(number):
                    raise
                ending = Ending("interrupted")
            except (Exception, SystemExit) as error:
                ending = _raised(error, _name(number))
            ending = replace(ending, seconds=time.perf_counter() - started)
        self._files.end(number, rank, ending)

    def _value(self, number: int, source: str) -> str | None:
        """Runs the source; the last expression's value as text."""
        linecache.cache[_name(number)] = (len(source), None, source.splitlines(True), _name(number))
        tree = ast.parse(source, _name(number))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, _name(number), "exec"), self._names)
        if last is None:
            return None
        assert isinstance(last, ast.Expr)
        value = eval(compile(ast.Expression(last.value), _name(number), "eval"), self._names)
        if value is None:
            return None
        self._names["_"] = value
        return _short(repr(value))

    @contextmanager
    def _printing(self, number: int) -> Iterator[None]:
        path = self._files.printed_to(number, self._config.rank)
        with path.open("w", buffering=1) as out, redirect_stdout(out), redirect_stderr(out):
            yield


def _name(number: int) -> str:
    return f"<cell {number}>"


def _raised(error: BaseException, name: str) -> Ending:
    """With the frames of the cell and of what it called, not with ours."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != name:
        frames = frames.tb_next
    lines = traceback.format_exception(type(error), error, frames)
    said = traceback.format_exception_only(type(error), error)[-1].strip()
    return Ending("raised", error=_short(said), traceback=_short("".join(lines)))


def _short(text: str) -> str:
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[:_MOST_CHARACTERS]}\n[... {len(text) - _MOST_CHARACTERS:,} characters more]"
