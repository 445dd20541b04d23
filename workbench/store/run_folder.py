"""Folders of runs: attempts, metrics, how a run ended, and which checkpoint a job goes on from.

Told without loading a tensor, also in processes that load no torch.
"""

import json
import math
import os
import re
import shutil
import stat
import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Self

from pydantic import Field, TypeAdapter, ValidationError

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.metrics import COLUMNS
from workbench.plan.io.files import replacing, text_of, toml_of, write_whole
from workbench.store.errors import ClusterError
from workbench.store.messages import TrainingOutcome
from workbench.store.record import AttemptRecord, ErrorRecord, JobState

if TYPE_CHECKING:
    import pandas

EXPERIMENT = "experiment.toml"
INITIAL = "initial.safetensors"
METRICS = "metrics.csv"
NOTES = "notes.json"
ENVIRONMENT = "environment.json"
OUTCOME = "outcome.json"
META = "checkpoint.toml"
_NAME = re.compile(r"step-(\d{6,})")
_INDEX = "index.toml"
_LENGTH_BYTES = 8
CHECKSUMS = "crc32"  # in a header: of each tensor, as `model.weights.pieces` writes it
_CHUNK_BYTES = 1 << 20
_AT_ONCE = 4  # files
_LARGEST_HEADER = 100 << 20  # as safetensors has it


def last_attempt(directory: Path) -> int:
    """Returns the number of the last attempt at a run; 0: there was none."""
    names = (path.name for path in (directory / "attempts").glob("*"))
    return max((int(name) for name in names if name.isdecimal()), default=0)


def attempts(directory: Path) -> tuple[tuple[Path, int], ...]:
    """Returns the folder of each attempt that reported rows, and its number of ranks, in order."""
    found = []
    for number in range(1, last_attempt(directory) + 1):
        folder = directory / "attempts" / str(number)
        ranks = {path.name.split(".")[0] for path in folder.glob("rank-*.rows")}
        if ranks:
            found.append((folder, 1 + max(int(name.removeprefix("rank-")) for name in ranks)))
    return tuple(found)


def new_directory(parent: Path, experiment: Experiment) -> Path:
    """Makes `<parent>/<date>-<time>-<model>`, numbered where there is one already.

    It holds `experiment.toml`, so that a run can be repeated from its folder.

    Raises:
        OSError: the folder cannot be made.
    """
    model = re.sub(r"[^\w.-]", "_", experiment.plan.graph.source.name)
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{model}"
    parent.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        directory = parent / (name if number == 1 else f"{name}-{number}")
        try:
            directory.mkdir()
        except FileExistsError:
            continue
        write_whole(directory / EXPERIMENT, experiment.to_toml())
        return directory
    raise AssertionError("unreachable")


def keep_initial(weights: Path, directory: Path) -> None:
    """Leaves a run's initial weights in its folder, which outlives the cluster's.

    They are the same file by another name where both folders are on one file system; else a copy.

    Raises:
        OSError: the folder cannot be written to, or the disk is full.
    """
    with replacing(directory / INITIAL) as part:
        try:
            os.link(weights, part)
        except OSError:
            shutil.copyfile(weights, part)


def keep(directory: Path, metrics: "pandas.DataFrame", notes: Sequence[str]) -> None:
    """Writes what somebody knows who followed a run to its end.

    Args:
        metrics: its metrics, for `metrics.csv`.
        notes: what should be known, for people, for `notes.json`, where there is something.
            Others who follow the run may know of something else: what they noted stays.

    Raises:
        OSError: the folder is gone, or the disk is full.
    """
    write_whole(directory / METRICS, metrics.to_csv(index=False))
    if known := list(dict.fromkeys([*read_notes(directory), *notes])):
        write_whole(directory / NOTES, json.dumps(known, indent=1))


def read_notes(directory: Path) -> list[str]:
    """Returns the notes that were kept; none where nobody did, or they cannot be read."""
    with suppress(OSError, ValueError):
        return [str(note) for note in json.loads((directory / NOTES).read_text("utf-8"))]
    return []


_Seconds = Annotated[float, Field(ge=0, lt=1 << 37)] | None  # a date can be made of them


@dataclass(frozen=True)
class JobTimes:
    """When what happened to a run, in seconds since the epoch; None: it has not, yet."""

    submitted: _Seconds = None
    started: _Seconds = None
    ended: _Seconds = None

    @property
    def wall_s(self) -> float:
        """The seconds from its start to its end; NaN: it had none of them, or only one."""
        if self.started is None or self.ended is None:
            return math.nan
        return self.ended - self.started


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """How a run ended: `outcome.json` in its folder.

    The job server writes it before its database says that the run has ended, so whoever learns of
    the end there finds it. It is text, not what ranks answered: reading it executes nothing.

    Attributes:
        reason: how it ended, for people.
        ranks: what each rank reported at the end of its training; () where it came to none.
        has_lost_rows: whether a rank could not write some rows of metrics.
    """

    job: int
    state: JobState
    reason: str
    step: int
    attempts: tuple[AttemptRecord, ...] = ()
    error: ErrorRecord | None = None
    ranks: tuple[TrainingOutcome, ...] = ()
    has_lost_rows: bool = False
    columns: tuple[str, ...] = COLUMNS

    def save(self, directory: Path, times: JobTimes) -> None:
        """Writes it into the run's folder, and the times into the run's environment, if there.

        Raises:
            OSError: the folder is gone, or the disk is full.
        """
        write_whole(directory / OUTCOME, json.dumps(asdict(self), indent=1))
        path = directory / ENVIRONMENT
        with suppress(FileNotFoundError, ValueError):  # it was not submitted by a notebook
            known = json.loads(path.read_text("utf-8"))
            write_whole(path, json.dumps({**known, "times": asdict(times)}, indent=1))

    @classmethod
    def load(cls, directory: Path) -> Self | None:
        """What a run's folder says; None: the run has not ended, as far as the folder knows.

        Raises:
            ClusterError: the file cannot be read.
        """
        path = directory / OUTCOME
        try:
            return TypeAdapter(cls).validate_python(json.loads(path.read_text("utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, ValidationError) as error:
            raise ClusterError(f"{path} cannot be read: {error}") from error

    @staticmethod
    def forget(directory: Path) -> None:
        """Takes it back: the run goes on."""
        (directory / OUTCOME).unlink(missing_ok=True)


def checkpoint_path(directory: Path, step: int) -> Path:
    """Returns where the checkpoint of this step is, once it is complete."""
    return directory / f"step-{step:06d}"


def complete_checkpoints(directory: Path) -> dict[int, Path]:
    """Returns complete checkpoints by step; those under way or given up have other names."""
    if not directory.is_dir():
        return {}
    named = ((_NAME.fullmatch(path.name), path) for path in sorted(directory.iterdir()))
    return {int(name[1]): path for name, path in named if name and (path / META).is_file()}


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint that is there."""

    path: Path
    step: int


Newest = tuple[FoundCheckpoint | None, list[str]]
"""The newest checkpoint that is whole, and what is wrong with newer ones."""


def newest_whole(directory: Path, *, checked: bool = True) -> Newest:
    """Returns the newest checkpoint whose files are whole, and what is wrong with newer ones.

    A checkpoint takes its name when all of it was written; a file that is too short since then,
    or whose bytes have other checksums, was damaged on its disk, or by somebody.

    Args:
        checked: whether to read the files, for their checksums; else their lengths are enough.
    """
    there = complete_checkpoints(directory)
    damaged: list[str] = []
    for step in sorted(there, reverse=True):
        bad = damaged_files(there[step], checked=checked)
        if not bad:
            return FoundCheckpoint(there[step], step), damaged
        damaged.append(f"{there[step].name} is passed over: {', '.join(bad)} damaged or cut off")
    return None, damaged


def damaged_files(folder: Path, *, checked: bool = True) -> list[str]:
    """Returns the files of a checkpoint that are not as they were written; see `newest_whole`."""
    try:
        tensors = toml_of(text_of(folder / _INDEX, ValueError), ValueError)["tensors"]
        names = sorted({piece["file"] for entry in tensors.values() for piece in entry["pieces"]})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [_INDEX]
    if any(Path(name).name != name for name in names):
        return [_INDEX]  # it names files elsewhere
    with ThreadPoolExecutor(_AT_ONCE) as threads:  # checksums take no interpreter's lock
        found = threads.map(lambda name: is_whole(folder / name, checked=checked), names)
        return [name for name, good in zip(names, found, strict=True) if not good]


def is_whole(path: Path, *, checked: bool = True) -> bool:
    """Returns whether a safetensors file has all the bytes that its header speaks of.

    Args:
        checked: whether each tensor's CRC-32, where the header tells it, is compared too.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return False  # from a pipe, nothing might ever come
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > _LARGEST_HEADER:
                return False
            header = json.loads(file.read(length))
            metadata = header.pop("__metadata__", {})
            spans = {name: entry["data_offsets"] for name, entry in header.items()}
            end = _LENGTH_BYTES + length + max((span[1] for span in spans.values()), default=0)
            if path.stat().st_size != end:
                return False
            known = json.loads(metadata.get(CHECKSUMS, "{}")) if checked else {}
            starts = {name: _LENGTH_BYTES + length + spans[name][0] for name in known}
            return all(
                _crc(file, starts[name], spans[name][1] - spans[name][0]) == known[name]
                for name in known
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return False


def _crc(file: BinaryIO, start: int, size: int) -> int:
    found = 0
    file.seek(start)
    while size and (chunk := file.read(min(size, _CHUNK_BYTES))):
        found, size = zlib.crc32(chunk, found), size - len(chunk)
    return found


# A line of JSON for each evaluation, by rank 0, before the row of its step.
# A run that goes on from a checkpoint evaluates anew: of a step, the last line counts.
EVALUATIONS = "evaluations.jsonl"
_FIGURES = TypeAdapter(dict[str, float])


def add_evaluation(directory: Path, done: int, figures: Mapping[str, float]) -> None:
    """Adds what was found after `done` steps.

    Raises:
        OSError: the disk is full, or the folder is gone.
    """
    with (directory / EVALUATIONS).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"done": done, **figures}) + "\n")


def read_evaluations(directory: Path) -> dict[int, dict[str, float]]:
    """Returns the figures by the number of steps that were done, in their order."""
    found: dict[int, dict[str, float]] = {}
    with suppress(FileNotFoundError):
        for line in (directory / EVALUATIONS).read_text("utf-8", "replace").splitlines():
            with suppress(ValueError):  # it is being written, or was cut off
                figures = _FIGURES.validate_json(line)
                found[int(figures.pop("done", 0))] = figures
    return dict(sorted(found.items()))


def last_evaluation(directory: Path) -> dict[str, float]:
    """The figures of the last one as a line about a run has them: "accuracy", "test_<other>"."""
    found = list(read_evaluations(directory).values())
    last = found[-1] if found else {}
    return {name if name == "accuracy" else f"test_{name}": last[name] for name in last}


@dataclass(frozen=True)
class Best:
    """The best evaluation so far.

    Attributes:
        done: the steps that were done before it; 0: there was none.
        value: its figure, of which a larger one is better.
    """

    done: int = 0
    value: float = -math.inf

    def then(self, done: int, figures: Mapping[str, float], by: str) -> "Best":
        """The better one of this and another; this one, where the other is no better."""
        value = worth(figures, by)
        return Best(done, value) if value > self.value else self

    @classmethod
    def of(cls, directory: Path, by: str, before: int | None = None) -> "Best":
        """The best one in a run's folder whose checkpoint is there.

        Args:
            by: what is best, as `Experiment.keep_best` has it.
            before: the number of steps after which none counts; None: all do.
        """
        best, there = cls(), complete_checkpoints(directory)
        for done, figures in read_evaluations(directory).items():
            if done in there and (before is None or done <= before):
                best = best.then(done, figures, by)
        return best


def worth(figures: Mapping[str, float], by: str) -> float:
    """The figure by which evaluations are compared; the larger one is better, NaN never is."""
    is_least = by == "loss" or by.startswith("-")
    value = figures.get(by.removeprefix("-"), math.nan)
    return -value if is_least else value


DATE_GRAIN_S = 2.0  # the coarsest dates: those of FAT


class FolderChanges:
    """Whether files have come into a folder: one look at its date costs next to nothing.

    A date is as coarse as seconds, and may be of another host's clock: a folder counts as changed
    until its date has been the same for longer than that here.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._date, self._since, self._settled = -1, 0.0, False

    def seen(self) -> bool:
        """Whether the folder is to be read, and may have changed since it was last asked.

        Raises:
            OSError: there is no such folder, or it cannot be looked at.
        """
        date, now = os.stat(self._folder).st_mtime_ns, time.monotonic()
        if date != self._date:
            self._date, self._since, self._settled = date, now, False
        was_settled = self._settled
        self._settled = now - self._since > DATE_GRAIN_S
        return not was_settled
