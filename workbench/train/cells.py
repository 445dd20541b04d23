"""Runs a notebook's cells on one rank, with its part of the model in reach."""

import ast
import builtins
import linecache
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from workbench.comm.world import World
from workbench.plan.experiment import Experiment
from workbench.plan.seat import Seat
from workbench.train.cell_files import Cell, CellFiles, Ending
from workbench.train.state import RankState, group_specs_of

LOOK_EVERY_S = 0.01
MOST_SHOWN = 20_000  # characters of a value, and of a traceback


def serve(seat: Seat, experiment: Experiment, *, weights: Path, folder: Path) -> None:
    """Runs one cell after another, until this rank is interrupted while none runs.

    A cell finds what the cells before it made, and
    `wb`, `comm`, `torch`, `dist`; `rank`, `world_size`, `world`, `device`;
    `group` (all ranks), `groups` (by purpose and ranks); `experiment`, `plan`;
    `model`: this rank's part;
    `state`: `state.stepper.run(step)` leaves gradients, `state.strategy.update(step)` applies them.

    Args:
        seat: where this rank sits.
        experiment: under whose plan the model is cut.
        weights: the initial weights; only slices are read.
        folder: where cells and endings are.
    """
    room = _Room(seat, experiment, weights, CellFiles(folder))
    number, cell = room.next(1)
    while True:
        with World.open(room.seat(number)) as world:
            room.enter(world)
            while True:
                room.perform(number, cell)
                number, cell = room.next(number + 1)
                if cell.anew:
                    break


class _Room:
    """What one rank has while it runs cells."""

    def __init__(self, seat: Seat, experiment: Experiment, weights: Path, files: CellFiles) -> None:
        self._seat, self._experiment, self._weights = seat, experiment, weights
        self._files = files
        self._names: dict[str, Any] = {"__name__": "__ranks__", "__builtins__": builtins}

    def seat(self, number: int) -> Seat:
        """In a world that begins with this cell."""
        return replace(self._seat, prefix=f"{self._seat.prefix}-{number}")

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
        """Waits for a cell."""
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
        rank = self._seat.rank
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
        path = self._files.printed_to(number, self._seat.rank)
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
    if len(text) <= MOST_SHOWN:
        return text
    return f"{text[:MOST_SHOWN]}\n[... {len(text) - MOST_SHOWN:,} characters more]"
