"""The workbench's all-reduce against gloo's own: with shared memory, and by each algorithm.

    gloo                torch.distributed.all_reduce, in place
    workbench           all_reduce, out of place: through shared memory on one host, hierarchical
                        on several
    bucket              start_all_reduce and wait on a buffer of the group, in place
    over gloo           all_reduce as it is where no ranks share memory, out of place
    direct, ring,
    halving_doubling    the same by that algorithm, and by one of your own (--algorithm)

Four engines of one thread each, all in one run, interleaved: in every round each system takes its
turn at each size. A round's figure is a ratio of two times of that round. Where there is one GPU,
they share it, and sum tensors there: the workbench in its memory, gloo through the host.

`bench hierarchical` measures the same over two emulated hosts of two engines each, with a link of
1 Gbit/s. In a group of ranks of several hosts, "workbench" and "bucket" are hierarchical: the ranks
of a host reduce through shared memory, and each sends its part over the link. Needs root on Linux.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from workbench.bench.harness.match import slowest
from workbench.bench.harness.progress import Part, Progress
from workbench.bench.harness.report import Cell, Figure, Report
from workbench.client.cluster import Cluster
from workbench.comm.all_reduce import all_reduce, start_all_reduce
from workbench.comm.groups.group import Group
from workbench.comm.groups.world import RankConfig, World
from workbench.hosts.emulated.hosts import Hosts
from workbench.model.tracing.trace import trace
from workbench.plan.collective.algorithm import Algorithm, AlgorithmName
from workbench.plan.experiment.experiment import SGD, Experiment, Synthetic
from workbench.plan.extension.extension import name_of
from workbench.plan.extension.extension import named as extension_named
from workbench.plan.plans.plan import Plan
from workbench.train.measure.repeating import finish

ENGINES = 4
KIB, MIB = 2**10, 2**20
NAMED: tuple[AlgorithmName, ...] = ("direct", "ring", "halving_doubling")
OURS = ("gloo", "workbench", "bucket", "over gloo")
# size in bytes: how often a system sums in one turn
QUICK = {KIB: 20, 64 * KIB: 20, MIB: 5, 4 * MIB: 2}
FULL = {KIB: 200, 4 * KIB: 200, 64 * KIB: 100, MIB: 20, 4 * MIB: 10, 64 * MIB: 2, 256 * MIB: 1}
QUICK_ON_HOSTS = {KIB: 20, 64 * KIB: 10, MIB: 2}
FULL_ON_HOSTS = {KIB: 100, 64 * KIB: 20, MIB: 5, 4 * MIB: 2, 16 * MIB: 1, 64 * MIB: 1}

Seconds = dict[int, dict[str, list[float]]]
"""The seconds of each round, for each size in bytes and system."""


def run(progress: Progress, *, quick: bool, algorithm: str | None = None) -> Iterator[Report]:
    """Measures seconds of one all-reduce; `quick` up to 4 MB, in fewer rounds.

    `algorithm` is "module:attribute" or the entry point of one more.
    """
    own = () if algorithm is None else (algorithm,)
    turns = QUICK if quick else FULL
    progress.begin(Part("sizes", len(turns), 30))
    with Cluster(ENGINES, timeout=120.0) as cluster:
        yield from compare(cluster, progress, turns, progress.fitting(3 if quick else 7), own)


def run_on_hosts(progress: Progress, *, quick: bool) -> Iterator[Report]:
    """Measures seconds of one all-reduce over two hosts; `quick` up to 1 MB, in fewer rounds."""
    turns = QUICK_ON_HOSTS if quick else FULL_ON_HOSTS
    progress.begin(Part("sizes", len(turns), 40))
    rounds = progress.fitting(2 if quick else 7)
    with (
        Hosts(2, bandwidth="1gbit") as hosts,
        Cluster(ENGINES, hosts=hosts, timeout=120.0) as cluster,
    ):
        measured = hosts.measure()
        carried = ", ".join(f"{8 * each / 1e9:.2f}" for each in measured.bandwidths)
        note = (
            f"2 hosts x 2 engines on links of 1 Gbit/s; they carried {carried} Gbit/s of payload."
        )
        for report in compare(cluster, progress, turns, rounds):
            yield replace(report, bench="hierarchical", notes=(*report.notes, note))


def compare(
    cluster: Cluster,
    progress: Progress,
    turns: Mapping[int, int],
    rounds: int,
    own: Sequence[str] = (),
) -> Iterator[Report]:
    """Measures all-reduces on a cluster of four engines, which may be on several hosts.

    `turns` has for each size in bytes how often a system all-reduces in one turn.
    """
    seconds: Seconds = {}
    for size in progress.each("sizes", turns):
        ranks: list[tuple[Seconds, str]] = cluster.call(
            f"{__name__}:measure",
            _experiment(ENGINES),
            turns={size: turns[size]},
            rounds=rounds,
            own=tuple(own),
        )
        of_size, transport = ranks[0]
        seconds |= of_size
        yield _report(seconds, transport, rounds)


def _experiment(engines: int) -> Experiment:
    """An experiment for engines that only communicate: only its world size matters."""
    return Experiment(
        plan=Plan.data_parallel(trace(nn.Linear(1, 1), input_shape=(1,)), engines),
        data=Synthetic(samples=64),
        batch_size=engines,
        optimizer=SGD(lr=0.01),
        steps=1,
    )


def measure(
    config: RankConfig,
    experiment: Experiment,
    *,
    weights: Path,
    turns: dict[int, int],
    rounds: int,
    own: Sequence[str] = (),
) -> tuple[Seconds, str]:
    """On an engine: the seconds of one all-reduce on the slowest rank, and the transport."""
    with World.open(config) as world:
        spec, seconds = ("bench", tuple(range(world.size))), Seconds()
        group = world.groups([spec])[spec]
        for size, times in turns.items():
            systems = _systems(group, size // 4, own, world.device)
            taken: dict[str, list[float]] = {name: [] for name in systems}
            for _ in range(rounds + 1):  # the first round warms up
                for name, system in systems.items():
                    taken[name].append(timed(system, times, group, world.device))
            seconds[size] = {name: each[1:] for name, each in taken.items()}
        return seconds, group.transport


def _systems(
    group: Group, numel: int, own: Sequence[str], device: torch.device
) -> dict[str, Callable[[], object]]:
    assert group.link is not None
    apart = tuple((rank,) for rank in range(group.size))
    link = replace(group.link, hosts=apart, local=None)
    gloo = Group("over gloo", group.ranks, group.rank, group.recorder, link)
    x = torch.zeros(numel, device=device)  # sums of zeros stay small, however often they are taken
    flat = group.buffer(numel, x)
    algorithms = [
        cast(Algorithm, extension_named(name, "algorithms", NAMED)) for name in (*NAMED, *own)
    ]
    return {
        "gloo": lambda: dist.all_reduce(x, group=link.process_group),
        "workbench": lambda: all_reduce(x, group),
        "bucket": lambda: start_all_reduce(flat, group).wait(),
        "over gloo": lambda: all_reduce(x, gloo),
        **{name_of(one): partial(all_reduce, x, gloo, algorithm=one) for one in algorithms},
    }


def timed(system: Callable[[], object], times: int, group: Group, device: torch.device) -> float:
    """Seconds of one of `times` calls on the slowest rank; all ranks start together."""
    finish(device)
    slowest(0.0, group)
    began = time.perf_counter()
    for _ in range(times):
        system()
    finish(device)
    return slowest((time.perf_counter() - began) / times, group)


def named(size: int) -> str:
    """A size in bytes as text, such as "64KB"."""
    return f"{size // MIB}MB" if size >= MIB else f"{size // KIB}KB"


def _report(seconds: Seconds, transport: str, rounds: int) -> Report:
    rows: list[dict[str, Cell]] = [
        {
            "size": named(size),
            "system": name,
            "ms": 1e3 * statistics.median(taken),
            "min": 1e3 * min(taken),
            "max": 1e3 * max(taken),
        }
        for size, systems in seconds.items()
        for name, taken in systems.items()
    ]
    figures = {}
    for size, systems in seconds.items():
        for figure, ours, theirs in (
            ("all_reduce_vs_gloo", "workbench", "gloo"),
            ("bucket_vs_gloo", "bucket", "gloo"),
            ("all_reduce_vs_over_gloo", "workbench", "over gloo"),
            *((f"{name}_over_gloo_vs_gloo", name, "gloo") for name in systems if name not in OURS),
        ):
            figures[f"{figure}_{named(size)}"] = Figure.ratio(systems[theirs], systems[ours])
    notes = (
        f"float32, {ENGINES} engines x 1 thread, through {transport}; milliseconds of the "
        f"slowest rank; {rounds} interleaved rounds: median, range. Figures: how many times "
        "as fast, a ratio for each round.",
        "gloo and bucket sum in place; the others return new memory, which has to be had.",
    )
    return Report("collectives", tuple(rows), figures, notes, engines=ENGINES)
