"""What one rank leaves in the folder of its attempt, for the job server and for notebooks.

    rank-0.alive     its process id; written first: the rank has begun
    rank-0.rows      its metric rows so far; older ones are in rank-0.0.rows, rank-0.1.rows, ...
    rank-0.log       what it printed
    rank-0.renewed   its date says when the rank last waited for a disk, and lived
    rank-0.answer    how it ended; written whole, and last
    withdrawn        the attempt was given up: ranks that begin later do nothing
    stopping         its ranks are asked to end after their step: a signal alone may come late, to
                     the next rank of a process on another host

So a rank needs nobody who listens to it, and whoever asks later finds the same.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from workbench.plan.io.files import write_whole
from workbench.store.messages import Answer
from workbench.store.process import own_pid

WITHDRAWN, STOPPING = "withdrawn", "stopping"
LOST = "lost"  # in the file that says that an attempt is withdrawn: why it is


@dataclass(frozen=True)
class RankFiles:
    """The files of one rank."""

    folder: Path
    rank: int

    @property
    def rows(self) -> Path:
        """The newest metric rows."""
        return self._named("rows")

    def aside(self, number: int) -> Path:
        """Returns the file of older metric rows of this number, from 0 on; see `telemetry`."""
        return self._named(f"{number}.rows")

    @property
    def log(self) -> Path:
        """What the rank printed."""
        return self._named("log")

    @property
    def pid(self) -> int | None:
        """The process id of a rank that has begun; None where it has not."""
        with suppress(OSError, ValueError):  # not there, or being written
            return int(self._named("alive").read_text())
        return None

    @property
    def answer(self) -> bytes | None:
        """How the rank ended, as `Answer.unpack` takes it; None where it has not."""
        with suppress(FileNotFoundError):
            return self._named("answer").read_bytes()
        return None

    def begin(self) -> bool:
        """Says that this process is the rank; returns False where another call did before.

        A call may be delivered twice, or late: of all, the first alone begins.

        Raises:
            OSError: it could not be said; then it was not, and another call may begin.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            file = os.open(self._named("alive"), flags, 0o600)
        except FileExistsError:
            return False
        try:
            with os.fdopen(file, "w") as alive:
                alive.write(str(own_pid()))
        except OSError:
            self._named("alive").unlink()
            raise
        return True

    def renew(self) -> None:
        """Says that the rank lives, though no row comes: it waits for a disk."""
        with suppress(OSError):  # it is this disk
            self._named("renewed").touch()

    @property
    def renewed_at(self) -> float:
        """When it last said so, in seconds since the epoch; 0 where it never has."""
        with suppress(OSError):
            return self._named("renewed").stat().st_mtime
        return 0.0

    @property
    def is_withdrawn(self) -> bool:
        """Whether the attempt was given up.

        A rank looks after it has begun, and who withdraws an attempt looks for ranks that have
        begun after that: so one of them sees the other.
        """
        return (self.folder / WITHDRAWN).exists()

    @property
    def is_lost(self) -> bool:
        """Whether the attempt was given up because a rank was lost."""
        with suppress(OSError):
            return (self.folder / WITHDRAWN).read_text() == LOST
        return False

    @property
    def is_stopping(self) -> bool:
        """Whether the ranks of this attempt are asked to end after their step."""
        return (self.folder / STOPPING).exists()

    def end(self, answer: Answer, key: bytes = b"") -> None:
        """Writes the answer, to stay; `key` is the cluster's, as `Answer.pack` takes it.

        Raises:
            ControlMessageTooLarge: it takes more than 64 KiB; nothing was written.
            OSError: it could not be written.
        """
        write_whole(self._named("answer"), answer.pack(key))

    def _named(self, kind: str) -> Path:
        return self.folder / f"rank-{self.rank}.{kind}"


def withdraw(folder: Path, *, lost: bool = False) -> None:
    """Gives an attempt up: ranks that begin later answer "interrupted", and do nothing else.

    Args:
        lost: whether a rank was lost, so that the others will soon be wanted for the next attempt.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WITHDRAWN).touch()
    if lost:
        with suppress(OSError):  # a full disk: that it is there is what matters
            (folder / WITHDRAWN).write_text(LOST)


def ask_to_stop(folder: Path) -> None:
    """Asks the ranks of an attempt to end after their step, once a signal has them look."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STOPPING).touch()
