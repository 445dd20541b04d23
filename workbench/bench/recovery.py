"""Kills at random moments of real runs: whether all end as if nothing had been, and how soon.

Each kill is done to a run of its own, at a moment that its seed says: an engine is ended (SIGKILL)
or stopped (SIGSTOP), or the job server ended; while ranks compute or communicate, while a
checkpoint is written, while they change their plan, or while the job is being started. The final
loss is held against that of a run that nothing was done to. Two parts: many small runs, two at a
time on four engines; and a few of VGG-11 on all four, for the times.
"""

import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from torch import nn

from workbench.bench.kills import CLOSE, KINDS, Kill, Target
from workbench.bench.report import Cell, Figure, Report
from workbench.cluster.cluster import Cluster
from workbench.cluster.jobs.store import Store
from workbench.cluster.server.__main__ import STORE
from workbench.model.trace import trace
from workbench.plan.experiment import SGD, Experiment, Synthetic
from workbench.plan.plan import Plan

ENGINES, RANKS = 4, 2
KILLS, LARGE = 200, 6
TIMEOUT_S = 60.0
Row = Mapping[str, Cell]


def run(*, quick: bool) -> Report:
    """Kills 200 small runs and 6 of VGG-11; `quick`: 3 small ones and none."""
    engines = RANKS if quick else ENGINES
    with (
        tempfile.TemporaryDirectory() as directory,
        Cluster(engines, directory=directory, timeout=TIMEOUT_S) as cluster,
    ):
        small = _small(cluster)
        straight = small.straight()
        kills = [Kill.of(seed) for seed in range(len(KINDS) if quick else KILLS)]
        with ThreadPoolExecutor(engines // RANKS) as side_by_side:
            rows: list[Row] = list(
                side_by_side.map(lambda kill: small.survive(kill, straight), kills)
            )
        large: list[Row] = [] if quick else list(_large(cluster))
    return Report(
        "recovery",
        (*rows, *large),
        _figures([*rows, *large], large or rows),
        (
            f"survived: finished, with the final loss of a run that nothing was done to, to "
            f"{CLOSE:g}, and no attempt that did not follow the loss of one.",
            "detected: until the job server gave the attempt up and interrupted the other ranks; "
            "resumed: until the next attempt's first step was done; of VGG-11 with a warm spare.",
            "steps_lost: checkpoints are written every 10 steps, beside the steps that follow.",
        ),
    )


def _small(cluster: Cluster) -> Target:
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 16 * 16, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    graph = trace(net, input_shape=(3, 16, 16))
    plan, other = Plan.data_parallel(graph, RANKS), Plan.hybrid(graph, RANKS)
    return Target(
        cluster, Store(cluster.folder / STORE), _experiment(plan, "fp64", 160), other, net
    )


def _large(cluster: Cluster) -> Iterable[Row]:
    graph = trace("vgg11", input_shape=(3, 32, 32), num_classes=10)
    plan, other = Plan.data_parallel(graph, ENGINES), Plan.hybrid(graph, ENGINES)
    target = Target(cluster, Store(cluster.folder / STORE), _experiment(plan, "fp32", 32), other)
    straight = target.straight()
    for seed in range(LARGE):
        target.wait_for_spare()
        yield target.survive(Kill(seed, KINDS[seed % 2], "step"), straight)


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
    seconds = {
        "loss_difference": ("loss differs by", rows),
        "seconds_to_detect": ("detected in s", rows),
        "seconds_to_resume": ("resumed in s", timed),
        "steps_lost": ("steps lost", rows),
    }
    for name, (column, those) in seconds.items():
        figures |= _figure(name, column, those)
    for kind in KINDS[:2]:
        own = [row for row in rows if row["kind"] == kind]
        figures |= _figure(f"seconds_to_detect_{kind.split()[1]}", "detected in s", own)
    return figures


def _figure(name: str, column: str, rows: Iterable[Row]) -> dict[str, Figure]:
    values = [float(row[column]) for row in rows if row[column] != ""]
    return {name: Figure.of(values)} if values else {}
