"""Devices of unequal speed: shares from measured times, against equal ones and the fastest alone.

Engines are slowed on purpose, whole processes for a part of the time (`cluster.slow`); their
layers are then measured (`cluster.calibrate`), and shares chosen from what was found. Plans run one
after the other, round after round. A second part slows a device while a run goes on.

    gain_vs_ideal           the gain over equal shares, computing alone, over the ideal one, which
                            is mean(v) / min(v) of the speeds v asked for
    gain_vs_fastest_alone   samples per second, against the fastest device by itself
    imbalance               (slowest - fastest) / slowest, of the ranks' computing

Source: Moreno-Alvarez et al. 2020 and 2021, and the gain model derived from them.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from workbench.bench import hetero_live
from workbench.bench.cifar_net import INPUT_SHAPE, CifarNet
from workbench.bench.report import Cell, Figure, Report
from workbench.cluster.cluster import Cluster
from workbench.model.trace import trace
from workbench.plan.experiment import SGD, Experiment, Synthetic
from workbench.plan.graph import Graph
from workbench.plan.plan import Plan
from workbench.predict.balance import Split, balanced

SPEEDS = ((2, 1, 1), (4, 2, 1), (70, 25, 5))
WARM = 2  # steps of a run that do not count


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    speeds: tuple[tuple[int, ...], ...]
    rounds: int
    steps: int
    batch_size: int
    divisor: int
    within_s: float


FULL, QUICK = Size(SPEEDS, 3, 5, 48, 1, 40.0), Size(((2, 1),), 1, 2, 16, 4, 5.0)


@dataclass(frozen=True)
class Timed:
    """A run's steps in the middle: of each rank, and of all."""

    compute_s: tuple[float, ...]
    samples_per_s: float

    @property
    def imbalance(self) -> float:
        """Of the ranks' computing."""
        return (max(self.compute_s) - min(self.compute_s)) / max(self.compute_s)


def run(*, quick: bool) -> Report:
    """Measures every set of speeds, then a device that slows down."""
    size = QUICK if quick else FULL
    module = CifarNet(size.divisor)
    graph = trace(module, input_shape=INPUT_SHAPE)
    rows: list[dict[str, Cell]] = []
    figures: dict[str, Figure] = {}
    with Cluster(len(size.speeds[0]), timeout=300.0) as cluster:
        for speeds in size.speeds:
            for split in ("rows", "filters"):
                found = _compared(cluster, graph, module, speeds, split, size)
                rows += found.rows
                figures |= found.figures
        live = hetero_live.run(cluster, graph, module, size.batch_size, quick=quick)
    notes = (
        f"{graph.source.name}, {graph.parameters:,} parameters, batches of {size.batch_size}, one "
        "thread for each engine; an engine of speed v is let run for v / max(v) of the time.",
        f"Medians and ranges of {size.rounds} interleaved rounds of {size.steps} steps.",
    )
    return Report("hetero", (*rows, *live.rows), figures | live.figures, (*notes, *live.notes))


@dataclass(frozen=True)
class Found:
    """Lines and figures of one part."""

    rows: tuple[dict[str, Cell], ...]
    figures: dict[str, Figure]
    notes: tuple[str, ...] = ()


def _compared(
    cluster: Cluster,
    graph: Graph,
    module: nn.Module,
    speeds: Sequence[int],
    split: Split,
    size: Size,
) -> Found:
    world, name = len(speeds), f"{split}_{'_'.join(map(str, speeds))}"
    equal = Plan.data_parallel(graph, world) if split == "rows" else Plan.filters(graph, world)
    experiment = experiment_of(equal, size.batch_size, WARM + size.steps)
    for engine, speed in enumerate(speeds):
        cluster.slow(engine, max(speeds) / speed)
    try:
        machine = cluster.calibrate(
            *plans_to_measure(graph, world, split),
            rows=rows_to_measure(size.batch_size, split, world),
            within_s=size.within_s,
            fresh=True,
            module=module,
        )
        chosen = balanced(experiment, machine, split=split)
        plans = {
            "equal": equal,
            "measured": chosen.plan,
            "fastest alone": Plan.data_parallel(graph, 1),
        }
        times: dict[str, list[Timed]] = {plan: [] for plan in plans}
        for _ in range(size.rounds):
            for label, plan in plans.items():
                times[label].append(timed(cluster, experiment.replace(plan=plan), module))
        slowed = cluster.slowed
    finally:
        cluster.mend()
    ideal = statistics.fmean(speeds) / min(speeds)
    rounds = list(zip(times["equal"], times["measured"], times["fastest alone"], strict=True))
    gains = [max(even.compute_s) / max(own.compute_s) for even, own, _ in rounds]
    figures = {
        f"gain_vs_ideal_{name}": Figure.of([gain / ideal for gain in gains]),
        f"gain_vs_equal_{name}": Figure.of(
            [own.samples_per_s / even.samples_per_s for even, own, _ in rounds]
        ),
        f"gain_vs_fastest_alone_{name}": Figure.of(
            [own.samples_per_s / alone.samples_per_s for _, own, alone in rounds]
        ),
        f"imbalance_{name}": Figure.of([own.imbalance for _, own, _ in rounds]),
    }
    shares = {"equal": "equal", "measured": ":".join(map(str, chosen.partition.sizes))}
    rows = tuple[dict[str, Cell], ...](
        {
            "speeds": ":".join(map(str, speeds)),
            "slowed by": ":".join(f"{slowed.get(rank, 1.0):.2f}" for rank in range(world)),
            "split": split,
            "shares": shares.get(label, label),
            "samples/s": statistics.median(one.samples_per_s for one in of),
            "slowest rank computes s": statistics.median(max(one.compute_s) for one in of),
            "imbalance": statistics.median(one.imbalance for one in of),
        }
        for label, of in times.items()
    )
    return Found(rows, figures)


def plans_to_measure(graph: Graph, world: int, split: Split) -> tuple[Plan, ...]:
    """Plans under which every device has small and large pieces of every layer."""
    if split == "rows":
        return (Plan.data_parallel(graph, world),)
    falling = [2**rank for rank in range(world)]
    turns = [falling[shift:] + falling[:shift] for shift in range(world)]
    return tuple(Plan.filters(graph, world, shares).with_rows(None) for shares in turns)


def rows_to_measure(batch_size: int, split: Split, world: int) -> tuple[int, ...]:
    """Rows of a rank: for filters, whole batches; for rows, parts of one."""
    if split == "filters":
        return (max(1, batch_size // world),)
    return tuple(sorted({max(1, batch_size // part) for part in (12, 6, 3, 2)}))


def experiment_of(plan: Plan, batch_size: int, steps: int) -> Experiment:
    """What runs."""
    return Experiment(
        plan=plan,
        data=Synthetic(samples=256),
        batch_size=batch_size,
        optimizer=SGD(lr=0.01, momentum=0.9),
        steps=steps,
    )


def timed(cluster: Cluster, experiment: Experiment, module: nn.Module) -> Timed:
    """Runs an experiment to its end, and looks at its steps but for the first ones."""
    frame = cluster.train(experiment, module=module).wait().metrics
    frame = frame[frame["step"] >= WARM]
    seconds = frame.groupby("rank")["compute_s"].median()
    return Timed(tuple(seconds), float(frame["samples_per_s"].median()))
