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

Then the same on links that are slow or late, where synchronisations count (`links.py`).

`bench hierarchical` measures the same over two emulated hosts of two engines each, with a link of
1 Gbit/s. In a group of ranks of several hosts, "workbench" and "bucket" are hierarchical: the ranks
of a host reduce through shared memory, and each sends its part over the link. Needs root on Linux.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from workbench.bench.collectives import links
from workbench.bench.collectives.timing import KIB, MIB, Seconds, experiment_of, named, timed
from workbench.bench.plot import Bar, Chart
from workbench.bench.progress import Part, Progress
from workbench.bench.report import Cell, Figure, Report
from workbench.client.cluster import Cluster
from workbench.comm.all_reduce import all_reduce, start_all_reduce
from workbench.comm.groups.group import Group
from workbench.comm.groups.world import RankConfig, World
from workbench.hosts.emulated.hosts import Hosts
from workbench.plan.collective.algorithm import Algorithm, AlgorithmName
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.extension.extension import name_of
from workbench.plan.extension.extension import named as extension_named

ENGINES = 4
NAMED: tuple[AlgorithmName, ...] = ("direct", "ring", "halving_doubling")
OURS = ("gloo", "workbench", "bucket", "over gloo")
# size in bytes: how often a system sums in one turn
QUICK = {KIB: 20, 64 * KIB: 20, MIB: 5, 4 * MIB: 2}
FULL = {KIB: 200, 4 * KIB: 200, 64 * KIB: 100, MIB: 20, 4 * MIB: 10, 64 * MIB: 2, 256 * MIB: 1}
QUICK_ON_HOSTS = {KIB: 20, 64 * KIB: 10, MIB: 2}
FULL_ON_HOSTS = {KIB: 100, 64 * KIB: 20, MIB: 5, 4 * MIB: 2, 16 * MIB: 1, 64 * MIB: 1}


def run(progress: Progress, *, quick: bool, algorithm: str | None = None) -> Iterator[Report]:
    """Measures seconds of one all-reduce; `quick` up to 4 MB, in fewer rounds.

    Args:
        progress: the progress of sizes, and of links.
        quick: whether it is short.
        algorithm: "module:attribute" or entry point of one more algorithm; None: there is none.
    """
    own = () if algorithm is None else (algorithm,)
    settings, turns = (links.QUICK, QUICK) if quick else (links.FULL, FULL)
    progress.begin(Part("sizes", len(turns), 30), Part("links", len(settings), 60))
    report, rounds = Report("collectives", (), {}), progress.fitting(3 if quick else 7)
    if progress.wants("sizes"):
        with Cluster(ENGINES, timeout=120.0) as cluster:
            for report in compare(cluster, progress, turns, rounds, own):
                yield report
    rounds = progress.fitting(2 if quick else 7)
    for each in progress.each("links", settings):
        found = links.run(each, rounds)
        report = replace(
            report,
            rows=(*report.rows, *found.rows),
            figures={**report.figures, **found.figures},
            notes=(*report.notes, *found.notes),
            engines=ENGINES,
        )
        yield report


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

    Args:
        cluster: the cluster whose engines communicate.
        progress: the progress of the part "sizes".
        turns: how often a system all-reduces in one turn, for each size in bytes.
        rounds: the number of turns that each system takes.
        own: algorithms of your own, "module:attribute" or entry points.
    """
    found: Seconds = {}
    for size in progress.each("sizes", turns):
        ranks: list[tuple[Seconds, str]] = cluster.call(
            "workbench.bench.collectives.collectives:measure",
            experiment_of(ENGINES),
            turns={size: turns[size]},
            rounds=rounds,
            own=tuple(own),
        )
        seconds, transport = ranks[0]
        found |= seconds
        yield _report(found, transport, rounds)


def measure(
    config: RankConfig,
    experiment: Experiment,
    *,
    weights: Path,
    turns: dict[int, int],
    rounds: int,
    own: Sequence[str] = (),
) -> tuple[Seconds, str]:
    """The seconds of one all-reduce on the slowest rank, for each size, system and round.

    Returns:
        The seconds, and the transport that the ranks communicate through.
    """
    with World.open(config) as world:
        spec = ("bench", tuple(range(world.size)))
        group = world.groups([spec])[spec]
        found: Seconds = {}
        for size, times in turns.items():
            systems = _systems(group, size // 4, own, world.device)
            found[size] = {name: [] for name in systems}
            for index in range(-1, rounds):
                for name in systems:
                    seconds = timed(systems[name], times, group, world.device)
                    if index >= 0:  # the first round warms up
                        found[size][name].append(seconds)
        return found, group.transport


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


def _report(found: Seconds, transport: str, rounds: int) -> Report:
    rows: list[dict[str, Cell]] = [
        {
            "size": named(size),
            "system": name,
            "ms": 1e3 * statistics.median(seconds),
            "min": 1e3 * min(seconds),
            "max": 1e3 * max(seconds),
        }
        for size, systems in found.items()
        for name, seconds in systems.items()
    ]
    figures = {}
    for size, systems in found.items():
        for figure, ours, theirs in (
            ("all_reduce_vs_gloo", "workbench", "gloo"),
            ("bucket_vs_gloo", "bucket", "gloo"),
            ("all_reduce_vs_over_gloo", "workbench", "over gloo"),
            *((f"{name}_over_gloo_vs_gloo", name, "gloo") for name in systems if name not in OURS),
        ):
            pairs = zip(systems[theirs], systems[ours], strict=True)
            figures[f"{figure}_{named(size)}"] = Figure.of([a / b for a, b in pairs])
    return Report(
        "collectives",
        tuple(rows),
        figures,
        (
            f"float32, {ENGINES} engines x 1 thread, through {transport}; milliseconds of the "
            f"slowest rank; {rounds} interleaved rounds: median, range. Figures: how many times "
            "as fast, a ratio for each round.",
            "gloo and bucket sum in place; the others return new memory, which has to be had.",
        ),
        (_chart(figures),),
        engines=ENGINES,
    )


def _chart(figures: Mapping[str, Figure]) -> Chart:
    bars = tuple(
        Bar(name, figure.median, figure.min, figure.max, name.startswith("bucket"))
        for name, figure in figures.items()
        if name.startswith(("all_reduce_vs_gloo_", "bucket_vs_gloo_"))
    )
    return Chart("times as fast as gloo's all-reduce", bars, target=1.0)
