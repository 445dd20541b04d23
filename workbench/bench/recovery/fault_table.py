"""The cells of the fault matrix: which process or place is struck, how, and at which moment."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Process = Literal[
    "engine", "server", "rendezvous", "controller", "supervisor", "notebook", "agent", "relay"
]
Place = Literal["disk", "network disk", "clock", "link", "host"]
Signal = Literal["kill", "stop", "interrupt"]
How = Literal[
    Signal,
    "out of memory",
    "full",
    "frozen",
    "unwritable",
    "damaged",
    "stalled",
    "cut",
    "forward",
    "back",
    "down for 2 s",
    "down for 60 s",
    "gone",
]
Moment = Literal[
    "start", "step", "checkpoint", "re-cut", "stop", "sweep", "attach", "calibrate", "verify"
]
OF_NOTEBOOKS: tuple[Moment, ...] = ("start", "step", "checkpoint")
OF_RUNS: tuple[Moment, ...] = ("start", "step", "checkpoint", "re-cut", "stop", "sweep")
OF_ALL: tuple[Moment, ...] = (*OF_RUNS, "calibrate", "verify")
ON_THIS_HOST: dict[tuple[Process | Place, tuple[How, ...]], tuple[Moment, ...]] = {
    **{
        (process, get_args(Signal)): get_args(Moment)
        for process in ("engine", "server", "rendezvous", "controller", "supervisor")
    },
    ("notebook", get_args(Signal)): OF_NOTEBOOKS,
    ("engine", ("out of memory",)): OF_RUNS,
    ("disk", ("full", "frozen")): OF_ALL,
    ("disk", ("unwritable",)): OF_RUNS,
    ("disk", ("damaged",)): ("step", "checkpoint"),
    ("clock", ("forward", "back")): OF_ALL,
}
ON_HOSTS: dict[tuple[Process | Place, tuple[How, ...]], tuple[Moment, ...]] = {
    ("agent", get_args(Signal)): OF_ALL,
    ("relay", get_args(Signal)): OF_ALL,
    ("link", ("down for 2 s",)): OF_ALL,
    ("link", ("down for 60 s",)): ("start", "step", "checkpoint", "re-cut"),
    ("host", ("gone",)): OF_RUNS,
}
ON_A_NETWORK_DISK: dict[tuple[Process | Place, tuple[How, ...]], tuple[Moment, ...]] = {
    ("network disk", ("stalled", "cut")): OF_ALL,
}


@dataclass(frozen=True)
class Fault:
    """One cell of the matrix.

    Attributes:
        process: the process that it hits, or what it stands on.
        how: the fault.
        moment: the moment of the cluster's work.
    """

    process: Process | Place
    how: How
    moment: Moment

    @property
    def costs_a_host(self) -> bool:
        """Whether the cluster has fewer hosts after it."""
        return self.process in ("host", "agent") or self.how == "down for 60 s"

    def __str__(self) -> str:
        return f"{self.process}, {self.how}, {self.moment}"


def every(
    table: Mapping[tuple[Process | Place, tuple[How, ...]], tuple[Moment, ...]],
) -> list[Fault]:
    """All cells of a table."""
    return [
        Fault(process, how, moment)
        for (process, hows), moments in table.items()
        for how in hows
        for moment in moments
    ]
