"""Ranks that only report: rows of a run as real ranks write them, without engines.

A process of its own, which loads no torch, is one of

    python -m workbench.bench.reporters serve FOLDER             a job server that calls no engine
    python -m workbench.bench.reporters follow FOLDER            a notebook that holds all rows
    python -m workbench.bench.reporters act FOLDER RANKS RATE    ranks that write rows on time

each until it is ended.
"""

import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from workbench.client.run.rows import Rows
from workbench.plan.experiment.metrics import COLUMNS, Row
from workbench.plan.io.files import write_whole
from workbench.server.attempt import attempt_folder
from workbench.server.engine_calls import Arrival, Refusal
from workbench.server.loop import Server
from workbench.store.cluster_spec import HERE, ClusterSpec, EngineDevice
from workbench.store.cluster_store import open_store
from workbench.store.messages import Assignment
from workbench.store.process import ProcessIdentity
from workbench.store.rank_files import RankFiles
from workbench.store.record import Request
from workbench.store.telemetry import ROW_BYTES, ROWS_AT_ONCE, AttemptReader, pack_row

PERIOD_S = 0.1
STEPS_AT_ONCE, BATCHES = 60, 600  # an hour's
ARRIVED = "arrived"  # a notebook's file, with the number of rows that have come
WINDOWS = 3
WARM_S = 2.0


def core_shares(num_ranks: int, seconds: float) -> list[float]:
    """The processor time over time of a server, in each of some windows.

    Each rank reports ten times a second, for so many seconds in all windows together.
    """
    with _reporting(num_ranks) as (_, files, server):
        shares = []
        for _ in range(WINDOWS):
            before, begun = sum(server.cpu_times()[:2]), time.perf_counter()
            _report(files, seconds / WINDOWS)
            used = sum(server.cpu_times()[:2]) - before
            shares.append(used / (time.perf_counter() - begun))
        return shares


def hour(num_ranks: int, batches: int = BATCHES) -> Iterator[tuple[float, int, int]]:
    """Rows of an hour in about a minute: ten a second of each rank, six seconds' at a time.

    Yields:
        Ten times: the minutes, the job server's resident bytes, and a notebook's that has read all.
    """
    with _reporting(num_ranks) as (folder, files, server), _python("follow", folder) as notebook:
        try:
            kernel = psutil.Process(notebook.pid)
            for batch in range(1, batches + 1):
                _write(files, STEPS_AT_ONCE)
                time.sleep(PERIOD_S)
                if batch % (batches // 10) == 0:
                    _await(folder, notebook, len(files) * files[0].tell() // ROW_BYTES)
                    minutes = batch * STEPS_AT_ONCE * PERIOD_S / 60
                    yield minutes, server.memory_info().rss, kernel.memory_info().rss
        finally:
            notebook.kill()


@contextmanager
def acting(world_size: int, rate: float) -> Iterator[Path]:
    """A folder in which a process writes a row of each rank, so many times a second."""
    with TemporaryDirectory() as folder:
        ranks = _python("act", Path(folder), str(world_size), str(rate))
        try:
            yield Path(folder)
        finally:
            ranks.kill()
            ranks.wait()


@contextmanager
def _reporting(num_ranks: int) -> Iterator[tuple[Path, list[FileIO], psutil.Process]]:
    """The folder of a cluster, its ranks' files of rows, and the server that follows them."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        processes = [subprocess.Popen(["sleep", "1000000"]) for _ in range(num_ranks)]
        try:
            files = _running(folder, [process.pid for process in processes])
            processes.append(_python("serve", folder))
            server = psutil.Process(processes[-1].pid)
            open_files = [stack.enter_context(each.rows.open("ab", 0)) for each in files]
            while not _is_followed(folder):
                _report(open_files, WARM_S)
            yield folder, open_files, server
            if processes[-1].poll() is not None:
                raise RuntimeError("the job server ended by itself")
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()


class _NoEngines:
    """The engine connection of a server whose engines all arrive at once, and are never called."""

    connection = 1  # there is one controller, from the beginning on

    def __init__(self, engines: Sequence[Arrival]) -> None:
        self._coming = list(engines)

    def arrivals(self) -> list[Arrival]:
        coming, self._coming = self._coming, []
        return coming

    def call(self, engine_id: int, given: Assignment, *, job: int, tag: object) -> None:
        raise RuntimeError(f"engine {engine_id} was called")

    def refusals(self) -> list[Refusal]:
        return []

    def close(self) -> None:
        pass


def serve(folder: Path) -> None:
    """Serves until this process is ended."""
    store = open_store(folder)
    engines = [Arrival(each.index, each.pid or 0) for each in store.engines()]
    Server(folder, ClusterSpec.load(folder), store, _NoEngines(engines)).run()


def follow(folder: Path) -> None:
    """Holds the rows of the run as a notebook does, and writes how many have come."""
    ranks = len(open_store(folder, read_only=True).engines())
    reader, rows = AttemptReader(attempt_folder(str(folder / "job"), 1), ranks), Rows()
    while True:
        for some in iter(lambda: reader.read(ROWS_AT_ONCE), []):
            rows.extend(some)
        write_whole(folder / ARRIVED, str(rows.num_arrived))
        time.sleep(PERIOD_S)


def act(folder: Path, world_size: str, rate: str) -> None:
    """Appends a row for each rank, so many times a second, until this process is ended."""
    files = [RankFiles(folder, rank).rows.open("ab", 0) for rank in range(int(world_size))]
    begun, step, period_s = time.monotonic(), 0, 1 / float(rate)
    while True:
        for rank, file in enumerate(files):
            file.write(pack_row(_row(step, rank, period_s)))
        step += 1
        time.sleep(max(0.0, begun + step * period_s - time.monotonic()))


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


def _await(folder: Path, notebook: "subprocess.Popen[bytes]", count: int) -> None:
    """Waits until the notebook has read so many rows."""
    arrived = folder / ARRIVED
    while not arrived.exists() or int(arrived.read_text()) < count:
        if notebook.poll() is not None:
            raise RuntimeError("the notebook ended by itself")
        time.sleep(PERIOD_S)


def _running(folder: Path, pids: list[int]) -> list[RankFiles]:
    """Makes a cluster's folder with a job that runs on all engines; the files of its ranks."""
    device = EngineDevice("cpu", "here", "cpu", (), 1, 1 << 30)
    count, directory = len(pids), str(folder / "job")
    processes = tuple(map(ProcessIdentity.of, pids))
    ClusterSpec(
        devices=(device,) * (count + 1), sites=(HERE,) * (count + 1), address="127.0.0.1"
    ).save(folder)
    store = open_store(folder, create=True)
    for index, process in enumerate(processes):
        about = {"process": process, "engine_id": index, "memory_bytes": 1 << 30}
        store.set_engine(index, state="idle", **about)
    request = Request(
        kind="train",
        name="reporters",
        task="",
        engines=count,
        directory=directory,
        steps=1_000_000,
    )
    store.claim(store.submit(request), 0, range(count), processes=processes, state="running")
    store.close()
    files = [RankFiles(attempt_folder(directory, 1), rank) for rank in range(count)]
    for each in files:
        each.begin()
    return files


def _report(files: Sequence[FileIO], seconds: float) -> None:
    """Appends one row to each file, repeatedly."""
    start = time.perf_counter()
    due = start
    while due - start < seconds:
        _write(files, 1)
        due += PERIOD_S
        time.sleep(max(0.0, due - time.perf_counter()))


def _write(files: Sequence[FileIO], steps: int) -> None:
    """Appends rows of so many steps to each file; they continue from the last one."""
    empty = dict.fromkeys(COLUMNS, 0.0)
    for rank, file in enumerate(files):
        first, row = file.tell() // ROW_BYTES, {**empty, "rank": rank, "time": time.time()}
        file.write(b"".join(pack_row({**row, "step": first + step}) for step in range(steps)))


def _is_followed(folder: Path) -> bool:
    """Whether the server has begun, and reports steps."""
    store = open_store(folder, read_only=True)
    try:
        return any(job.step > 0 for job in store.jobs())
    finally:
        store.close()


def _python(task: str, *arguments: object) -> "subprocess.Popen[bytes]":
    module = "workbench.bench.reporters"  # also where this one is `__main__`
    return subprocess.Popen([sys.executable, "-m", module, task, *map(str, arguments)])


if __name__ == "__main__":
    tasks: dict[str, Callable[..., None]] = {"serve": serve, "follow": follow, "act": act}
    tasks[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
