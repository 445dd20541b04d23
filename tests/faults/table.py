"""The cells of the fault matrix: which process or place is struck, how, and at which moment.

engine (of a rank), job server, store where    killed (SIGKILL), stopped (SIGSTOP, and SIGCONT
ranks meet, controller, supervisor,            after 3 s), interrupted (SIGINT)
notebook; of other hosts agent and relay
engine                                         out of memory
disk of runs and store                         full, frozen or unwritable for 3 s; a checkpoint
                                               damaged, and a rank killed
network disk: a file system behind SFTP        stalled for 3 s; its connection cut
clock                                          jumps by an hour, forward or back
link of a host                                 down for 2 s and for 60 s
host                                           gone, without a word
"""

from dataclasses import dataclass

SIGNALS = ("kill", "stop", "interrupt")
OF_NOTEBOOKS = ("start", "step", "checkpoint")
OF_RUNS = (*OF_NOTEBOOKS, "re-cut", "stop", "sweep")
OF_ALL = (*OF_RUNS, "calibrate", "verify")
MOMENTS = (*OF_ALL, "attach")
PROCESSES = ("engine", "server", "rendezvous", "controller", "supervisor")

TABLES = {
    "here": [
        (PROCESSES, SIGNALS, MOMENTS),
        (("notebook",), SIGNALS, OF_NOTEBOOKS),
        (("engine",), ("out of memory",), OF_RUNS),
        (("disk",), ("full", "frozen"), OF_ALL),
        (("disk",), ("unwritable",), OF_RUNS),
        (("disk",), ("damaged",), ("step", "checkpoint")),
        (("clock",), ("forward", "back"), OF_ALL),
    ],
    "hosts": [
        (("agent", "relay"), SIGNALS, OF_ALL),
        (("link",), ("down for 2 s",), OF_ALL),
        (("link",), ("down for 60 s",), (*OF_NOTEBOOKS, "re-cut")),
        (("host",), ("gone",), OF_RUNS),
    ],
    "network": [(("network disk",), ("stalled", "cut"), OF_ALL)],
}
PLACES = ("disk", "network disk", "clock", "link", "host")
FEW = (
    "engine, kill, start",
    "engine, kill, step",
    "disk, full, step",
    "clock, back, step",
    "network disk, cut, step",
)


@dataclass(frozen=True)
class Fault:
    """One cell of the matrix: what is struck, how, and when."""

    process: str
    how: str
    moment: str

    @property
    def costs_a_host(self) -> bool:
        """Whether the cluster has fewer hosts after it."""
        return self.process in ("host", "agent") or self.how == "down for 60 s"

    def __str__(self) -> str:
        return f"{self.process}, {self.how}, {self.moment}"


def cells(table: str, *, every: bool) -> list[Fault]:
    """The cells of a table, or few of them."""
    found = [
        Fault(process, how, moment)
        for processes, hows, moments in TABLES[table]
        for process in processes
        for how in hows
        for moment in moments
    ]
    return [fault for fault in found if every or str(fault) in FEW]
