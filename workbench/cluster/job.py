"""One function on several engines at once, watched until every rank has answered or died."""

import math
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.cluster.answer import Answer
from workbench.cluster.attended import Receiver, answered, perform
from workbench.cluster.engines import Engines
from workbench.cluster.errors import ClusterError
from workbench.cluster.failure import End, first_failure
from workbench.plan.metrics import Row

TICK_S = 0.05
# After the first failure the other ranks are interrupted. One that is then still blocked, in
# code that does not return to Python, is interrupted once more and at last killed.
INTERRUPT_AGAIN_S = 3.0
KILL_AFTER_S = 8.0
REPEAT_STOP_S = 0.5
OUTPUT_WITHIN_S = 2.0


@dataclass
class _Rank:
    """What is known of one rank."""

    number: int
    engine: int
    pid: int
    call: Any  # ipyparallel's AsyncResult
    receiver: Receiver
    answer: Answer | None = None
    left: Sequence[Any] = (0, b"")  # rows that came with the answer: the first one's number, all
    death: str = ""  # how its process ended

    @property
    def has_ended(self) -> bool:
        return self.answer is not None or bool(self.death)


class Job:
    """Calls `task(experiment, **keywords)` on engines, one rank on each.

    Args:
        engines: where to.
        places: the engine of each rank.
        task: "module:function".
        experiment: packed by `message.pack`.
        keywords: further arguments of each rank.
        streams: whether the function takes `control` and `emit` (see `engine.perform`).

    Raises:
        ControlMessageTooLarge: the experiment takes more than 64 KiB; nothing was started.
    """

    def __init__(
        self,
        engines: Engines,
        places: Sequence[int],
        task: str,
        experiment: bytes,
        keywords: Sequence[Mapping[str, Any]],
        *,
        streams: bool = False,
    ) -> None:
        self._engines = engines
        self._stop, self._abort = threading.Event(), threading.Event()
        self._killed: list[int] = []  # ranks that we had to end
        self._ranks = []
        for number, (place, own) in enumerate(zip(places, keywords, strict=True)):
            receiver = Receiver(engines.received.add)
            call = engines.call(place, perform, task, experiment, dict(own), streams)
            self._ranks.append(_Rank(number, place, engines[place].pid, call, receiver))

    def stop(self) -> None:
        """Asks every rank to end after its current step."""
        self._stop.set()

    def abort(self) -> None:
        """Interrupts every rank."""
        self._abort.set()

    @property
    def has_lost_rows(self) -> bool:
        """Whether metric rows are missing between others; it has never been seen."""
        return any(rank.receiver.has_gap for rank in self._ranks)

    def watch(self, on_rows: Callable[[list[Row]], None] = lambda rows: None) -> list[Any]:
        """Returns when all ranks have.

        Args:
            on_rows: takes new metric rows, in each rank's order, on this thread.

        Returns:
            What each rank returned.

        Raises:
            EngineDied: a process ended.
            RankError: a rank raised; the first one that did is told, others are counted.
            KeyboardInterrupt: `abort` was called.
            ClusterError: the controller died.
        """
        failed_at, stop_sent_at = math.inf, -math.inf
        interrupts = 0
        while waiting := [rank for rank in self._ranks if not rank.has_ended]:
            time.sleep(TICK_S)
            self._deliver(on_rows)
            for rank in waiting:
                self._look(rank)
            now = time.monotonic()
            if self._has_failed or self._abort.is_set():
                failed_at = min(failed_at, now)
                if interrupts < 1 or (interrupts < 2 and now - failed_at > INTERRUPT_AGAIN_S):
                    interrupts += 1
                    self._signal(signal.SIGINT)
                if now - failed_at > KILL_AFTER_S:
                    self._kill()
            elif self._stop.is_set() and now - stop_sent_at > REPEAT_STOP_S:
                # Again and again: a rank that had not begun yet would not have heard it.
                stop_sent_at = now
                self._signal(signal.SIGUSR1)
            if not self._engines.is_controlled:
                raise ClusterError(
                    "the controller died, and no answer can arrive any more; cluster.restart()"
                )
        self._finish(on_rows)
        self._raise_failure()
        return [rank.answer.value for rank in self._ranks if rank.answer]

    def _look(self, rank: _Rank) -> None:
        death = self._engines.death(rank.engine)  # first: an answer may precede the end
        if rank.call.ready():
            try:
                packed = rank.call.get()
                self._engines.received.add(len(packed))
                rank.answer, *rank.left = answered(packed)
            except Exception as error:  # not of the task, but of what carries it
                rank.answer = Answer.of(error)
        elif death:
            rank.death = death

    @property
    def _has_failed(self) -> bool:
        return any(
            rank.death or (rank.answer and rank.answer.kind != "returned") for rank in self._ranks
        )

    def _signal(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            if not rank.has_ended:
                self._engines.signal(rank.engine, number)

    def _kill(self) -> None:
        for rank in self._ranks:
            if not rank.has_ended and rank.number not in self._killed:
                self._killed.append(rank.number)
                self._engines.signal(rank.engine, signal.SIGKILL)

    def _deliver(self, on_rows: Callable[[list[Row]], None]) -> None:
        rows = [row for rank in self._ranks for row in rank.receiver.take(rank.call["data"])]
        if rows:
            on_rows(rows)

    def _finish(self, on_rows: Callable[[list[Row]], None]) -> None:
        """Takes the rows that came after, or with, the answers."""
        for rank in self._ranks:
            if rank.answer:
                rank.call.wait_for_output(OUTPUT_WITHIN_S)
        self._deliver(on_rows)
        rows = []
        for rank in self._ranks:
            if rank.answer:
                rows += rank.receiver.finish(*rank.left)
        if rows:
            on_rows(rows)

    def _raise_failure(self) -> None:
        if self._abort.is_set():
            raise KeyboardInterrupt
        ends = [
            End(rank.number, rank.pid, rank.answer, rank.death, rank.number in self._killed)
            for rank in self._ranks
        ]
        if failure := first_failure(ends):
            raise failure
