"""Ranks that run a notebook's cells, with their parts of a model in reach, and what came of it."""

import shutil
import signal
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from torch import nn

from workbench.client.engines import Engines
from workbench.client.leases import Lease, lent
from workbench.client.run.job import Job
from workbench.client.run.submitting import module_values
from workbench.plan.experiment.experiment import SGD, Experiment, Synthetic
from workbench.plan.io.html import Markup, element, folded, frame_of, save
from workbench.plan.plans.plan import Plan
from workbench.store.errors import ClusterError, ControlMessageTooLarge
from workbench.train.run.cells import Cell, CellFiles, Ending

if TYPE_CHECKING:
    import pandas

_MARKS = {"running": "…", "done": "✓", "raised": "✗", "interrupted": "■"}


@dataclass(frozen=True)
class RankOutput:
    """What a cell came to on one rank.

    Attributes:
        state: "running", "done", "raised" or "interrupted".
        value: the last expression's value, as text; None where there is none.
        error: "KeyError: 'x'", or "".
        traceback: the traceback from the cell on, or "".
        seconds: seconds that it took.
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
        ranks: the ranks that ran it, with their output.
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

    def to_frame(self) -> "pandas.DataFrame":
        """One line for each rank: its state, seconds, what it printed, gave and raised."""
        columns = ("rank", "state", "seconds", "printed", "value", "error")
        return frame_of(map(asdict, self.ranks), columns)

    def save(self, path: str | Path) -> None:
        """Writes its table into a file: "x.html" or "x.csv".

        Raises:
            ValueError: the name has another ending.
        """
        save(self, path)

    def __repr__(self) -> str:
        return "\n".join(f"[{_title(those)}]\n{those[0].text}" for those in self._alike())

    def _repr_html_(self) -> Markup:
        """Inline styles only: what a notebook that is not trusted keeps."""
        failed = self.failed[:1]
        blocks = []
        for index, those in enumerate(self._alike()):
            is_open = index == 0 or bool(failed and failed[0] in those)
            color = "" if those[0].state != "raised" else "color:#b3261e;"
            title = element("summary", _title(those), style=f"{color}cursor:pointer")
            style = "margin:0 0 .5em 1.2em;white-space:pre-wrap"
            text = element("pre", those[0].text or "(nothing printed)", style=style)
            blocks.append(folded(title, text, is_open=is_open))
        return element("div", *blocks)

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


LARGEST_CELL_BYTES = 64 << 10
LOOK_EVERY_S = 0.03
SHOW_EVERY_S = 0.25
# After one rank has failed, the others probably wait for it, and would until their timeout.
OTHERS_WITHIN_S = 2.0
OBEYED_WITHIN_S = 10.0

Progress = Callable[[CellOutput], None]


class Ranks(AbstractContextManager["Ranks"]):
    """Engines that hold a plan's model and wait for cells; made by `cluster.ranks(plan)`.

    Args:
        experiment: the experiment under whose plan the model is cut.
        lease: the engine of each rank.
        files: the files in which cells are written.
        job: the job on the engines that serves cells.
        kept: what is given back in the end.

    Attributes:
        experiment: the experiment under whose plan the model is cut.
        last: what the last cell came to; None before the first.
    """

    def __init__(
        self,
        experiment: Experiment,
        lease: Lease,
        files: CellFiles,
        job: Job,
        kept: ExitStack,
    ) -> None:
        self.experiment = experiment
        self.last: CellOutput | None = None
        self._lease, self._files = lease, files
        self._number, self._parted = 0, False
        self._service = _Service(job)
        self._end = weakref.finalize(self, _leave, self._service, kept)

    @property
    def is_open(self) -> bool:
        """Whether cells can be run."""
        return self._end.alive and not self._service.is_over

    def __len__(self) -> int:
        return len(self._lease.places)

    def __repr__(self) -> str:
        name = self.experiment.plan.graph.source.name
        standing = f"{self._number} cells run" if self.is_open else "closed"
        return f"<Ranks: {len(self)} with {name}: {standing}>"

    def run(
        self, source: str, ranks: Iterable[int] | None = None, progress: Progress | None = None
    ) -> CellOutput:
        """Runs a cell on all ranks or some, and waits for them.

        An interrupt interrupts it there. If a rank raises and others are still at it two seconds
        later, they are interrupted, too: they would wait for it. After a cell in which the ranks
        parted, `world`, the groups and `model` (with the same values) are made anew.

        Args:
            source: Python.
            ranks: the ranks that run it; the others do nothing. None: all.
            progress: a function that is shown what there is so far, some times a second.

        Returns:
            What each rank printed, gave and raised.

        Raises:
            ValueError: some ranks are not here, or none was named.
            ControlMessageTooLarge: the source takes more than 64 KiB.
            RunError: an engine died meanwhile.
            ClusterError: this was closed, or a rank did not let itself be interrupted.
        """
        chosen = self._chosen(ranks)
        if len(source.encode()) > LARGEST_CELL_BYTES:
            raise ControlMessageTooLarge(
                f"a cell of {len(source.encode()):,} bytes: at most {LARGEST_CELL_BYTES:,}. Let "
                "the ranks import a module, or read a file"
            )
        self._require()
        self._number += 1
        self._files.ask(self._number, Cell(source, chosen, anew=self._parted))
        try:
            self._await(chosen, progress)
        except KeyboardInterrupt:
            self._interrupt(chosen)
        self.last = self._output(chosen)
        self._parted = len({(each.state, each.error) for each in self.last.ranks}) > 1
        return self.last

    def close(self) -> None:
        """Gives the engines back; may be called again."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _chosen(self, ranks: Iterable[int] | None) -> tuple[int, ...]:
        here = range(len(self))
        chosen = tuple(here) if ranks is None else tuple(sorted(set(ranks)))
        if not chosen or not set(chosen) <= set(here):
            raise ValueError(f"ranks are some of 0..{len(self) - 1}, got {list(chosen)}")
        return chosen

    def _require(self) -> None:
        """Raises unless the ranks serve."""
        self._service.ask()
        if not self._end.alive:
            raise ClusterError("these ranks were closed; cluster.ranks(plan) opens others")

    def _await(self, chosen: tuple[int, ...], progress: Progress | None) -> None:
        """Waits until the cell has ended on all ranks.

        Raises:
            RunError: an engine died.
            KeyboardInterrupt: it was interrupted.
        """
        failed_at = shown_at = None
        while waiting := self._waiting():
            self._service.ask()
            now = time.monotonic()
            if failed_at is None and self._has_failed():
                failed_at = now
            if failed_at is not None and now - failed_at > OTHERS_WITHIN_S:
                self._interrupt(waiting)
                return
            if progress is not None and (shown_at is None or now - shown_at > SHOW_EVERY_S):
                progress(self._output(chosen))
                shown_at = now
            time.sleep(LOOK_EVERY_S)

    def _waiting(self) -> tuple[int, ...]:
        """Ranks that have not ended the cell."""
        number = self._number
        return tuple(r for r in range(len(self)) if self._files.ending(number, r) is None)

    def _has_failed(self) -> bool:
        found = (self._files.ending(self._number, rank) for rank in range(len(self)))
        return any(ending is not None and ending.state == "raised" for ending in found)

    def _interrupt(self, ranks: Sequence[int]) -> None:
        self._files.interrupt(self._number)
        for rank in ranks:
            if self._files.ending(self._number, rank) is None:
                self._lease.link.process_of(self._lease.places[rank]).send(signal.SIGINT)
        deadline = time.monotonic() + OBEYED_WITHIN_S
        while waiting := self._waiting():
            self._service.ask()
            if time.monotonic() > deadline:
                self.close()
                raise ClusterError(
                    f"ranks {list(waiting)} did not end the cell within {OBEYED_WITHIN_S:g} s of "
                    "being interrupted; all ranks were closed: cluster.ranks(plan) opens others"
                )
            time.sleep(LOOK_EVERY_S)

    def _output(self, chosen: tuple[int, ...]) -> CellOutput:
        ranks = []
        for rank in chosen:
            ending = self._files.ending(self._number, rank)
            printed = self._files.printed(self._number, rank)
            ranks.append(RankOutput.of(rank, printed, ending))
        return CellOutput(self._number, tuple(ranks))


def open_ranks(
    engines: Engines, plan: Plan | Experiment, module: nn.Module | None = None, seed: int = 0
) -> Ranks:
    """Has engines cut a model and wait for cells.

    Args:
        plan: the plan under which the model is cut, or a whole experiment.
        module: a module with other values than the one that was traced; see `Cluster.train`.
        seed: the seed of weights and data, with a plan.

    Raises:
        TypeError: `plan` is neither a plan nor an experiment.
        ClusterError: the plan needs more engines than are here, or free.
        ModelError: `module` is needed and missing, or is another model than was traced.
    """
    experiment = plan if isinstance(plan, Experiment) else _trial(plan, seed)
    with ExitStack() as kept:
        lease = kept.enter_context(lent(engines, experiment.plan, "a notebook's cells"))
        weights = module_values(experiment, module, engines.folder)
        folder = engines.folder / "cells" / uuid.uuid4().hex
        folder.mkdir(parents=True)
        kept.callback(shutil.rmtree, folder, ignore_errors=True)
        shared = {"weights": weights, "folder": folder}
        job = lease.start("cells", experiment, shared)
        return Ranks(experiment, lease, CellFiles(folder), job, kept.pop_all())


def _trial(plan: Plan, seed: int) -> Experiment:
    """What cells find where a plan alone is given: four rows for each rank, of random data.

    Raises:
        TypeError: it is no plan.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"ranks are opened with a Plan or an Experiment, got {type(plan).__name__}")
    size = 4 * plan.world_size
    classes = max(2, plan.graph.num_classes)
    return Experiment(
        plan=plan,
        data=Synthetic(samples=64 * size, classes=classes),
        batch_size=size,
        optimizer=SGD(lr=0.01, momentum=0.9),
        steps=1,
        seed=seed,
    )


class _Service:
    """The job on the engines, watched."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._error: BaseException | None = None
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._over.is_set()

    def ask(self) -> None:
        """Raises why it has ended, if it has."""
        if self._over.is_set():
            raise self._error or ClusterError(
                "the ranks have ended; cluster.ranks(plan) opens others"
            )

    def end(self) -> None:
        """Interrupts the ranks and waits until their engines are free."""
        if not self._over.is_set():
            self._job.abort()
            self._over.wait(OBEYED_WITHIN_S)

    def _watch(self) -> None:
        try:
            self._job.watch()
        except KeyboardInterrupt:
            pass  # as asked
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()


def _leave(service: _Service, kept: ExitStack) -> None:
    try:
        service.end()
    finally:
        kept.close()
