"""The job server: the quality of its schedule, its cost, and its traffic.

queues, decisions, store    the scheduler and the store by themselves
reporters                   a server with simulated ranks that report
live                        a cluster with runs of more and of fewer parameters
"""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from workbench.bench.jobserver import control, reporters
from workbench.bench.jobserver.simulation import mixed, simulate
from workbench.bench.progress import Part, Progress
from workbench.bench.report import Cell, Figure, Report
from workbench.plan.experiment.metrics import COLUMNS
from workbench.scheduler.scheduling import schedule
from workbench.store.rank_files import RankFiles
from workbench.store.record import EngineRecord, JobRecord
from workbench.store.telemetry import KEPT_WHOLE, pack_row, thin

QUEUED = 1000
SIZES = ((1000, 64), (3000, 256), (10_000, 1024))  # jobs, engines
RANKS = 64
MIB = 1 << 20
FILES = 100  # of one rank, put aside one after another


def run(progress: Progress, *, quick: bool) -> Iterator[Report]:
    """Measures all parts; `quick` takes small queues, few rows, and two engines."""
    queues = _queues(quick)
    sizes = SIZES[: 1 if quick else None]
    worlds = control.WORLDS[: 1 if quick else None]
    progress.begin(
        Part("queues", len(queues), 5),
        Part("decisions", len(sizes), 1),
        Part("store", 1, 5 if quick else 30),
        Part("reporters", 1, 10 if quick else 40),
        Part("hour", 1, 15 if quick else 120),
        Part("live", len(worlds), 40),
    )
    rows: list[Mapping[str, Cell]] = []
    samples: dict[str, list[float]] = {}
    for jobs, engines, seed in progress.each("queues", queues):
        rows.append(_simulated(jobs, engines, seed))
        samples.setdefault("schedule_efficiency", []).append(float(rows[-1]["efficiency"]))
        yield _report(rows, samples)
    for _, engines in progress.each("decisions", sizes):
        rows.append(_scheduled(engines))
        samples.setdefault("schedule_seconds", []).append(float(rows[-1]["seconds"]))
        yield _report(rows, samples)
    for _ in progress.each("store"):
        rows.append(stored := _stored(100_000 if quick else 1_000_000))
        samples["store_growth"] = [float(stored["file growth"])]
        samples["memory_growth"] = [float(stored["memory growth"])]
        yield _report(rows, samples)
    for _ in progress.each("reporters"):
        shares = reporters.measured(RANKS, 5.0 if quick else 30.0)
        rows.append({"reporters": RANKS, "share of a core": max(shares)})
        samples["server_core_share"] = shares
        yield _report(rows, samples)
    for _ in progress.each("hour"):
        told = list(reporters.hour(2, 10) if quick else reporters.hour(RANKS))
        rows += [
            {"minutes": minutes, "server MiB": server / MIB, "notebook MiB": notebook / MIB}
            for minutes, server, notebook in told
        ]
        (_, server, notebook), (_, last_server, last_notebook) = told[1], told[-1]
        samples["server_memory_growth"] = [last_server / server]
        samples["notebook_memory_growth"] = [last_notebook / notebook]
        yield _report(rows, samples)
    for world in progress.each("live", worlds):
        live = control.measured(world, quick=quick)
        rows += live.rows
        for name, found in live.samples.items():
            samples.setdefault(name, []).extend(found)
        yield _report(rows, samples)


def _report(rows: list[Mapping[str, Cell]], samples: Mapping[str, list[float]]) -> Report:
    notes = (
        "efficiency: engine-seconds that no schedule could undercut, over those of ours; the best "
        "schedule is not known, and may itself be worse than that bound.",
        f"schedule_seconds: one decision on {QUEUED:,} jobs that wait, with all reasons; "
        "growth: of a rank's files of rows, and memory of the process, at most, over those of a "
        "quarter of the rows.",
        f"server_core_share: processor time over time of a server that follows {RANKS} simulated "
        "ranks, each with 10 rows a second.",
        "server_memory_growth, notebook_memory_growth: resident bytes after an hour of such rows, "
        "over those after its first 12 minutes; they come sixty times as fast.",
        *control.NOTES,
    )
    figures = {name: Figure.of(found) for name, found in samples.items() if found}
    return Report("jobserver", tuple(rows), figures, notes)


def _queues(quick: bool) -> list[tuple[int, int, int]]:
    """(jobs, engines, seed)."""
    sizes = SIZES[: 1 if quick else None]
    return [(n, engines, s) for n, engines in sizes for s in range(1 if n > 5000 else 3)]


def _simulated(jobs: int, engines: int, seed: int) -> dict[str, Cell]:
    loads = mixed(jobs, engines, seed=seed)
    begun = time.perf_counter()
    simulated = simulate(loads, engines)
    waits = sum(simulated.starts) - sum(load.arrival for load in loads)
    return {
        "jobs": jobs,
        "engines": engines,
        "seed": seed,
        "efficiency": simulated.efficiency,
        "mean wait h": waits / jobs / 3600,
        "makespan h": simulated.makespan / 3600,
        "simulated in s": time.perf_counter() - begun,
    }


def _scheduled(num_engines: int) -> dict[str, Cell]:
    """The seconds of one decision, with half of the engines in use."""
    now = 1e6
    used = range(0, num_engines, 2)
    running = [
        _job(index + 1, 1, state="running", held=(index,), started_at=now - 60.0) for index in used
    ]
    queue = [
        _job(num_engines + number, 1 + number % 9, priority=number % 3) for number in range(QUEUED)
    ]
    engines = [
        EngineRecord(index=index, state="busy" if index in used else "idle", memory_bytes=1 << 30)
        for index in range(num_engines)
    ]
    begun = time.perf_counter()
    decided = schedule([*running, *queue], engines, now)
    seconds = time.perf_counter() - begun
    return {
        "waiting": QUEUED,
        "on engines": num_engines,
        "seconds": seconds,
        "started": len(decided.starts),
    }


def _job(number: int, engines: int, **fields: Any) -> JobRecord:
    values: dict[str, Any] = {
        "kind": "train",
        "name": "job",
        "task": "",
        "seconds": 600.0,
        "submitted_at": 1.0,
    }
    return JobRecord(**{**values, "id": number, "engines": engines, **fields})


def _stored(num_rows: int) -> dict[str, Cell]:
    """The room that a rank's rows take, as they come: the largest in a quarter, and in all."""
    empty, at_once = dict.fromkeys(COLUMNS, 0.0), num_rows // FILES
    with TemporaryDirectory() as folder:
        files, process, begun = RankFiles(Path(folder), 0), psutil.Process(), time.perf_counter()
        in_quarter, in_all = (0, 0), (0, 0)
        for number in range(FILES):
            steps = range(number * at_once, (number + 1) * at_once)
            packed = b"".join(pack_row({**empty, "step": step}) for step in steps)
            files.aside(number).write_bytes(packed)
            if (num_older := number + 1 - KEPT_WHOLE) > 0:
                thin(files, num_older)
            size = sum(path.stat().st_size for path in Path(folder).glob("*.rows"))
            in_all = (max(in_all[0], size), max(in_all[1], process.memory_info().rss))
            if number < FILES // 4:
                in_quarter = in_all
    return {
        "rows": num_rows,
        "files MiB": in_all[0] / 2**20,
        "file growth": in_all[0] / in_quarter[0],
        "memory growth": in_all[1] / in_quarter[1],
        "stored in s": time.perf_counter() - begun,
    }
