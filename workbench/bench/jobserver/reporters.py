"""The cost of a job server in its own process that follows ranks which only report.

`python -m workbench.bench.jobserver.reporters FOLDER` is that server; it calls no engine.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from workbench.plan.experiment.measured import COLUMNS
from workbench.server.attempt import attempt_folder
from workbench.server.engine_calls import Arrival, Refusal
from workbench.server.loop import Server
from workbench.store.cluster_spec import HERE, ClusterSpec, EngineDevice
from workbench.store.cluster_store import open_store
from workbench.store.process import ProcessIdentity
from workbench.store.rank_files import RankFiles
from workbench.store.record import Request
from workbench.store.telemetry import ROW_BYTES, pack_row

PERIOD_S = 0.1
WINDOWS = 3
WARM_S = 2.0


def measured(num_ranks: int, seconds: float) -> list[float]:
    """The processor time over time of a server, in each of some windows.

    Args:
        num_ranks: the number of ranks that report, 10 times a second each.
        seconds: the seconds of all windows together.

    Raises:
        RuntimeError: the job server ended by itself.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        processes = [_idle() for _ in range(num_ranks)]
        try:
            files = _running(folder, [process.pid for process in processes])
            processes.append(_python("-m", "workbench.bench.jobserver.reporters", str(folder)))
            server = psutil.Process(processes[-1].pid)
            open_files = [stack.enter_context(each.rows.open("ab", 0)) for each in files]
            while not _is_followed(folder):
                _report(open_files, WARM_S)
            shares = []
            for _ in range(WINDOWS):
                before, begun = sum(server.cpu_times()[:2]), time.perf_counter()
                _report(open_files, seconds / WINDOWS)
                used = sum(server.cpu_times()[:2]) - before
                shares.append(used / (time.perf_counter() - begun))
            if processes[-1].poll() is not None:
                raise RuntimeError("the job server ended by itself")
            return shares
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()


class Alone:
    """The engine connection of a server whose engines are all there, and are never called.

    Args:
        engines: the engines, which all arrive at once.
    """

    connection = 1  # there is one controller, from the beginning on

    def __init__(self, engines: Sequence[Arrival]) -> None:
        self._coming = list(engines)

    def arrivals(self) -> list[Arrival]:
        """All engines, the first time."""
        coming, self._coming = self._coming, []
        return coming

    def call(self, engine_id: int, function: Callable[..., Any], *arguments: Any, **_: Any) -> None:
        """Refuses any call: all ranks have begun already.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"engine {engine_id} was called")

    def assume_identity(
        self, engine_id: int, function: Callable[..., Any], *arguments: Any
    ) -> None:
        """Refuses any call, like `call`.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"engine {engine_id} was called")

    def refusals(self) -> list[Refusal]:
        """The refused calls: none."""
        return []

    def close(self) -> None:
        """Does nothing: no resource is held."""


def serve(folder: Path) -> None:
    """Serves until this process is ended."""
    store = open_store(folder)
    engines = [Arrival(each.index, each.index, each.pid or 0) for each in store.engines()]
    Server(folder, ClusterSpec.load(folder), store, Alone(engines)).run()


def _running(folder: Path, pids: list[int]) -> list[RankFiles]:
    """Makes a cluster's folder with a job that runs on all engines; the files of its ranks."""
    device = EngineDevice("cpu", "here", "cpu", (), 1, 1 << 30)
    count = len(pids)
    ClusterSpec(
        devices=(device,) * (count + 1), sites=(HERE,) * (count + 1), address="127.0.0.1"
    ).save(folder)
    store = open_store(folder, create=True)
    for index, pid in enumerate(pids):
        store.set_engine(
            index,
            state="idle",
            process=ProcessIdentity.of(pid),
            engine_id=index,
            memory_bytes=1 << 30,
        )
    directory = folder / "job"
    job = store.submit(
        Request(
            kind="train",
            name="reporters",
            task="",
            engines=count,
            directory=str(directory),
            steps=1_000_000,
        )
    )
    store.claim(
        job, 0, range(count), processes=tuple(map(ProcessIdentity.of, pids)), state="running"
    )
    store.close()
    files = [RankFiles(attempt_folder(str(directory), 1), rank) for rank in range(count)]
    for each in files:
        each.begin()
    return files


def _report(files: list[Any], seconds: float) -> None:
    """Appends one row to each file, repeatedly; steps continue from the last one."""
    start = time.perf_counter()
    empty = dict.fromkeys(COLUMNS, 0.0)
    due = start
    while due - start < seconds:
        for rank, file in enumerate(files):
            step = file.tell() // ROW_BYTES
            file.write(pack_row({**empty, "rank": rank, "step": step, "time": time.time()}))
        due += PERIOD_S
        time.sleep(max(0.0, due - time.perf_counter()))


def _is_followed(folder: Path) -> bool:
    """Whether the server has begun, and reports steps."""
    store = open_store(folder, read_only=True)
    try:
        return any(job.step > 0 for job in store.jobs())
    finally:
        store.close()


def _idle() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["sleep", "1000000"])


def _python(*arguments: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, *arguments])


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
