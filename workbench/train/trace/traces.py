"""The steps of a run that are traced: one of many, and of those the last few are kept.

A rank writes what it saw into the run's directory, where the notebook reads it: nothing of it
goes through the control path.

Clocks of hosts differ, so that a rank knows no time but its own. It begins a step when its loop
does, and says how long before that it came out of the step before: out of the all-reduce of the
status, which ends at about the same moment on all ranks.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from workbench.plan.io.files import write_whole
from workbench.train.trace.rank_trace import RankTrace
from workbench.train.trace.tracing import Tracer

KEPT = 8
_FOLDER = "traces"
_NAME = re.compile(r"step-(\d+)\.rank-(\d+)\.json")


@dataclass(frozen=True)
class Sample:
    """One step of one rank.

    Attributes:
        step: index of the step.
        rank: the rank.
        rows: the rows of every rank of the world, in each of the step's micro-batches.
        since_s: seconds from the status all-reduce of the step before to the step's beginning; 0
            for the first step of a session.
        trace: the trace from the step's beginning to its end.
    """

    step: int
    rank: int
    rows: tuple[tuple[int, ...], ...]
    since_s: float
    trace: RankTrace


_SAMPLE = TypeAdapter(Sample)


class Traces:
    """Traces steps of one rank, and writes what they took.

    Args:
        directory: the directory of the run.
        rank: this one.
        every: steps from one that is traced to the next; 0: none is.
        tracer: what makes a tracer for a step.
    """

    def __init__(
        self, directory: Path, rank: int, every: int, tracer: Callable[[], Tracer]
    ) -> None:
        self._directory, self._rank, self._every = directory, rank, every
        self._tracer = tracer
        self._agreed_at: float | None = None
        self._rows: tuple[tuple[int, ...], ...] = ()

    def around(self, step: int) -> AbstractContextManager[object]:
        """What to run a step in; it measures only where the step is to be traced."""
        due = self._every > 0 and (step + 1) % self._every == 0
        return self._traced(step) if due else nullcontext()

    def agreed(self, rows: tuple[tuple[int, ...], ...]) -> None:
        """The status of a step has just been summed over all ranks.

        Args:
            rows: the rows of every rank, in each of the step's micro-batches.
        """
        self._agreed_at, self._rows = time.perf_counter(), rows

    def restart(self, tracer: Callable[[], Tracer]) -> None:
        """The run goes on under another plan, whose steps have nothing in common with earlier ones.

        Args:
            tracer: what makes a tracer for a step from now on.
        """
        self._tracer, self._agreed_at = tracer, None
        for step, ranks in _found(self._directory).items():
            if self._rank in ranks:
                _path(self._directory, step, self._rank).unlink(missing_ok=True)

    @contextmanager
    def _traced(self, step: int) -> Iterator[None]:
        agreed_at = self._agreed_at
        since_s = 0.0 if agreed_at is None else time.perf_counter() - agreed_at
        with self._tracer() as tracer:
            yield
        write(self._directory, Sample(step, self._rank, self._rows, since_s, tracer.trace))


def write(directory: Path, sample: Sample) -> None:
    """Puts a sample into a run's directory, whole, and removes the rank's oldest beyond KEPT.

    Nobody waits for the disk, and a full one is no reason to lose the run.
    """
    path = _path(directory, sample.step, sample.rank)
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        write_whole(path, _SAMPLE.dump_json(sample), durable=False)
        mine = [step for step, ranks in _found(directory).items() if sample.rank in ranks]
        for step in sorted(mine)[:-KEPT]:
            _path(directory, step, sample.rank).unlink(missing_ok=True)


def traced_steps(directory: Path, world_size: int) -> list[int]:
    """The steps that all ranks of a run have written, ascending."""
    every = set(range(world_size))
    return sorted(step for step, ranks in _found(directory).items() if ranks >= every)


def read(directory: Path, step: int, world_size: int) -> tuple[Sample, ...]:
    """What each rank saw of a step.

    Raises:
        ValueError: a file is missing or damaged.
    """
    found = []
    for rank in range(world_size):
        path = _path(directory, step, rank)
        try:
            found.append(_SAMPLE.validate_json(path.read_bytes()))
        except (OSError, ValidationError) as error:
            raise ValueError(f"{path} is no trace of rank {rank}: {error}") from error
    return tuple(found)


def _found(directory: Path) -> dict[int, set[int]]:
    """The ranks that have written each step."""
    found: dict[int, set[int]] = {}
    for path in (directory / _FOLDER).glob("step-*"):
        if match := _NAME.fullmatch(path.name):
            found.setdefault(int(match[1]), set()).add(int(match[2]))
    return found


def _path(directory: Path, step: int, rank: int) -> Path:
    return directory / _FOLDER / f"step-{step:08d}.rank-{rank}.json"
