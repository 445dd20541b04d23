"""A simulated run: one process writes the rows of all ranks on time, without engines.

Following it is the work of a real `Run`: reading new rows from the files of every rank. `python -m
workbench.bench.widgets.acting_run FOLDER WORLD_SIZE RATE` is that process; it runs until it is
ended.
"""

import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from workbench.client.run.job import TICK_S
from workbench.client.run.rows import Rows
from workbench.plan.experiment.metrics import COLUMNS, Row
from workbench.predict.measured import Timeline
from workbench.store import telemetry
from workbench.store.rank_files import RankFiles
from workbench.store.telemetry import AttemptReader

KEPT_STEPS = 100


class ActingRun:
    """A run with the interface of `widgets.dashboard.run.Run`, which follows files on a thread.

    Args:
        world_size: the number of ranks, each of which reports every step.
        rate: the steps per second.

    Attributes:
        thread: the thread that follows the files.
    """

    id = 1
    reason, error, cluster, engines = "", None, None, ()

    def __init__(self, world_size: int, rate: float) -> None:
        plan, optimizer = SimpleNamespace(world_size=world_size), SimpleNamespace(lr=0.1)
        self.experiment = SimpleNamespace(
            steps=10**6, plan=plan, optimizer=optimizer, trace_every=0
        )
        self.rows = Rows(most=KEPT_STEPS * world_size)
        self.notes: list[str] = []
        self.evaluation: Mapping[str, float] = {}
        self.state = "running"
        self._callbacks: list[Callable[[Any], None]] = []
        self._stopping = threading.Event()
        self._folder = TemporaryDirectory()
        command = [sys.executable, "-m", __name__, self._folder.name, str(world_size), str(rate)]
        self._ranks = subprocess.Popen(command)
        self.thread = threading.Thread(target=self._follow, name="acting run", daemon=True)
        self.thread.start()

    @property
    def is_stopping(self) -> bool:
        """Whether it was asked to stop."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Ends the run."""
        self._stopping.set()
        self.thread.join()
        self._ranks.kill()
        self._ranks.wait()
        self._folder.cleanup()
        self.state = "stopped"
        self._tell()

    def events(self, after: int = 0) -> Sequence[Any]:
        """The events of the run: none."""
        return ()

    def timeline(self, step: int | None = None) -> Timeline:
        """Refuses, since nothing is traced.

        Raises:
            ValueError: always.
        """
        raise ValueError("an acting run traces nothing")

    def subscribe(self, callback: Callable[[Any], None]) -> Callable[[], None]:
        """Calls a function with each step; returns a function that unsubscribes it."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    def _tell(self) -> None:
        for callback in list(self._callbacks):
            callback([])

    def _follow(self) -> None:
        follower = AttemptReader(Path(self._folder.name), self.experiment.plan.world_size)
        while not self._stopping.wait(TICK_S):
            if found := follower.read():
                found.sort(key=lambda row: (row["step"], row["rank"]))
                self.rows.extend(found)
                self._tell()


def act(folder: Path, world_size: int, rate: float) -> None:
    """Appends a row for each rank, so many times a second, until this process is ended."""
    files = [RankFiles(folder, rank).rows.open("ab", 0) for rank in range(world_size)]
    begun, step = time.monotonic(), 0
    while True:
        for rank, file in enumerate(files):
            file.write(telemetry.pack_row(_row(step, rank, 1 / rate)))
        step += 1
        time.sleep(max(0.0, begun + step / rate - time.monotonic()))


def _row(step: int, rank: int, period_s: float) -> Row:
    wobble = 0.1 * math.sin(1.7 * step + rank)
    row = dict.fromkeys(COLUMNS, 1e8 * (1 + wobble))
    return row | {
        "step": step,
        "rank": rank,
        "time": time.time(),
        "loss": 2.0 * math.exp(-step / 1000) + 0.1 * wobble,
        "samples_per_s": 640 * (1 + wobble),
        "compute_s": period_s * (0.7 + wobble),
        "communication_s": period_s * 0.2,
        "wait_s": period_s * (0.1 - wobble),
        "peak_bytes": 5e8 * (1 + wobble),
        "tensor_bytes": 4e8,
        "gpu_bytes": 0.0,
        "accuracy": math.nan,
    }


if __name__ == "__main__":
    act(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
