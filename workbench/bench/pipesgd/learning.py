"""Part of `bench pipesgd`: the seconds to reach the accuracy of synchronous steps.

    digits     scikit-learn's digits, an MLP
    colors    synthetic 32 x 32 color images of many classes, a small CNN

D-Sync against Pipe-SGD with Q and a synchronous warm-up, at a learning rate that is stable for
both. Then the failure: momentum 0.9 at a rate that is stable for synchronous steps, where a
gradient that is one step late has the limit lr h < 1 - m instead of 2 (1 + m); and how far warm-up
helps.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from workbench.bench.nets import COLOR_SHAPE, DIGITS_SHAPE, cnn, mlp
from workbench.bench.pipesgd.sweep import ENGINES, QUEUE_S
from workbench.bench.progress import Progress
from workbench.bench.report import Cell, Figure
from workbench.client.cluster import Cluster
from workbench.client.run.run import Run
from workbench.hosts.emulated.hosts import Hosts
from workbench.model.tracing.trace import trace
from workbench.plan.collective.codec import Codec
from workbench.plan.experiment.experiment import (
    SGD,
    Data,
    Digits,
    Experiment,
    Pipelined,
    Sync,
    Synthetic,
)
from workbench.plan.plans.plan import Plan
from workbench.predict.closed_form import ONCE
from workbench.store.errors import RunError

if TYPE_CHECKING:
    import pandas

RATE = "150mbit"  # communication takes most of a synchronous step
CLASSES = 100
TOLERANCE = 0.005  # of accuracy, within which another one counts as reached
BOLD = 0.1  # a learning rate that synchronous steps bear on digits, at momentum 0.9
Q = Codec(name="int8")


@dataclass(frozen=True)
class Task:
    """A model, data and settings to learn with.

    Attributes:
        name: the name of the task.
        make: a function that builds the model.
        shape: the shape of one sample of its input.
        data: the data set.
        lr: the learning rate.
        momentum: the momentum of SGD.
        steps: the number of steps of a run.
        batch_size: the samples of a step over all ranks.
        warmup: the number of synchronous steps before pipelined ones.
        every: the number of steps between evaluations.
    """

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, int, int]
    data: Data
    lr: float
    steps: int
    momentum: float = 0.9
    batch_size: int = 128
    warmup: int = 20
    every: int = 10


TASKS = (
    Task("digits", mlp, DIGITS_SHAPE, Digits(), lr=0.02, steps=200),
    Task(
        "colors",
        partial(cnn, CLASSES),
        COLOR_SHAPE,
        Synthetic(samples=2000, classes=CLASSES),
        lr=0.05,
        steps=80,
        momentum=0.5,
    ),
)
QUICK_TASKS = (Task("digits", mlp, DIGITS_SHAPE, Digits(), lr=0.02, steps=30, warmup=5),)


@dataclass(frozen=True)
class Learnt:
    """One run: (seconds of training, accuracy) at each evaluation."""

    curve: tuple[tuple[float, float], ...]

    @property
    def accuracy(self) -> float:
        """The accuracy at the end; 0 for a run that diverged."""
        return self.curve[-1][1] if self.curve else 0.0

    def seconds_to(self, accuracy: float) -> float:
        """The seconds until this accuracy was first measured; infinite if never."""
        return next((s for s, reached in self.curve if reached >= accuracy), math.inf)


@dataclass(frozen=True)
class Found:
    """The rows and figures of all that was learnt so far."""

    rows: list[dict[str, Cell]]
    figures: dict[str, Figure]


def run(progress: Progress, tasks: Sequence[Task], seeds: int) -> Iterator[Found]:
    """Learns each task with each seed; the failure is shown on the first of the tasks."""
    rows: list[dict[str, Cell]] = []
    figures: dict[str, Figure] = {}
    pairs: dict[str, list[tuple[Learnt, Learnt]]] = {task.name: [] for task in tasks}
    with (
        Hosts(ENGINES, bandwidth=RATE, queue_limit_s=QUEUE_S) as hosts,
        Cluster(ENGINES, hosts=hosts, timeout=120.0) as cluster,
    ):
        # A seed of every task, then the next one: few seeds of all rather than all of one.
        for seed, task in progress.each("learning", [(s, t) for s in range(seeds) for t in tasks]):
            warm = _pipelined(task.warmup)
            pair = (
                _learn(cluster, task, ONCE, task.lr, seed),
                _learn(cluster, task, warm, task.lr, seed),
            )
            target = pair[0].accuracy - TOLERANCE
            rows += [
                _row(task, name, task.lr, seed, one, target)
                for name, one in zip(("D-Sync", _named(task.warmup)), pair, strict=True)
            ]
            pairs[task.name].append(pair)
            figures |= _figures(task.name, pairs[task.name])
            yield Found(rows, figures)
        for _ in progress.each("failure"):
            shown, failure = _failure(cluster, tasks[0])
            yield Found([*rows, *shown], figures | failure)


def _failure(cluster: Cluster, task: Task) -> tuple[list[dict[str, Cell]], dict[str, Figure]]:
    systems: dict[str, Sync] = {
        "D-Sync": ONCE,
        _named(0): _pipelined(0),
        _named(task.warmup): _pipelined(task.warmup),
    }
    found = {name: _learn(cluster, task, sync, BOLD, 0) for name, sync in systems.items()}
    sync, late, warm = (one.accuracy for one in found.values())
    rows = [_row(task, name, BOLD, 0, one, sync - TOLERANCE) for name, one in found.items()]
    return rows, {
        "lost_without_warmup": Figure.of([sync - late]),
        "lost_with_warmup_alone": Figure.of([sync - warm]),
    }


def _learn(cluster: Cluster, task: Task, sync: Sync, lr: float, seed: int) -> Learnt:
    module = task.make()
    graph = trace(module, input_shape=task.shape)
    experiment = Experiment(
        plan=Plan.data_parallel(graph, ENGINES),
        data=task.data,
        batch_size=task.batch_size,
        optimizer=SGD(lr=lr, momentum=task.momentum),
        steps=task.steps,
        sync=sync,
        seed=seed,
        evaluate_every=task.every,
    )
    training = cluster.train(experiment, module=module)
    try:
        training.wait()
    except RunError:  # a loss that is no number: what was measured before it stays
        return Learnt(())
    return Learnt(tuple(learning_curve(training)))


def learning_curve(training: Run) -> list[tuple[float, float]]:
    """(seconds spent in steps, accuracy) at each evaluation of a run."""
    steps: pandas.DataFrame = training.metrics
    spent = steps["compute_s"] + steps["communication_s"] + steps["wait_s"]
    each = spent.groupby(steps["step"]).max().cumsum()
    measured: Any = steps[steps["rank"] == 0].set_index("step")["accuracy"].dropna()
    return [(float(each[step]), float(accuracy)) for step, accuracy in measured.items()]


def _pipelined(warmup: int) -> Pipelined:
    return Pipelined(algorithm="ring", codec=Q, warmup=warmup, bucket_bytes=ONCE.bucket_bytes)


def _named(warmup: int) -> str:
    return f"Pipe-SGD Q, {f'warm-up {warmup}' if warmup else 'no warm-up'}"


def _row(
    task: Task, system: str, lr: float, seed: int, learnt: Learnt, target: float
) -> dict[str, Cell]:
    seconds = learnt.seconds_to(target)
    return {
        "task": task.name,
        "system": system,
        "lr": f"{lr:g}",
        "seed": seed,
        "accuracy": learnt.accuracy,
        "s in all": learnt.curve[-1][0] if learnt.curve else "diverged",
        "s to D-Sync's accuracy": seconds if math.isfinite(seconds) else "never",
    }


def _figures(task: str, pairs: list[tuple[Learnt, Learnt]]) -> dict[str, Figure]:
    """The figures over the seeds; the accuracy's difference is also that of the means."""
    apart = [100 * (pipe.accuracy - sync.accuracy) for sync, pipe in pairs]
    sooner = []
    for sync, pipe in pairs:
        target = sync.accuracy - TOLERANCE
        sooner.append(sync.seconds_to(target) / pipe.seconds_to(target))
    mean = statistics.mean(apart)
    return {
        f"accuracy_points_{task}": Figure(mean, min(apart), max(apart)),
        f"time_to_accuracy_{task}": Figure.of(sooner),
    }
