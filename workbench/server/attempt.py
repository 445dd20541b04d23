"""One attempt at a job: its ranks from the first call to the last answer.

A rank is seen from outside, by its files and its process.
"""

import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from workbench.plan.experiment.metrics import Row
from workbench.plan.io.files import write_whole
from workbench.server.outcome import End
from workbench.store.messages import Answer
from workbench.store.process import ProcessIdentity
from workbench.store.rank_files import WITHDRAWN, RankFiles, ask_to_stop, withdraw
from workbench.store.run_folder import FolderChanges
from workbench.store.telemetry import newest, unpack_rows

STUCK = "did not end when it was interrupted"


@dataclass
class Rank:
    """What is known of one rank.

    What the server does to a rank, and learns of its end, it writes beside the rank's own files,
    and before it acts; so that the next server judges by the same:

        rank-0.killed    why the server ended its process; STUCK, or how the rank was lost
        rank-0.death     how its process ended

    Attributes:
        has_begun: whether it said that it has begun.
        killed: why we ended its process: STUCK, or what then counts as its death.
    """

    number: int
    place: int
    process: ProcessIdentity
    files: RankFiles
    _rows: str
    has_begun: bool = False
    answer: Answer | None = None
    received_bytes: int = 0
    death: str = ""
    killed: str = ""
    _seen: tuple[int, int] = (0, 0)  # what the newest rows were at the last look
    _read: tuple[int, int] = (0, 0)  # and when one was read
    _last: bytes = b""

    @classmethod
    def at(cls, folder: Path, number: int, place: int, process: ProcessIdentity) -> "Rank":
        """A rank whose files may be there already."""
        files = RankFiles(folder, number)
        rank = cls(number, place, process, files, str(files.rows))
        rank.killed, rank.death = rank._noted("killed"), rank._noted("death")
        rank.poll()
        return rank

    @property
    def pid(self) -> int:
        """The id of the engine's process."""
        return self.process.pid

    def poll(self) -> None:
        """Reads whether it has begun and ended."""
        if not self.has_begun:
            self.has_begun = self.files.pid is not None
        if self.answer is None and (packed := self.files.answer) is not None:
            self.received_bytes = len(packed)
            try:
                self.answer = Answer.unpack(packed)
            except Exception as error:  # it has ended all the same
                self.answer = Answer.of(error)

    @property
    def began_at(self) -> float | None:
        """When it began, in seconds since the epoch; None where it has not."""
        with suppress(FileNotFoundError):
            return self._path("alive").stat().st_mtime
        return None

    @property
    def has_ended(self) -> bool:
        """Whether nothing more comes of it."""
        return self.answer is not None or bool(self.death)

    @property
    def has_failed(self) -> bool:
        """Whether it died, raised or was interrupted."""
        return self.death != "" or (self.answer is not None and self.answer.kind != "returned")

    def end(self) -> End:
        """How it ended, as `failure.first_failure` takes it."""
        death = "" if self.answer is not None else self.death
        return End(self.number, self.pid, self.answer, death, self.killed == STUCK and bool(death))

    def has_reported(self) -> bool:
        """Whether rows came since this was last asked; costs one look at a file's size."""
        before, self._seen = self._seen, self._stamp()
        return self._seen != before

    def last_row(self) -> Row | None:
        """The newest whole row; None where there is none."""
        return next(unpack_rows(packed), None) if (packed := self.last_packed()) else None

    def last_packed(self) -> bytes:
        """The same as it is stored; nothing where there is none."""
        if (stamp := self._stamp()) != self._read:
            self._read = stamp
            self._last = newest(self._rows) or self._last  # older ones were put aside just now
        return self._last

    def _stamp(self) -> tuple[int, int]:
        try:
            status = os.stat(self._rows)
        except FileNotFoundError:
            return 0, 0
        return status.st_mtime_ns, status.st_size

    def note_death(self, how: str) -> None:
        """Writes down how its process ended."""
        self.death = how if self.killed in ("", STUCK) else self.killed
        self._note("death", self.death)

    def note_killed(self, why: str) -> None:
        """Writes down why we end its process; to be called before."""
        self.killed = why
        self._note("killed", why)

    def _note(self, what: str, text: str) -> None:
        write_whole(self._path(what), text)

    def _noted(self, what: str) -> str:
        try:
            return self._path(what).read_text()
        except FileNotFoundError:
            return ""

    def _path(self, what: str) -> Path:
        return self.files.folder / f"rank-{self.number}.{what}"


# After the first failure the other ranks are interrupted. One that is then still blocked, in
# code that does not return to Python, is interrupted once more and at last killed.
INTERRUPT_AGAIN_S = 1.5
KILL_AFTER_S = 4.0
REPEAT_STOP_S = 0.5
DELIVER_AGAIN_S = 5.0
POLL_EVERY_S = 0.1


def attempt_folder(directory: str, number: int) -> Path:
    """Where the ranks of an attempt at a job leave their files."""
    return Path(directory) / "attempts" / str(number)


class Attempt:
    """Ranks on engines that are held for them; has no thread, and is asked again and again.

    It sees ranks through their files and processes alone, so that a server that comes later, with
    the job's record, sees what the first one saw.
    """

    def __init__(
        self,
        job: int,
        number: int,
        folder: Path,
        places: Sequence[int],
        processes: Sequence[ProcessIdentity],
    ) -> None:
        self.job, self.number, self.folder = job, number, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.ranks = [
            Rank.at(folder, rank, place, process)
            for rank, (place, process) in enumerate(zip(places, processes, strict=True))
        ]
        self.is_withdrawn = (folder / WITHDRAWN).exists()
        self._changes = FolderChanges(folder)
        self._polled_at, self._num_died = 0.0, -1
        self._failed_at: float | None = None
        self._was_refused = self._is_unexplained = False
        self._interrupts, self._stop_sent_at, self._sent_at = 0, -REPEAT_STOP_S, -DELIVER_AGAIN_S

    def deliver(self, call: Callable[[Rank], None], now: float) -> None:
        """Calls ranks that have not begun; again, if they do not begin for long.

        A rank begins at the first call that reaches it and refuses all others, so that no call
        is one too many.
        """
        if self.is_withdrawn or self.has_begun or now - self._sent_at < DELIVER_AGAIN_S:
            return
        self._sent_at = now
        for rank in self.ranks:
            if not rank.has_begun and not rank.has_ended:
                call(rank)

    def deliver_soon(self) -> None:
        """Calls ranks again when `deliver` is next asked to."""
        self._sent_at = -DELIVER_AGAIN_S

    def poll(
        self,
        now: float,
        died: Collection[ProcessIdentity],
        how: Callable[[ProcessIdentity], str | None],
    ) -> bool:
        """Sees what has become of the ranks; it is asked very often.

        Args:
            how: says in words how a process ended; None: that will be known in a moment.

        Returns:
            Whether there may be news.
        """
        if self._failed_at is None and len(died) == self._num_died and not self._was_refused:
            if now - self._polled_at < POLL_EVERY_S:
                return False
            self._polled_at = now
            return self._read()
        self._num_died = len(died)
        gone = [rank for rank in self.ranks if not rank.has_ended and rank.process in died]
        if gone or now - self._polled_at >= POLL_EVERY_S:
            self._polled_at = now
            self._read(again=bool(gone))
        for rank in gone:
            if not rank.has_ended and (words := how(rank.process)) is not None:
                rank.note_death(words)
        self._is_unexplained = any(not rank.has_ended for rank in gone)
        if gone and self._failed_at is None and any(not rank.answer for rank in gone):
            self._failed_at = now
        return True

    def steer(self, now: float, *, stop: bool, abort: bool) -> None:
        """Has ranks end that should: after a failure, or as is requested.

        Args:
            stop: whether they are to stop after their current step.
            abort: whether they are to be interrupted.
        """
        if self.has_failed or abort:
            if self._failed_at is None:
                self._failed_at = now
            self._withdraw(lost=not abort)
            since = now - self._failed_at
            if self._interrupts < 1 or (self._interrupts < 2 and since > INTERRUPT_AGAIN_S):
                self._interrupts += 1
                self._signal(signal.SIGINT)
            if since > KILL_AFTER_S:
                for rank in self._working():
                    self.kill(rank, STUCK)
        elif stop and now - self._stop_sent_at > REPEAT_STOP_S:
            # Again and again: a rank that had not begun yet would not have heard it.
            self._stop_sent_at = now
            ask_to_stop(self.folder)
            self._signal(signal.SIGUSR1)

    def refuse(self, rank: int, error: Exception) -> None:
        """A rank could not be called, or could not answer."""
        if self.ranks[rank].answer is None:
            self.ranks[rank].answer = Answer.of(error)
            self._was_refused = True

    def kill(self, rank: Rank, why: str) -> None:
        """Ends a rank's process."""
        if not rank.killed:
            rank.note_killed(why)
            rank.process.send(signal.SIGKILL)

    @property
    def began_at(self) -> float:
        """When its first rank began, in seconds since the epoch; now, where none has."""
        times = [began for rank in self.ranks if (began := rank.began_at) is not None]
        return min(times, default=time.time())

    @property
    def has_begun(self) -> bool:
        """Whether all ranks have."""
        return all(rank.has_begun for rank in self.ranks)

    def none_has_begun(self) -> bool:
        """Whether no rank has, looking now: people hear of a rank's steps as soon as we may."""
        self._read(again=True)
        return not any(rank.has_begun for rank in self.ranks)

    @property
    def has_failed(self) -> bool:
        """Whether a rank has, so that the others cannot go on."""
        return self._failed_at is not None or any(rank.has_failed for rank in self.ranks)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more comes of any rank, and of those that died it is known how."""
        return not self._is_unexplained and all(
            rank.has_ended or (self.is_withdrawn and not rank.has_begun) for rank in self.ranks
        )

    def ends(self) -> list[End]:
        """How each rank ended; of those that never began, nothing is said."""
        return [rank.end() for rank in self.ranks]

    def _read(self, *, again: bool = False) -> bool:
        """Reads the folder if it has changed."""
        if not (self._changes.seen() or again):
            return False
        for rank in self.ranks:
            if not rank.has_ended:
                rank.poll()
        return True

    def _withdraw(self, *, lost: bool) -> None:
        if not self.is_withdrawn:
            withdraw(self.folder, lost=lost)
            self.is_withdrawn = True
            self._read(again=True)  # after it: whoever is not there now will not come

    def _working(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.has_begun and not rank.has_ended]

    def _signal(self, number: signal.Signals) -> None:
        for rank in self._working():
            rank.process.send(number)
