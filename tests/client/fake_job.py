"""A job that is played by the test."""

import threading

from tests.client.fake_session import row
from workbench.store.messages import TrainingOutcome

LONG_S = 30.0


class Job:
    """Waits until it may begin, gives two ranks' rows for one step, and waits until it may end."""

    has_lost_rows = False
    id = 7

    def __init__(self, ending: Exception | str | None = "finished", *, held: bool = False) -> None:
        self.ending = ending
        self.may_begin, self.may_end = threading.Event(), threading.Event()
        self.asked_to_stop, self.asked_to_pause = threading.Event(), threading.Event()
        self.is_watched = threading.Event()
        if not held:
            self.may_begin.set()

    def stop(self) -> None:
        self.asked_to_stop.set()
        self.ending = "stopped"
        self.may_end.set()

    def pause(self) -> None:
        self.asked_to_pause.set()
        self.listener.turn("paused", "paused")

    def resume(self) -> None:
        self.listener.turn("queued", "2 engines are needed, 1 is free")
        self.listener.take([row(1, 1), row(1, 0)])

    def watch(self, listener):
        self.listener = listener
        self.is_watched.set()
        assert self.may_begin.wait(LONG_S)
        if self.ending is None:
            return []
        listener.take([row(0, 1), row(0, 0)])
        assert self.may_end.wait(LONG_S)
        listener.take([row(1, 0), row(1, 1)])
        if isinstance(self.ending, Exception):
            raise self.ending
        outcome = TrainingOutcome(self.ending, 2, "step-2", {"accuracy": 0.75}, "why")
        return [outcome, outcome]
