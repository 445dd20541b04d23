"""The job server: the quality of its schedule, its cost, and its traffic.

queues      mixed queues that are simulated with the scheduler and a virtual clock, against a
lower bound
decisions   the time of one decision
reporters   the processor time of a server with simulated ranks that report
hour        the memory of such a server, and of a notebook, after an hour
live        a cluster's messages in runs of more and of fewer parameters, and how soon they begin
"""

import heapq
import random
import tempfile
import time
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from workbench.bench import reporters
from workbench.bench.harness.progress import Part, Progress
from workbench.bench.harness.report import MIB, Cell, Figure, Report, Row
from workbench.client.cluster import Cluster
from workbench.client.run.run import Run
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import SGD, Experiment, Synthetic
from workbench.plan.plans.plan import Plan
from workbench.scheduler.backfill import EngineRelease, WaitingJob, place
from workbench.scheduler.jobs import rank
from workbench.scheduler.scheduling import schedule
from workbench.store.record import EngineRecord, JobRecord, Tally

QUEUED = 1000
SIZES = ((1000, 64), (3000, 256), (10_000, 1024))  # jobs, engines
RANKS = 64


@dataclass
class _Results:
    """The rows, and the samples of each figure, so far."""

    rows: list[Row] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)

    def add(self, rows: Sequence[Row], **samples: Sequence[float]) -> Report:
        """Adds rows and samples; the report of all results so far."""
        self.rows += rows
        for name, values in samples.items():
            self.samples.setdefault(name, []).extend(values)
        notes = (
            "efficiency: engine-seconds that no schedule could undercut, over those of ours; the "
            "best schedule is not known, and may itself be worse than that bound.",
            f"schedule_seconds: one decision on {QUEUED:,} jobs that wait, with all reasons.",
            f"server_core_share: processor time over time of a server that follows {RANKS} "
            "simulated ranks, each with 10 rows a second.",
            "server_memory_growth, notebook_memory_growth: resident bytes after an hour of such "
            "rows, over those after its first 12 minutes; they come sixty times as fast.",
            "control bytes: of all messages of a run that the job server counted; per step: of "
            f"those after the first of {STEPS} steps, each rank's answer at the end among them.",
            "tensor_bytes_through_controller: what a wider model adds to the messages of its run, "
            "where that is as much as the smallest tensor that is wider; less is digits of its "
            "text.",
            "submit_to_first_step: seconds from the call of train to the end of the first step, on "
            "engines that have run the same before.",
        )
        figures = {name: Figure.of(values) for name, values in self.samples.items() if values}
        return Report("jobserver", tuple(self.rows), figures, notes)


def run(progress: Progress, *, quick: bool) -> Iterator[Report]:
    """Measures all parts; `quick` takes small queues, few rows, and two engines."""
    sizes, worlds = SIZES[: 1 if quick else None], WORLDS[: 1 if quick else None]
    queues = [(n, engines, s) for n, engines in sizes for s in range(1 if n > 5000 else 3)]
    progress.begin(
        Part("queues", len(queues), 5),
        Part("decisions", len(sizes), 1),
        Part("reporters", 1, 10 if quick else 40),
        Part("hour", 1, 15 if quick else 120),
        Part("live", len(worlds), 40),
    )
    results = _Results()
    for jobs, engines, seed in progress.each("queues", queues):
        row = _simulated(jobs, engines, seed)
        yield results.add([row], schedule_efficiency=[float(row["efficiency"])])
    for _, engines in progress.each("decisions", sizes):
        row = _scheduled(engines)
        yield results.add([row], schedule_seconds=[float(row["seconds"])])
    for _ in progress.each("reporters"):
        shares = reporters.core_shares(RANKS, 5.0 if quick else 30.0)
        row = {"reporters": RANKS, "share of a core": max(shares)}
        yield results.add([row], server_core_share=shares)
    for _ in progress.each("hour"):
        sizes_at = list(reporters.hour(2, 10) if quick else reporters.hour(RANKS))
        (_, server, notebook), (_, last_server, last_notebook) = sizes_at[1], sizes_at[-1]
        yield results.add(
            [
                {"minutes": minutes, "server MiB": a / MIB, "notebook MiB": b / MIB}
                for minutes, a, b in sizes_at
            ],
            server_memory_growth=[last_server / server],
            notebook_memory_growth=[last_notebook / notebook],
        )
    for world in progress.each("live", worlds):
        yield _live(results, world, quick=quick)


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


@dataclass(frozen=True, slots=True)
class Load:
    """A job of a simulation: when it arrives, its engines, its seconds, and the predicted ones."""

    arrival: float
    engines: int
    seconds: float
    predicted: float


@dataclass(frozen=True)
class Simulated:
    """The seconds of a schedule, the lower bound for any, and when each load began."""

    makespan: float
    bound: float
    starts: tuple[float, ...]

    @property
    def efficiency(self) -> float:
        """Engine-seconds of the bound over those of the schedule; at most 1.

        The optimal schedule itself is not known, and may be worse than the bound.
        """
        return self.bound / self.makespan


def simulate(loads: Sequence[Load], num_engines: int) -> Simulated:
    """Simulates jobs of one priority with `place`, in `rank`'s order, on equal engines.

    Raises:
        ValueError: there is no job, or one that never fits.
    """
    if not loads or max(load.engines for load in loads) > num_engines:
        raise ValueError(f"loads of 1 to {num_engines} engines are needed")
    arrivals = sorted(range(len(loads)), key=lambda each: loads[each].arrival)
    everything = (1 << num_engines) - 1
    free, queue = everything, list[WaitingJob]()
    ends: list[EngineRelease] = []  # as predicted
    running: list[tuple[float, EngineRelease]] = []  # a heap, by when they do end
    starts, now, next_arrival = [0.0] * len(loads), 0.0, 0

    def in_order(job: WaitingJob) -> tuple[float, int]:
        return rank(0, loads[job.id - 1].arrival, job.seconds), job.id

    while running or next_arrival < len(arrivals):
        coming = loads[arrivals[next_arrival]].arrival if next_arrival < len(arrivals) else None
        now = running[0][0] if coming is None or (running and running[0][0] <= coming) else coming
        while running and running[0][0] <= now:
            _, end = heapq.heappop(running)
            del ends[bisect_left(ends, end)]
            free |= end.engines
        while next_arrival < len(arrivals) and loads[arrivals[next_arrival]].arrival <= now:
            number = arrivals[next_arrival]
            load = loads[number]
            job = WaitingJob(number + 1, everything, load.engines, load.predicted)
            insort(queue, job, key=in_order)
            next_arrival += 1
        placed = place(queue, free, ends, now)
        free = placed.free
        for job, engines in placed.starts:
            starts[job.id - 1] = now
            end = EngineRelease(now + job.seconds, job.id, engines)
            insort(ends, end)
            heapq.heappush(running, (now + loads[job.id - 1].seconds, end))
        if placed.starts:
            begun = {job.id for job, _ in placed.starts}
            queue = [job for job in queue if job.id not in begun]
    return Simulated(now - loads[arrivals[0]].arrival, bound(loads, num_engines), tuple(starts))


def bound(loads: Sequence[Load], num_engines: int) -> float:
    """The lower bound of any schedule's makespan, in seconds.

    It is the greatest of: for each job, its arrival and its duration; for each arrival, the work
    that is submitted from then on, on all engines at once; and for each k, a k-th of the seconds of
    jobs of which no more than k fit at once.
    """
    loads = sorted(loads, key=lambda load: load.arrival)
    first = loads[0].arrival
    best, work = 0.0, 0.0
    for load in reversed(loads):
        work += load.engines * load.seconds
        begun = load.arrival - first
        best = max(best, begun + load.seconds, begun + work / num_engines)
    largest_first = sorted(loads, key=_minus_engines)
    sums = [0.0, *accumulate(load.seconds for load in largest_first)]
    for k in range(1, num_engines + 1):
        too_large = bisect_left(largest_first, -(num_engines // (k + 1)), key=_minus_engines)
        best = max(best, sums[too_large] / k)
    return best


def _minus_engines(load: Load) -> int:
    return -load.engines


def mixed(num_jobs: int, num_engines: int, *, seed: int = 0) -> list[Load]:
    """A queue of many users in one day: powers of two and some odd sizes, minutes to hours.

    Seconds are log-normal around ten minutes, and predicted to within a third either way. All
    arrive while the engines have at most half of the work behind them, so there is always a queue.
    """
    rng = random.Random(seed)
    most = max(1, num_engines // 8)
    sizes = [2**power for power in range(most.bit_length())] + [3, 5, 6, 12]
    shapes = [
        (rng.choice([n for n in sizes if n <= most]), min(rng.lognormvariate(6.4, 1.0), 7200.0))
        for _ in range(num_jobs)
    ]
    span = sum(engines * seconds for engines, seconds in shapes) / num_engines / 2
    return [
        Load(rng.uniform(0.0, span), engines, seconds, seconds * rng.uniform(2 / 3, 4 / 3))
        for engines, seconds in shapes
    ]


INPUT_SHAPE = (3, 16, 16)
WIDTHS = (1280, 12_800, 166_400)  # 1 M, 10 M and 130 M parameters
QUICK_WIDTHS = (128, 1280)
WORLDS = (2, 4, 8)
STEPS = 20
ROUNDS = 5
START_S = 120.0


class Wide(nn.Module):
    """Two linear layers: the same model in text, whatever the number of parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Linear(torch.Size(INPUT_SHAPE).numel(), width)
        self.out = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Maps images [rows, 3, 16, 16] to scores [rows, 10]."""
        return self.out(torch.relu(self.hidden(torch.flatten(x, 1))))


def _live(results: _Results, world: int, *, quick: bool) -> Report:
    """Trains models of one form and several widths, sharded over so many ranks."""
    with (
        tempfile.TemporaryDirectory() as directory,
        Cluster(world, directory=directory, timeout=300.0) as cluster,
    ):
        rows = [_controlled(cluster, width) for width in (QUICK_WIDTHS if quick else WIDTHS)]
        starts = _started(cluster, 2 if quick else ROUNDS)
    return results.add(
        rows,
        control_bytes_per_step=[float(row["bytes/step"]) for row in rows],
        tensor_bytes_through_controller=[_tensor_bytes(rows[0], row) for row in rows[1:]],
        submit_to_first_step=starts,
    )


def _controlled(cluster: Cluster, width: int) -> dict[str, Cell]:
    module = Wide(width)
    run = _train(cluster, module)
    _await_first_row(run)
    before = _messages(cluster, run)
    run.wait(START_S)
    after = _messages(cluster, run)
    return {
        "ranks": len(cluster),
        "width": width,
        "parameters": sum(each.numel() for each in module.parameters()),
        "messages": after.messages,
        "bytes": after.bytes,
        "messages/step": (after.messages - before.messages) / STEPS,
        "bytes/step": (after.bytes - before.bytes) / STEPS,
    }


def _tensor_bytes(narrow: Mapping[str, Cell], wide: Mapping[str, Cell]) -> float:
    """Bytes that a wider model adds, if they could hold its smallest tensor, the hidden bias."""
    added = float(wide["bytes"]) - float(narrow["bytes"])
    bias = 4 * (int(wide["width"]) - int(narrow["width"]))
    return added if added >= bias else 0.0


def _started(cluster: Cluster, rounds: int) -> list[float]:
    module, seconds = Wide(QUICK_WIDTHS[0]), []
    for number in range(rounds + 1):
        begun = time.time()
        run = _train(cluster, module)
        run.wait(START_S)
        if number:  # the first one warms what it uses
            seconds.append(min(row["time"] for row in run.rows if row["step"] == 0) - begun)
    return seconds


def _train(cluster: Cluster, module: Wide) -> Run:
    experiment = Experiment(
        plan=Plan.hybrid(trace(module, input_shape=INPUT_SHAPE), len(cluster)),
        data=Synthetic(samples=256),
        batch_size=32,
        optimizer=SGD(lr=0.01),
        steps=STEPS,
    )
    return cluster.train(experiment, module=module)


def _await_first_row(run: Run) -> None:
    deadline = time.monotonic() + START_S
    while not run.rows and not run.is_done:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{run!r} made no step in {START_S:g} s")
        time.sleep(0.01)


def _messages(cluster: Cluster, run: Run) -> Tally:
    tallies = cluster.link.store.ledger(run.id).values()
    return Tally(sum(each.messages for each in tallies), sum(each.bytes for each in tallies))
