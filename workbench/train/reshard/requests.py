"""What a run is wished to do while it goes on, and what became of it: files in its directory.

    wishes/0001.toml         the first wish: a plan's text, [learning_rate] or [checkpoint]
    wishes/0001.done.toml    when it was carried out, and what that took

Whoever asks for something writes a file; rank 0 looks once a step whether there is a new one, which
costs one look at the folder's date, and the ranks agree on it with the step's status. Requests are
carried out in their order, between two steps; of plans that wait, only the last.
"""

import os
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from workbench.plan.experiment import Experiment
from workbench.plan.graph import Graph
from workbench.plan.plan import Plan
from workbench.plan.text import dump

_FOLDER = "wishes"


@dataclass(frozen=True)
class LearningRate:
    """The wish for another learning rate."""

    value: float


@dataclass(frozen=True)
class SaveNow:
    """The wish for a checkpoint."""


RunRequest = Plan | LearningRate | SaveNow


@dataclass(frozen=True)
class CarriedOut:
    """What became of a wish.

    Attributes:
        step: steps made before it.
        seconds: that it took, on the slowest rank.
        received_bytes: of weights and optimizer state that a re-cut brought to each rank.
        before: the learning rate until then, of a wish for another.
    """

    step: int
    seconds: float = 0.0
    received_bytes: tuple[int, ...] = ()
    before: float | None = None


_CARRIED_OUT = TypeAdapter(CarriedOut)
_RATE = TypeAdapter(LearningRate)


class RunRequests:
    """The wishes for one run.

    Args:
        directory: of the run.
    """

    def __init__(self, directory: Path) -> None:
        self._folder = directory / _FOLDER
        self._changed_at, self._newest = -1, 0

    @property
    def changed_at(self) -> int:
        """The folder's date in nanoseconds; 0: nothing was ever wished."""
        try:
            return os.stat(self._folder).st_mtime_ns
        except FileNotFoundError:
            return 0

    def newest(self) -> int:
        """The number of the last wish; 0: there was none."""
        changed_at = self.changed_at
        if changed_at and changed_at != self._changed_at:
            self._changed_at = changed_at
            found = (path.name.split(".") for path in self._folder.glob("[0-9]*.toml"))
            self._newest = max((int(parts[0]) for parts in found if len(parts) == 2), default=0)
        return self._newest

    def last_carried_out(self) -> int:
        """The number of the last wish that was carried out; 0: none was."""
        return max(self._done(), default=0)

    def in_force(self, experiment: Experiment) -> Experiment:
        """A run's experiment under the plan that it last went on under, whoever starts it again.

        Args:
            experiment: of this run, under any of its plans. One for another number of ranks than
                that plan stays as it is.

        Raises:
            PlanError: the plan's file is damaged.
        """
        for number in sorted(self._done(), reverse=True):
            wish = self.read(number, experiment.plan.graph)
            if isinstance(wish, Plan):
                fits = wish.world_size == experiment.plan.world_size
                return experiment.replace(plan=wish) if fits else experiment
        return experiment

    def wish(self, wish: RunRequest) -> int:
        """Writes a wish down; gives its number, which no other has."""
        self._folder.mkdir(exist_ok=True)
        for number in count(self.newest() + 1):
            path = self._folder / f"{number:04d}.toml"
            if _write(path, _text(wish), is_new=True):
                return number
        raise AssertionError("unreachable")

    def read(self, number: int, graph: Graph) -> RunRequest:
        """A wish, of a run of this model.

        Raises:
            PlanError: a plan that is for another model, or no plan.
            ValueError: it says nothing that can be read.
        """
        path = self._folder / f"{number:04d}.toml"
        content = tomllib.loads(path.read_text())
        if "learning_rate" in content:
            return _RATE.validate_python(content["learning_rate"])
        return SaveNow() if "checkpoint" in content else Plan.load(path, graph)

    def carry_out(self, number: int, found: CarriedOut) -> None:
        """Notes that a wish was carried out."""
        known = {name: value for name, value in asdict(found).items() if value is not None}
        _write(self._folder / f"{number:04d}.done.toml", dump({"carried_out": known}))

    def carried_out(self, number: int) -> CarriedOut | None:
        """What became of a wish; None: it was not carried out yet, or a later plan was instead."""
        try:
            text = (self._folder / f"{number:04d}.done.toml").read_text()
            return _CARRIED_OUT.validate_python(tomllib.loads(text)["carried_out"])
        except (FileNotFoundError, KeyError, tomllib.TOMLDecodeError, ValidationError):
            return None

    def rates(self) -> Iterator[tuple[int, float, CarriedOut]]:
        """(number, learning rate, what became of it) of each that was carried out, in order."""
        yield from ((number, wish.value, done) for number, wish, done in self._small()
                    if isinstance(wish, LearningRate))  # fmt: skip

    def saved(self) -> Iterator[tuple[int, CarriedOut]]:
        """(number, what became of it) of each checkpoint that was wished for and written."""
        yield from ((n, done) for n, wish, done in self._small() if isinstance(wish, SaveNow))

    def _small(self) -> Iterator[tuple[int, LearningRate | SaveNow, CarriedOut]]:
        """Those that were carried out and are no plans."""
        for number in sorted(self._done()):
            content = tomllib.loads((self._folder / f"{number:04d}.toml").read_text())
            done = self.carried_out(number)
            if done is None:
                continue
            if "learning_rate" in content:
                yield number, _RATE.validate_python(content["learning_rate"]), done
            elif "checkpoint" in content:
                yield number, SaveNow(), done

    def _done(self) -> list[int]:
        return [int(path.name.split(".")[0]) for path in self._folder.glob("[0-9]*.done.toml")]


def _text(wish: RunRequest) -> str:
    match wish:
        case Plan():
            return wish.to_toml()
        case LearningRate():
            return dump({"learning_rate": asdict(wish)})
        case SaveNow():
            return "[checkpoint]\n"


def _write(path: Path, text: str, *, is_new: bool = False) -> bool:
    """Writes a file whole; whether it did: with `is_new`, not where there is one already."""
    part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    part.write_text(text)
    if not is_new:
        part.replace(path)
        return True
    try:
        os.link(part, path)
    except FileExistsError:
        return False
    finally:
        part.unlink()
    return True
