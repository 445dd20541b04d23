"""Kills at random moments of real runs: whether all end as if undisturbed, and how soon.

`python -m workbench.bench.recovery.recovery FIRST STOP` does those of some seeds alone.

Each kill hits a run of its own, at a moment that depends on its seed: an engine is killed (SIGKILL)
or stopped (SIGSTOP), or the job server is killed; while ranks compute or communicate, while a
checkpoint is written, while they change their plan, or while the job is being started. The final
loss is compared with that of an undisturbed run. Two parts: many small runs, two at a time on six
engines; and a few of VGG-11 on four, for the times and for the cost of checkpoints.

The cost of checkpoints that are written beside the steps is that of

    steps    | 10 with one running | 10 without | 10 with one running | 10 without ...

Both kinds of steps are of one run, in turns, so that other changes on a machine affect both. A
block's time is from the row of the step before it to its last step's: it contains the copy and the
wait for an earlier checkpoint, which are between two steps.

A part counts hiccups that are taken for faults (`hiccups.py`): there must be none. The last goes
through a matrix of processes, faults and moments (`faults.py`).
"""

import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from workbench.bench.progress import Part, Progress
from workbench.bench.recovery.fault_table import (
    ON_A_NETWORK_DISK,
    ON_HOSTS,
    ON_THIS_HOST,
    every,
)
from workbench.bench.recovery.faults import ENGINES as HOSTS
from workbench.bench.recovery.faults import matrix
from workbench.bench.recovery.hiccups import ward
from workbench.bench.recovery.kills import CLOSE, KINDS, OF_ALL, Kill, Kind, Target
from workbench.bench.report import Cell, Figure, Report
from workbench.client.cluster import Cluster
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import SGD, Experiment, Synthetic
from workbench.plan.experiment.metrics import Row as MeasuredRow
from workbench.plan.plans.plan import Plan
from workbench.store.cluster_store import open_store

ENGINES, RANKS = 4, 2
AT_ONCE = 2  # small runs; others take their engines while those of the last ones are replaced
KILLS, STEPS = 400, 160
KILLS_OF_ALL = 100  # of what all runs of a cluster need
HICCUPS = 100
QUICK = (
    "engine, kill, start",
    "engine, kill, step",
    "disk, full, step",
    "clock, back, step",
    "network disk, cut, step",
)
BATCH = 10  # kills, after which there is a report
LARGE, LARGE_STEPS = 2, 48  # for each plan of VGG-11
PAIRS, BLOCK = 5, 10  # of blocks, and steps of each, for the cost of checkpoints
END_S = 600.0
TIMEOUT_S = 60.0
LEASE_S = 0.5
"""Of ranks that are stopped: what is measured is the way back, not the wait for them."""
Row = Mapping[str, Cell]


def run(progress: Progress, *, quick: bool) -> Iterator[Report]:
    """Kills 500 small runs and 4 of VGG-11; 100 hiccups, and the fault matrix.

    `quick`: 5 small runs, 2 hiccups, 4 cells of the matrix.
    """
    batches = _batches(KINDS, len(KINDS) if quick else KILLS)
    of_all = _batches(OF_ALL, len(OF_ALL) if quick else KILLS_OF_ALL)
    large = [] if quick else [Part("VGG-11", 2, 120), Part("checkpoints", 1, 180)]
    stumbles = Part("hiccups", 2 if quick else HICCUPS, 10)
    tables = {"faults": ON_THIS_HOST, "hosts": ON_HOSTS, "network": ON_A_NETWORK_DISK}
    cells = {
        name: [cell for cell in every(table) if not quick or str(cell) in QUICK]
        for name, table in tables.items()
    }
    takes_s = {"faults": 7, "hosts": 30, "network": 10}
    faults = [Part(name, len(found), takes_s[name]) for name, found in cells.items()]
    kills = Part("kills", len(batches), 4 * len(batches[0]))
    all_runs = Part("cluster", len(of_all), 7 * len(of_all[0]))
    progress.begin(kills, all_runs, *large, stumbles, *faults)
    small: list[Row] = []
    rows: list[Row] = []
    costs: list[float] = []
    difference: float | None = None
    hiccups: list[Row] = []
    hit: list[Row] = []
    left: list[str] = []
    if progress.wants("kills"):
        for found in survivors(progress.each("kills", batches), 1 if quick else AT_ONCE):
            small += found
            yield _report(small, rows, costs)
    if progress.wants("cluster"):
        for found in survivors(progress.each("cluster", of_all), 1):
            small += found
            yield _report(small, rows, costs)
    if any(map(progress.wants, ("VGG-11", "checkpoints"))):
        with _cluster(ENGINES) as cluster:
            for which in progress.each("VGG-11"):
                rows += _large(cluster, which)
                yield _report(small, rows, costs)
            for _ in progress.each("checkpoints"):
                costs += _costs(cluster)
                yield _report(small, rows, costs)
    if progress.wants("hiccups"):
        with ward(_small_experiment()) as one:
            for _ in progress.each("hiccups"):
                hiccups.append(_told(one.stumble()))
                yield _report(small, rows, costs, hiccups)
            yield _report(small, rows, costs, hiccups, difference := one.difference())
    experiment = _small_experiment()
    other = Plan.hybrid(experiment.plan.graph, RANKS)
    for name, those in cells.items():
        if not progress.wants(name) or not those:
            continue
        num_hosts, network = HOSTS if name == "hosts" else 0, name == "network"
        with matrix(experiment, other, left, num_hosts, network=network) as table:
            possible = [] if table is None else [cell for cell in those if table.can(cell)]
            for cell in progress.each(name, possible):
                progress.tell(f"  {cell}")
                assert table is not None
                hit.append(_told(table.suffer(cell)))
                yield _report(small, rows, costs, hiccups, difference, hit)
        yield _report(small, rows, costs, hiccups, difference, hit, left)


def _report(
    small: list[Row],
    large: list[Row],
    costs: list[float],
    hiccups: Sequence[Row] = (),
    difference: float | None = None,
    hit: Sequence[Row] = (),
    left: Sequence[str] | None = None,
) -> Report:
    rows = [*small, *large]
    figures = _figures(rows, large or small) if rows else {}
    if hiccups:
        figures["hiccups_lost"] = Figure.of([float(str(hiccups[-1]["attempts lost"]))])
        figures["hiccups_go_on_after_s"] = Figure.of([float(str(h["after s"])) for h in hiccups])
    if difference is not None:
        figures["hiccups_loss_difference"] = Figure.of([difference])
    if hit:
        figures["faults_kept"] = Figure.of([float(str(row["kept"])) for row in hit])
    if left is not None:
        figures["faults_left_behind"] = Figure.of([float(len(left))])
    return Report(
        "recovery",
        (*rows, *hiccups, *hit),
        figures | ({"checkpoint_cost": Figure.of(costs)} if costs else {}),
        (
            f"survived: finished, with the final loss of a run that nothing was done to, to the "
            f"last bit ({CLOSE:g} after a re-cut), and no attempt but after one that lost an "
            "engine which was killed here, or all of them with supervisor or controller.",
            "detected: until the job server gave the attempt up and interrupted the other ranks; "
            "ended: until it knew how all had ended; begun: until the next attempt had a rank; "
            "resumed: until that attempt's first step was done; of VGG-11 with a warm spare.",
            "seconds_to_detect: of those in which no other kill had just ended the server, too.",
            "steps_lost: checkpoints are written every 10 steps, beside the steps that follow.",
            f"checkpoint_cost: what one every {BLOCK} steps of VGG-11, data parallel,"
            " adds to their time, as a part of it; steps with and without in turns, in one run.",
            "hiccups: a rank, a link or a disk stands still for 2 to 10 s; lost are attempts "
            "that were given up, and the loss is compared in every step with an undisturbed run's.",
            "faults: each process killed, stopped for 3 s or interrupted, and what it stands on "
            "struck, at each moment; kept is the promise: losses equal to the last bit, or an "
            "error that says what happened.",
            *(f"left behind: {what}" for what in left or ()),
        ),
        engines=ENGINES,
    )


def _batches(kinds: Sequence[Kind], count: int) -> list[list[Kill]]:
    kills = [Kill.of(seed, kinds) for seed in range(count)]
    return [kills[first : first + BATCH] for first in range(0, count, BATCH)]


def survivors(batches: Iterable[Sequence[Kill]], at_once: int) -> Iterator[list[Row]]:
    """The outcomes of one small run for each kill of a batch, so many at a time."""
    engines = (2 * at_once - 1) * RANKS
    with _cluster(engines) as cluster, ThreadPoolExecutor(at_once) as side_by_side:
        small = _small(cluster)
        straight = small.straight()

        def survive(kill: Kill) -> Row:
            return _told(small.survive(kill, straight))

        for kills in batches:
            yield list(side_by_side.map(survive, kills))


def follow(folder: str) -> None:
    """Begins a run on a cluster, tells its number and waits for it, as a notebook does."""
    run = Cluster.attach(Path(folder)).train(_small_experiment())
    print(run.id, flush=True)
    run.wait(END_S)


@contextmanager
def _cluster(engines: int) -> Iterator[Cluster]:
    with (
        tempfile.TemporaryDirectory() as directory,
        Cluster(engines, directory=directory, timeout=TIMEOUT_S, lease=LEASE_S) as cluster,
    ):
        yield cluster


def _small(cluster: Cluster) -> Target:
    experiment = _small_experiment()
    other = Plan.hybrid(experiment.plan.graph, RANKS)
    return Target(cluster, open_store(cluster.folder), experiment, other)


def _small_experiment() -> Experiment:
    torch.manual_seed(0)  # another process makes the same
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 16 * 16, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    plan = Plan.data_parallel(trace(net, input_shape=(3, 16, 16)), RANKS)
    return _experiment(plan, "fp64", STEPS)


def _large(cluster: Cluster, which: int) -> Iterable[Row]:
    """Kills of VGG-11 under one of two plans."""
    graph = trace("vgg11", input_shape=(3, 32, 32), num_classes=10)
    plans = {
        "data parallel": Plan.data_parallel(graph, ENGINES),
        "hybrid": Plan.hybrid(graph, ENGINES),
    }
    (name, plan), other = list(plans.items())[which], list(plans.values())[1 - which]
    target = Target(
        cluster, open_store(cluster.folder), _experiment(plan, "fp32", LARGE_STEPS), other
    )
    straight = target.straight()
    for seed in range(LARGE):
        target.wait_for_spare()
        row = target.survive(Kill(seed, KINDS[seed % 2], "step"), straight)
        yield _told({**row, "VGG-11": name})


def _costs(cluster: Cluster) -> list[float]:
    graph = trace("vgg11", input_shape=(3, 32, 32), num_classes=10)
    plan = Plan.data_parallel(graph, ENGINES)
    return checkpoint_costs(cluster, _experiment(plan, "fp32", LARGE_STEPS), PAIRS)


def checkpoint_costs(cluster: Cluster, experiment: Experiment, pairs: int) -> list[float]:
    """The relative increase of steps' time by a checkpoint every `BLOCK` steps, for each pair.

    Args:
        cluster: the cluster to run on.
        experiment: the experiment that trains; its length and its checkpoints are set here.
        pairs: the number of pairs of blocks.
    """
    steps = (2 * pairs + 2) * BLOCK  # the first two blocks warm up
    run = cluster.train(experiment.replace(steps=steps, checkpoint_every=2 * BLOCK))
    return costs_in(run.wait(END_S).rows)


def costs_in(rows: Sequence[MeasuredRow]) -> list[float]:
    """The relative increases in the rows of a run that was saved every 2 `BLOCK` steps."""
    times = [row["time"] for row in sorted(rows, key=lambda row: row["step"]) if row["rank"] == 0]
    starts = range(2 * BLOCK - 1, len(times) - 2 * BLOCK, 2 * BLOCK)
    found = []
    for start in starts:
        begun, between, end = (times[start + n * BLOCK] for n in range(3))
        found.append((between - begun) / (end - between) - 1)
    return found


def _told(row: Row) -> Row:
    """The row, which is printed as it comes, since all of them take long."""
    print(", ".join(f"{name}: {value}" for name, value in row.items()), file=sys.stderr, flush=True)
    return row


def _experiment(plan: Plan, precision: Literal["fp32", "fp64"], steps: int) -> Experiment:
    return Experiment(
        plan=plan,
        data=Synthetic(),
        batch_size=16,
        optimizer=SGD(lr=0.001, momentum=0.9),
        steps=steps,
        precision=precision,
        checkpoint_every=10,
        evaluate_every=None,
    )


def _figures(rows: list[Row], timed: list[Row]) -> dict[str, Figure]:
    figures = {
        "kills_survived": Figure.of([sum(bool(row["survived"]) for row in rows) / len(rows)]),
        "hangs": Figure.of([float(sum(row["ended"] == "hangs" for row in rows))]),
        "lost": Figure.of([float(sum(row["ended"] not in ("finished", "hangs") for row in rows))]),
        "twice": Figure.of([float(sum(bool(row["more than once"]) for row in rows))]),
    }
    watched = [row for row in rows if row["server there"] == 1]
    seconds = {
        "loss_difference": ("loss differs by", rows),
        "seconds_to_detect": ("detected in s", watched),
        "seconds_to_resume": ("resumed in s", timed),
        "steps_lost": ("steps lost", rows),
    }
    for name, (column, those) in seconds.items():
        figures |= _figure(name, column, those)
    for kind in KINDS[:2]:
        own = [row for row in watched if row["kind"] == kind]
        figures |= _figure(f"seconds_to_detect_{kind.split()[1]}", "detected in s", own)
    return figures


def _figure(name: str, column: str, rows: Iterable[Row]) -> dict[str, Figure]:
    values = [float(row[column]) for row in rows if row[column] != ""]
    return {name: Figure.of(values)} if values else {}
