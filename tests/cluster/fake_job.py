"""A job that is played by the test."""

import threading

from tests.cluster.fake_session import row
from workbench.train.control import Outcome

LONG_S = 30.0


class Job:
    """Gives two ranks' rows for one step, and then waits until it may end."""

    has_lost_rows = False

    def __init__(self, ending: Exception | str = "finished") -> None:
        self.ending = ending
        self.may_end, self.asked_to_stop = threading.Event(), threading.Event()

    def stop(self) -> None:
        self.asked_to_stop.set()
        self.ending = "stopped"
        self.may_end.set()

    def watch(self, on_rows):
        on_rows([row(0, 1), row(0, 0)])
        assert self.may_end.wait(LONG_S)
        on_rows([row(1, 0), row(1, 1)])
        if isinstance(self.ending, Exception):
            raise self.ending
        outcome = Outcome(self.ending, 2, "step-2", {"accuracy": 0.75}, "why")
        return [outcome, outcome]
