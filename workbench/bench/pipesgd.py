"""Pipe-SGD on four emulated hosts with shaped links, one engine each. Needs root on Linux.

    headline    every system on a gradient of AlexNet's size, through links of 1 Gbit/s, interleaved
    sweep       what a pipeline gains over D-Sync, by r = l_comm / (l_up + l_comp)
    learning    seconds to the accuracy of synchronous steps
    failure     what is lost without warm-up

Systems:

    PS-Sync        gradients to one rank, weights back, during backward
    D-Sync         one ring all-reduce of the whole gradient after backward
    Pipe-SGD       the same, while the next step computes; with a codec in the ring
    torch DDP      buckets during backward; also with torch's hook that sends fp16
    compute        steps without exchange: l_up + l_comp
    exchange       nothing but the all-reduce: l_comm

In the sweep, the links' bandwidth is chosen for each r from constants that are measured first, and
the gain of a round is compared with the bound by that round's own r.

Learning is D-Sync against Pipe-SGD with Q and a synchronous warm-up, at a learning rate that is
stable for both, on scikit-learn's digits (an MLP) and on synthetic color images of many classes (a
small CNN). The failure is momentum 0.9 at a rate that is stable for synchronous steps, where a
gradient that is one step late has the limit lr h < 1 - m instead of 2 (1 + m); and how far warm-up
helps.

Source: Pipe-SGD (Li et al. 2018, arXiv:1811.03619). Its headline, up to 5.4 times, is taken to be
against a parameter server, since no other comparison in the paper could give it.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from workbench.bench.collectives import timed
from workbench.bench.harness.match import Seen, Turn, take_turns
from workbench.bench.harness.nets import COLOR_SHAPE, DIGITS_SHAPE, INPUT_SHAPE, SmallVGG, cnn, mlp
from workbench.bench.harness.progress import Part, Progress
from workbench.bench.harness.report import Figure, Report, Row
from workbench.client.cluster import Cluster
from workbench.client.run.run import Run
from workbench.comm.all_reduce import start_all_reduce
from workbench.comm.groups.group import Group
from workbench.comm.groups.world import RankConfig, World
from workbench.hosts.emulated.hosts import Hosts
from workbench.model.tracing.trace import trace
from workbench.plan.collective.algorithm import AlgorithmName
from workbench.plan.collective.codec import Codec, CodecName
from workbench.plan.experiment.experiment import (
    SGD,
    Data,
    Digits,
    Experiment,
    LocalSGD,
    ParameterServer,
    Pipelined,
    Sync,
    Synchronous,
    Synthetic,
)
from workbench.plan.plans.plan import Plan
from workbench.predict.closed_form import (
    ONCE,
    Compute,
    Fit,
    Measurement,
    TimingModel,
    fit,
    gain_bound,
)
from workbench.store.errors import RunError

ENGINES = 4
QUEUE_S = 0.01  # of a link: so long does a small message wait behind gradients at most


@dataclass
class _Results:
    """The rows, figures and notes so far."""

    rows: dict[str, list[Row]] = field(default_factory=dict)
    figures: dict[str, Figure] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def report(self) -> Report:
        """The report of all results so far."""
        note = (
            f"4 hosts x 1 engine x 1 thread; links with a queue of {1e3 * QUEUE_S:g} ms. "
            "Medians and ranges of interleaved rounds, a ratio for each round; every system is "
            "built anew for its turn, and its first steps are not timed."
        )
        rows = tuple(row for part in self.rows.values() for row in part)
        notes = (note, *self.notes.values())
        return Report("pipesgd", rows, self.figures, notes, engines=ENGINES)


def run(progress: Progress, *, quick: bool) -> Iterator[Report]:
    """Measures all parts; `quick` with small models, one r, one round and one seed."""
    headline, sweep = (QUICK_HEADLINE, QUICK_SWEEP) if quick else (Headline(), Sweep())
    tasks, seeds = (QUICK_TASKS, 1) if quick else (TASKS, 3)
    progress.begin(
        Part("headline", headline.rounds, 20 if quick else 90),
        Part("sweep", len(sweep.ratios), 30 if quick else 90),
        Part("learning", len(tasks) * seeds, 20 if quick else 60),
        Part("failure", 1, 20 if quick else 60),
    )
    results = _Results()
    if progress.wants("headline"):
        yield from _headline(progress, headline, results)
    if progress.wants("sweep"):
        yield from _sweep(progress, sweep, results)
    if any(map(progress.wants, ("learning", "failure"))):
        yield from _learning(progress, tasks, seeds, results)


def _hosts(rate: float | str) -> Hosts:
    return Hosts(ENGINES, bandwidth=rate, queue_limit_s=QUEUE_S)


CODECS: dict[CodecName, str] = {
    "fp16": "Pipe-SGD fp16",
    "bf16_truncated": "Pipe-SGD T",
    "int8": "Pipe-SGD Q",
}
"""The system with each codec; T and Q are the paper's."""

COMPUTE = Turn("compute", LocalSGD(every=10**6), warm=1, steps=3)


def _coded(codec: CodecName) -> Synchronous:
    """D-Sync's exchange through a codec."""
    return Synchronous(algorithm="ring", bucket_bytes=ONCE.bucket_bytes, codec=Codec(name=codec))


def _piped(codec: CodecName, steps: int = 2) -> Turn:
    sync = Pipelined(algorithm="ring", codec=Codec(name=codec))
    return Turn(CODECS[codec], sync, warm=2, steps=steps)


SYSTEMS = (
    Turn("compute", COMPUTE.runs, warm=1, steps=2),
    Turn("exchange", ONCE, warm=0, steps=1, alone=True),
    *(Turn(f"exchange, {codec}", _coded(codec), 1, 1, alone=True) for codec in CODECS),
    Turn("PS-Sync", ParameterServer(), warm=1, steps=1),
    Turn("D-Sync", ONCE, warm=1, steps=1),
    Turn("Pipe-SGD", Pipelined(algorithm="ring"), warm=2, steps=2),
    _piped("fp16"),
    _piped("bf16_truncated"),
    _piped("int8", steps=4),
    Turn("torch DDP", "rival ddp 25", warm=2, steps=1),
    Turn("torch DDP + fp16", "rival ddp 25 fp16", warm=2, steps=1),
)
RATIOS = {  # figure: (the slower, the faster)
    "pipe_vs_dsync": ("D-Sync", "Pipe-SGD"),
    "pipe_int8_vs_ps_sync": ("PS-Sync", "Pipe-SGD Q"),
    "pipe_int8_vs_dsync": ("D-Sync", "Pipe-SGD Q"),
    "pipe_vs_torch_ddp": ("torch DDP", "Pipe-SGD"),
    "pipe_vs_torch_ddp_fp16": ("torch DDP + fp16", "Pipe-SGD"),
    "pipe_fp16_vs_torch_ddp_fp16": ("torch DDP + fp16", "Pipe-SGD fp16"),
    "pipe_int8_vs_torch_ddp": ("torch DDP", "Pipe-SGD Q"),
    "pipe_int8_vs_torch_ddp_fp16": ("torch DDP + fp16", "Pipe-SGD Q"),
}


@dataclass(frozen=True)
class Headline:
    """The settings of the comparison, of AlexNet or a small VGG; the rate is in bytes/s.

    One sample is as small as the model permits, so that one core computes a step quickly.
    """

    small: bool = False
    input_shape: tuple[int, int, int] = (3, 63, 63)
    rate: float = 125e6
    rounds: int = 5
    rows: int = 4


QUICK_HEADLINE = Headline(True, INPUT_SHAPE, rate=12.5e6, rounds=1)


def _headline(progress: Progress, headline: Headline, results: _Results) -> Iterator[Report]:
    """Measures the seconds of a step of each system, and its bytes and coding time, in rounds."""
    module, classes = (SmallVGG(width=16), 10) if headline.small else (None, 1000)
    graph = trace(module or "alexnet", input_shape=headline.input_shape, num_classes=classes)
    experiment = Experiment(
        plan=Plan.data_parallel(graph, ENGINES),
        data=Synthetic(samples=64, classes=classes),
        batch_size=ENGINES * headline.rows,
        optimizer=SGD(lr=0.01, momentum=0.9),
        steps=1,
    )
    results.notes["headline"] = (
        f"Headline: {graph.source.name}, {graph.parameters:,} parameters, links of "
        f"{8 * headline.rate / 1e6:g} Mbit/s, {headline.rows} rows per rank. Coding: "
        "what encoding, decoding and adding take beyond adding alone, over the plain "
        "exchange."
    )
    with (
        _hosts(headline.rate) as hosts,
        Cluster(ENGINES, hosts=hosts, timeout=300.0) as cluster,
    ):
        ranks: list[dict[str, Seen]] = []
        for _ in progress.each("headline"):
            newest = take_turns(cluster, experiment, module, SYSTEMS, 1)
            for before, now in zip(ranks, newest, strict=False):  # none before the first
                for name, seen in now.items():
                    seen.seconds[:0] = before[name].seconds
            ranks = newest
            results.rows["headline"] = _headline_rows(ranks)
            results.figures |= _headline_figures(ranks)
            yield results.report()


def _headline_rows(ranks: list[dict[str, Seen]]) -> list[Row]:
    return [
        {
            "system": name,
            "s of a step": statistics.median(one.seconds),
            "min": min(one.seconds),
            "max": max(one.seconds),
            "MB received, most": max(rank[name].received for rank in ranks) / 1e6,
            "coding, s": max(rank[name].coding_s() for rank in ranks),
        }
        for name, one in ranks[0].items()
    ]


def _headline_figures(ranks: list[dict[str, Seen]]) -> dict[str, Figure]:
    seen = ranks[0]
    figures = {
        name: Figure.ratio(seen[slower].seconds, seen[faster].seconds)
        for name, (slower, faster) in RATIOS.items()
    }
    plain = sum(rank["exchange"].received for rank in ranks)
    for codec in CODECS:
        name = f"exchange, {codec}"
        share = sum(rank[name].received for rank in ranks) / plain
        figures[f"bytes_{codec}_vs_fp32"] = Figure.of([share])
        coding = max(rank[name].coding_s() for rank in ranks) - seen["exchange"].coding_s()
        shares = [coding / seconds for seconds in seen["exchange"].seconds]
        figures[f"coding_{codec}_vs_exchange"] = Figure.of(shares)
    return figures


FIRST_RATE = 25e6  # bytes/s
SIZES, TIMES = (2**12, 2**17, 2**19, 2**20, 2**21), 3  # of exchanges, in bytes
ADDED, ADDITIONS = 2**20, 8  # elements
EXCHANGE = Turn("exchange", ONCE, warm=1, steps=2, alone=True)
D_SYNC = Turn("D-Sync", ONCE, warm=1, steps=2)


@dataclass(frozen=True)
class Sweep:
    """The settings of the sweep: the values of r, and the one at which pipelines are wider, too.

    Rows of a rank and the `SmallVGG`'s width determine the compute time.
    """

    ratios: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
    wide_at: float = 1.0
    rounds: int = 5
    rows: int = 96
    width: int = 16


QUICK_SWEEP = Sweep(ratios=(1.0,), rounds=1, rows=16, width=8)


def _sweep(progress: Progress, sweep: Sweep, results: _Results) -> Iterator[Report]:
    """Measures constants and compute, then every r on hosts with the link for it."""
    module = SmallVGG(width=sweep.width)
    experiment = Experiment(
        plan=Plan.data_parallel(trace(module, input_shape=INPUT_SHAPE), ENGINES),
        data=Synthetic(samples=512),
        batch_size=ENGINES * sweep.rows,
        optimizer=SGD(lr=0.01, momentum=0.9),
        steps=1,
    )
    with _hosts(FIRST_RATE) as hosts, Cluster(ENGINES, hosts=hosts, timeout=120.0) as cluster:
        constants = constants_of(cluster, experiment, module)
        ranks = take_turns(cluster, experiment, module, (COMPUTE,), 2)
    compute_s = statistics.median(ranks[0]["compute"].seconds)
    model = TimingModel(
        ENGINES,
        4 * experiment.plan.graph.parameters,
        Compute(update_s=0.0, forward_s=0.0, backward_s=compute_s),
        constants.network,
    )
    results.notes["sweep"] = (
        f"Sweep: rates chosen by {constants!r}. pipe_vs_dsync beside the bound "
        "(1+r)/max(1,r) of the r measured in the same round; iterations beside "
        "max(l_up + l_comp, l_comm)."
    )
    payload = constants.network.bandwidth / FIRST_RATE  # headers take the rest
    rows = results.rows.setdefault("sweep", [])
    for r in progress.each("sweep", sweep.ratios):
        rate = model.bandwidth_for(r) / payload
        pipes = [
            Turn(f"Pipe-SGD, K={width}", Pipelined(width=width, algorithm="ring"), width, 3)
            for width in ((2, 3, 4) if r == sweep.wide_at else (2,))
        ]
        rounds, turns = progress.fitting(sweep.rounds, 1), (COMPUTE, EXCHANGE, D_SYNC, *pipes)
        with _hosts(rate) as hosts, Cluster(ENGINES, hosts=hosts, timeout=120.0) as cluster:
            ranks = take_turns(cluster, experiment, module, turns, rounds)
        seconds = {name: seen.seconds for name, seen in ranks[0].items()}
        rows += _sweep_rows(r, rate, seconds)
        results.figures |= _sweep_figures(r, seconds)
        yield results.report()


def constants_of(cluster: Cluster, experiment: Experiment, module: nn.Module) -> Fit:
    """α, β and S of a cluster's links from exchanges of several sizes, γ from additions."""
    ranks = cluster.call(f"{__name__}:measure_exchanges", experiment, module=module)
    return fit(ranks[0][0], held={"reduction_s_per_byte": max(gamma for _, gamma in ranks)})


def measure_exchanges(
    config: RankConfig, experiment: Experiment, *, weights: Path
) -> tuple[list[Measurement], float]:
    """On an engine: exchanges by ring and direct, and the seconds of adding a byte (γ)."""
    names: tuple[AlgorithmName, ...] = ("ring", "direct")
    with World.open(config) as world:
        spec, host = ("bench", tuple(range(world.size))), torch.device("cpu")
        group, exchanges = world.groups([spec])[spec], list[Measurement]()
        for _ in range(TIMES + 1):  # the first turn connects
            for size, name in product(SIZES, names):
                flat = torch.zeros(size // 4)
                seconds = timed(partial(_sum, flat, group, name), 1, group, host)
                exchanges.append(Measurement(group.size, size, seconds, name))
    a, b = torch.ones(ADDED), torch.ones(ADDED)
    a += b
    began = time.perf_counter()
    for _ in range(ADDITIONS):
        a += b
    gamma = (time.perf_counter() - began) / (ADDITIONS * a.nbytes)
    return exchanges[len(SIZES) * len(names) :], gamma


def _sum(flat: torch.Tensor, group: Group, algorithm: AlgorithmName) -> None:
    start_all_reduce(flat, group, algorithm=algorithm).wait()


def _sweep_rows(r: float, rate: float, seconds_of: dict[str, list[float]]) -> list[Row]:
    compute, exchange = (statistics.median(seconds_of[name]) for name in ("compute", "exchange"))
    models = {"compute": compute, "exchange": exchange, "D-Sync": compute + exchange}
    return [
        {
            "r": f"{r:g}",
            "link, Mbit/s": 8 * rate / 1e6,
            "system": name,
            "ms of a step": 1e3 * statistics.median(seconds),
            "min": 1e3 * min(seconds),
            "max": 1e3 * max(seconds),
            "model": 1e3 * models.get(name, max(compute, exchange)),
        }
        for name, seconds in seconds_of.items()
    ]


def _sweep_figures(r: float, seconds: dict[str, list[float]]) -> dict[str, Figure]:
    """Ratios of one round each; gains also over the bound by that round's own r."""
    compute, exchange, pipe = (seconds[n] for n in ("compute", "exchange", "Pipe-SGD, K=2"))
    ratios = [b / a for a, b in zip(compute, exchange, strict=True)]
    gains = [a / b for a, b in zip(seconds["D-Sync"], pipe, strict=True)]
    figures = {
        f"r_measured_{r:g}": Figure.of(ratios),
        f"pipe_vs_dsync_r{r:g}": Figure.of(gains),
        f"gain_vs_bound_r{r:g}": Figure.ratio(gains, [gain_bound(each) for each in ratios]),
        f"iteration_vs_model_r{r:g}": Figure.ratio(pipe, list(map(max, compute, exchange))),
    }
    for width in (3, 4):
        if (wide := seconds.get(f"Pipe-SGD, K={width}")) is not None:
            figures[f"width{width}_vs_width2"] = Figure.ratio(pipe, wide)
    return figures


RATE = "150mbit"  # communication takes most of a synchronous step
CLASSES = 100
TOLERANCE = 0.005  # of accuracy, within which another one counts as reached
BOLD = 0.1  # a learning rate that synchronous steps bear on digits, at momentum 0.9
Q = Codec(name="int8")


@dataclass(frozen=True)
class Task:
    """A model, data and settings to learn with; evaluated `every` few steps."""

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


def _learning(
    progress: Progress, tasks: Sequence[Task], seeds: int, results: _Results
) -> Iterator[Report]:
    """Learns each task with each seed; the failure is shown on the first of the tasks."""
    rows = results.rows.setdefault("learning", [])
    pairs: dict[str, list[tuple[Learnt, Learnt]]] = {task.name: [] for task in tasks}
    results.notes["learning"] = (
        "Learning: accuracy_points is the mean difference over seeds; time_to_accuracy the "
        "ratio of seconds in steps until D-Sync's last accuracy less 0.5 points."
    )
    with _hosts(RATE) as hosts, Cluster(ENGINES, hosts=hosts, timeout=120.0) as cluster:
        # A seed of every task, then the next one: few seeds of all rather than all of one.
        for seed, task in progress.each("learning", [(s, t) for s in range(seeds) for t in tasks]):
            systems = {"D-Sync": ONCE, _named(task.warmup): _pipelined(task.warmup)}
            learnt = {n: _learn(cluster, task, sync, task.lr, seed) for n, sync in systems.items()}
            rows += _learning_rows(task, task.lr, seed, learnt)
            sync, pipe = learnt.values()
            pairs[task.name].append((sync, pipe))
            results.figures |= _learning_figures(task.name, pairs[task.name])
            yield results.report()
        for _ in progress.each("failure"):
            task = tasks[0]
            systems = {"D-Sync": ONCE} | {_named(w): _pipelined(w) for w in (0, task.warmup)}
            learnt = {n: _learn(cluster, task, sync, BOLD, 0) for n, sync in systems.items()}
            rows += _learning_rows(task, BOLD, 0, learnt)
            synchronous, late, warm = (one.accuracy for one in learnt.values())
            results.figures |= {
                "lost_without_warmup": Figure.of([synchronous - late]),
                "lost_with_warmup_alone": Figure.of([synchronous - warm]),
            }
            yield results.report()


def _pipelined(warmup: int) -> Sync:
    return Pipelined(algorithm="ring", codec=Q, warmup=warmup, bucket_bytes=ONCE.bucket_bytes)


def _named(warmup: int) -> str:
    return f"Pipe-SGD Q, {f'warm-up {warmup}' if warmup else 'no warm-up'}"


def _learn(cluster: Cluster, task: Task, sync: Sync, lr: float, seed: int) -> Learnt:
    module = task.make()
    experiment = Experiment(
        plan=Plan.data_parallel(trace(module, input_shape=task.shape), ENGINES),
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
    except RunError:  # a non-finite loss: what was measured before it stays
        return Learnt(())
    return Learnt(tuple(_learning_curve(training)))


def _learning_curve(training: Run) -> list[tuple[float, float]]:
    """(seconds spent in steps, accuracy) at each evaluation of a run."""
    steps: Any = training.metrics
    spent = steps["compute_s"] + steps["communication_s"] + steps["wait_s"]
    each = spent.groupby(steps["step"]).max().cumsum()
    measured = steps[steps["rank"] == 0].set_index("step")["accuracy"].dropna()
    return [(float(each[step]), float(accuracy)) for step, accuracy in measured.items()]


def _learning_rows(task: Task, lr: float, seed: int, learnt: Mapping[str, Learnt]) -> list[Row]:
    target = learnt["D-Sync"].accuracy - TOLERANCE
    seconds = {name: one.seconds_to(target) for name, one in learnt.items()}
    return [
        {
            "task": task.name,
            "system": name,
            "lr": f"{lr:g}",
            "seed": seed,
            "accuracy": one.accuracy,
            "s in all": one.curve[-1][0] if one.curve else "diverged",
            "s to D-Sync's accuracy": s if math.isfinite(s := seconds[name]) else "never",
        }
        for name, one in learnt.items()
    ]


def _learning_figures(task: str, pairs: list[tuple[Learnt, Learnt]]) -> dict[str, Figure]:
    """The figures over the seeds; the accuracy's difference is also the means' difference."""
    points = [100 * (pipe.accuracy - sync.accuracy) for sync, pipe in pairs]
    sooner = []
    for sync, pipe in pairs:
        target = sync.accuracy - TOLERANCE
        sooner.append(sync.seconds_to(target) / pipe.seconds_to(target))
    return {
        f"accuracy_points_{task}": Figure(statistics.mean(points), min(points), max(points)),
        f"time_to_accuracy_{task}": Figure.of(sooner),
    }
