"""Writes checkpoints beside the steps that follow.

    rank 0     step 49 | copy | step 50 | step 51 | step 52 ...        (and so every rank)
    a thread                    write my part, with checksums
    rank 0's                                  ... all parts are there: index, name, remove old ones

A step waits for the copy alone, unless the checkpoint before is not whole yet. That one's name is
given once every rank's part is there; until then, and if anything fails, older ones are kept.
Threads issue no collectives: what went wrong in one is told to all ranks when they next meet here.
"""

import shutil
import threading
import time
from pathlib import Path

from workbench.comm.groups.group import Group
from workbench.model.errors import CheckpointError
from workbench.model.pieces import index_pieces
from workbench.model.snapshot import Snapshot
from workbench.plan.experiment import Experiment
from workbench.train.checkpoint import folder
from workbench.train.checkpoint.checkpoint import latest
from workbench.train.checkpoint.parts import Part
from workbench.train.loop.agreement import on_all_ranks

LOOK_EVERY_S = 0.005


class Saver:
    """One rank's; every rank calls the same methods in the same order.

    Args:
        directory: of the run, the same folder for all ranks.
        everyone: all ranks.
        keep: complete checkpoints to keep.

    Attributes:
        newest: the last checkpoint that is known to be complete; None: there was none yet.
    """

    def __init__(self, directory: Path, everyone: Group, *, keep: int = 2) -> None:
        self._directory, self._everyone, self._keep = directory, everyone, keep
        self._snapshot = Snapshot()
        self._writing: _Writing | None = None
        self.newest: Path | None = None

    def begin(self, step: int, part: Part, files: tuple[str, ...], experiment: Experiment) -> None:
        """Copies this rank's part, which may change as soon as this returns.

        Args:
            step: optimizer updates made so far.
            part: this rank's pieces, and
            files: those of all ranks, as `parts` gives them.
            experiment: what is run.

        Raises:
            CheckpointError: a rank could not write this checkpoint or the one before, say because
                the disk is full. Raised on every rank; nothing is left of what is not complete,
                and older ones are all there.
        """
        self.finish()
        first = self._everyone.rank == 0
        try:
            begin = (lambda: folder.begin(self._directory, step)) if first else None
            on_all_ranks(self._everyone, begin)
        except CheckpointError as error:
            raise self._failed(step, error) from error
        self._snapshot.take(part)
        self._writing = _Writing(
            self._directory,
            step,
            self._snapshot,
            files,
            experiment,
            self._everyone.rank,
            self._keep,
        )

    def finish(self) -> None:
        """Returns once what was begun is complete; with nothing under way, at once.

        Raises:
            CheckpointError: as for `begin`.
        """
        writing = self._writing
        if writing is None:
            return
        first = self._everyone.rank == 0
        try:
            on_all_ranks(self._everyone, writing.wait_for_part)
            on_all_ranks(self._everyone, writing.wait if first else None)
        except CheckpointError as error:
            self.close()
            if first:
                shutil.rmtree(folder.partial(self._directory, writing.step), ignore_errors=True)
            raise self._failed(writing.step, error) from error
        self._writing, self.newest = None, folder.place(self._directory, writing.step)

    def close(self) -> None:
        """Ends without the others: what is not there of a checkpoint under way is given up."""
        if self._writing is not None:
            self._writing.give_up()
            self._writing = None

    def _failed(self, step: int, error: CheckpointError) -> CheckpointError:
        kept = latest(self._directory)
        where = f"the last checkpoint is {kept}" if kept else "there is no earlier checkpoint"
        return CheckpointError(f"no checkpoint at step {step}: {error}; {where}")


class _Writing:
    """One checkpoint on its way to the disk: a thread of one rank's."""

    def __init__(
        self,
        directory: Path,
        step: int,
        snapshot: Snapshot,
        files: tuple[str, ...],
        experiment: Experiment,
        rank: int,
        keep: int,
    ) -> None:
        self.step = step
        self._directory, self._part = directory, folder.partial(directory, step)
        self._snapshot, self._experiment, self._keep = snapshot, experiment, keep
        self._rank, self._own, self._files = rank, files[rank], [name for name in files if name]
        self._error: BaseException | None = None
        self._given_up, self._is_written = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"checkpoint {step}", daemon=True)
        self._thread.start()

    def wait_for_part(self) -> None:
        """Returns when this rank's part is written; raises why it is not."""
        self._is_written.wait()
        self._raise()

    def wait(self) -> None:
        """Returns when all is done; raises why it is not."""
        self._thread.join()
        self._raise()

    def give_up(self) -> None:
        """Ends the thread; what it needs for a complete checkpoint and is there, it takes.

        One that still waits for the disk is not waited for: whoever lost a rank is to be free at
        once. It leaves nothing, and touches nothing that comes after it.
        """
        self._given_up.set()
        if self._is_written.is_set():
            self._thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            if self._own:
                self._snapshot.write(self._part / self._own, lambda: not self._given_up.is_set())
            self._is_written.set()
            if self._rank == 0 and self._are_all_there():
                self._publish()
        except BaseException as error:  # raised where it is waited for
            self._error = error
        finally:
            self._is_written.set()

    def _are_all_there(self) -> bool:
        """Waits for the other ranks' parts: each has its name once it is whole."""
        while not all((self._part / name).exists() for name in self._files):
            if self._given_up.is_set():
                return False
            time.sleep(LOOK_EVERY_S)
        return True

    def _publish(self) -> None:
        index_pieces(self._part, self._files)
        folder.describe(self._part, self.step, self._experiment)
        folder.publish(self._directory, self.step)
        folder.prune(self._directory, self.step, self._keep)
