"""One rank of an attempt, seen from outside: by its files and its process."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from workbench.cluster.answer import Answer
from workbench.cluster.failure import End
from workbench.cluster.rank_files import RankFiles
from workbench.cluster.rows import ROW_BYTES, unpack
from workbench.plan.metrics import Row

STUCK = "did not end when it was interrupted"


@dataclass
class Rank:
    """What is known of one rank.

    What the server does to a rank, and learns of its end, it writes beside the rank's own files,
    and before it acts; so that the next server judges by the same:

        rank-0.killed    why the server ended its process; STUCK, or how the rank was lost
        rank-0.death     how its process ended

    Attributes:
        number: of the rank.
        place: its engine.
        pid: the engine's process.
        files: what it leaves.
        has_begun: whether it said so.
        with_value: whether what it returns is to be loaded. That of calls is not: its class may
            want torch, which this process does without.
        answer: how it ended by itself.
        received_bytes: of the answer.
        death: how its process ended.
        killed: why we ended its process: STUCK, or what then counts as its death.
    """

    number: int
    place: int
    pid: int
    files: RankFiles
    with_value: bool
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
    def at(cls, folder: Path, number: int, place: int, pid: int, with_value: bool) -> "Rank":
        """A rank whose files may be there already."""
        files = RankFiles(folder, number)
        rank = cls(number, place, pid, files, with_value, str(files.rows))
        rank.killed, rank.death = rank._noted("killed"), rank._noted("death")
        rank.look()
        return rank

    def look(self) -> None:
        """Reads whether it has begun and ended."""
        if not self.has_begun:
            self.has_begun = self.files.pid is not None
        if self.answer is None and (packed := self.files.answer) is not None:
            self.received_bytes = len(packed)
            try:
                self.answer = Answer.unpack(packed, with_value=self.with_value)
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
        return next(unpack(packed), None) if (packed := self.last_packed()) else None

    def last_packed(self) -> bytes:
        """The same as it is stored; nothing where there is none."""
        if (stamp := self._stamp()) != self._read:
            self._read = stamp
            self._last = (
                self._newest(stamp[1] // ROW_BYTES) or self._last
            )  # older ones were put aside just now
        return self._last

    def _stamp(self) -> tuple[int, int]:
        try:
            status = os.stat(self._rows)
        except FileNotFoundError:
            return 0, 0
        return status.st_mtime_ns, status.st_size

    def _newest(self, whole: int) -> bytes:
        if not whole:
            return b""
        try:
            descriptor = os.open(self._rows, os.O_RDONLY)
        except FileNotFoundError:
            return b""
        try:
            packed = os.pread(descriptor, ROW_BYTES, (whole - 1) * ROW_BYTES)
        finally:
            os.close(descriptor)
        return packed if len(packed) == ROW_BYTES else b""

    def note_death(self, how: str) -> None:
        """Writes down how its process ended."""
        self.death = how if self.killed in ("", STUCK) else self.killed
        self._note("death", self.death)

    def note_killed(self, why: str) -> None:
        """Writes down why we end its process; to be called before."""
        self.killed = why
        self._note("killed", why)

    def _note(self, what: str, text: str) -> None:
        part = self._path(f"{what}.part")
        part.write_text(text)
        part.replace(self._path(what))

    def _noted(self, what: str) -> str:
        try:
            return self._path(what).read_text()
        except FileNotFoundError:
            return ""

    def _path(self, what: str) -> Path:
        return self.files.folder / f"rank-{self.number}.{what}"
