"""VGG with its classifier sharded over engines, against the systems that one would use instead.

    workbench             convolutions replicated, linear layers cut over the group
    torch DDP             the best of several bucket sizes
    torch FSDP2           the better of keeping and gathering again
    DeepSpeed             ZeRO, the best of stages 1, 2 and 3, where it is installed
    torch DDP x TP        DTensor's tensor parallelism for the same linear layers, the best mesh
    one process           as many threads as there are engines, the same global batch
    one engine            one thread, a rank's part of the batch
    independent trainers  a whole model on each engine, no communication

Systems that are compared run interleaved on the same engines: each round has some steps of every
system. Not all of them fit into memory at once, so there are several such runs, and the workbench
is in each. A second part has the workbench alone on fewer engines and other groups. A third
computes, from plans alone, what sharding saves in groups of up to 32.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from workbench.bench.nets import INPUT_SHAPE, SmallVGG
from workbench.bench.plot import Bar, Chart
from workbench.bench.report import Cell, Figure, Report
from workbench.bench.rivals.interleaved import Measured
from workbench.bench.rivals.rivals import ZERO_MISSING, zero_is_installed
from workbench.bench.rivals.savings import figures_of, savings
from workbench.client.cluster import Cluster
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import SGD, Experiment, Synthetic
from workbench.plan.graph import Graph
from workbench.plan.plan import Plan

ENGINES = 4
MIB = 2**20
RIVALS = (
    (("ddp 1", "ddp 5", "ddp 25", "ddp 100"), ("alone",)),
    (("fsdp keep", "fsdp reshard"), ("tensor-parallel 2", "tensor-parallel 4")),
    (("independent",),),
)
ZERO = ("deepspeed 1", "deepspeed 2", "deepspeed 3")
QUICK_RIVALS = ((("ddp 25",), ("alone",), ("fsdp keep",), ("tensor-parallel 2",)),)
PEERS = (
    "throughput_vs_ddp",
    "throughput_vs_torch_fsdp2",
    "throughput_vs_torch_ddp_tp",
    "throughput_vs_deepspeed",
)
GRID = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4))

Samples = dict[str, list[float]]


@dataclass(frozen=True)
class Turns:
    """The amount of work of every system: rounds, steps of a round, and rows of a rank."""

    rounds: int
    steps: int
    rows: int


FULL, OF_THE_GRID, QUICK = Turns(7, 3, 32), Turns(3, 3, 32), Turns(2, 1, 8)


@dataclass(frozen=True)
class Model:
    """A model to train: a graph, and its module unless it is torchvision's."""

    graph: Graph
    module: nn.Module | None = None


def run(*, quick: bool) -> Report:
    """Measures throughput and peak memory; `quick` takes a small VGG, few rows, and no grid."""
    turns = QUICK if quick else FULL
    model = _model("small" if quick else "vgg11")
    rows: list[dict[str, Cell]] = []
    figures: dict[str, Figure] = {}
    with Cluster(ENGINES, timeout=300.0) as cluster:
        for rivals in _rivals(quick):
            found = _measure(cluster, model, ENGINES, ENGINES, rivals, turns)
            rows += _rows(model.graph, ENGINES, ENGINES, found)
            figures |= _figures(found)
        if not quick:
            for name in ("vgg11", "vgg16", "small"):
                rows += _grid(cluster, _model(name))
    peers = [figures[name] for name in PEERS if name in figures]
    figures["throughput_vs_best_peer"] = min(peers, key=lambda figure: figure.median)
    charts, notes = _charts(rows, figures), _notes(model.graph, turns)
    if not zero_is_installed():
        notes = (*notes, ZERO_MISSING)
    saved = savings(quick=quick)
    return Report("splitbrain", (*rows, *saved), figures | figures_of(saved), notes, charts)


def _rivals(quick: bool) -> tuple[tuple[tuple[str, ...], ...], ...]:
    every: tuple[tuple[tuple[str, ...], ...], ...] = QUICK_RIVALS if quick else RIVALS
    return (*every, (ZERO,)) if zero_is_installed() else every


def _model(name: str) -> Model:
    if name == "small":
        module = SmallVGG()
        return Model(trace(module, input_shape=INPUT_SHAPE), module)
    return Model(trace(name, input_shape=INPUT_SHAPE, num_classes=10))


def _measure(
    cluster: Cluster,
    model: Model,
    ranks: int,
    group_size: int,
    rivals: Sequence[Sequence[str]],
    turns: Turns,
) -> list[Measured]:
    experiment = Experiment(
        plan=Plan.hybrid(model.graph, ranks, group_size),
        data=Synthetic(samples=2048),
        batch_size=turns.rows * ranks,
        optimizer=SGD(lr=0.01, momentum=0.9),
        steps=1,
    )
    found: list[Measured] = cluster.call(
        "workbench.bench.rivals.interleaved:measure",
        experiment,
        module=model.module,
        rounds=turns.rounds,
        steps=turns.steps,
        rivals=rivals,
    )
    return found


def _grid(cluster: Cluster, model: Model) -> list[dict[str, Cell]]:
    rows = []
    for ranks, group_size in GRID:
        found = _measure(cluster, model, ranks, group_size, (), OF_THE_GRID)
        rows += _rows(model.graph, ranks, group_size, found)
    return rows


def _speeds(found: list[Measured]) -> Samples:
    first = found[0]
    return {
        name: [first.samples[name] / seconds for seconds in first.seconds[name]]
        for name in first.samples
    }


def _peak(found: list[Measured], name: str) -> int:
    return max(rank.peak_bytes[name] for rank in found)


def _rows(graph: Graph, ranks: int, k: int, found: list[Measured]) -> list[dict[str, Cell]]:
    return [
        {
            "system": name,
            "model": graph.source.name,
            "engines": ranks,
            "group": k if name == "workbench" else "",
            "samples/s": statistics.median(values),
            "min": min(values),
            "max": max(values),
            "peak MiB per rank": _peak(found, name) / MIB,
            "loss": sum(rank.losses.get(name, 0.0) for rank in found),
        }
        for name, values in _speeds(found).items()
    ]


def _figures(found: list[Measured]) -> dict[str, Figure]:
    """Ratios of the workbench to every system that it ran with."""
    speeds = _speeds(found)
    figures = {}
    for name, theirs in speeds.items():
        if name == "workbench":
            continue
        ratios = [a / b for a, b in zip(speeds["workbench"], theirs, strict=True)]
        figures[_figure(name)] = Figure.of(ratios)
        if name.startswith("torch DDP,"):
            share = _peak(found, "workbench") / _peak(found, name)
            figures["peak_bytes_vs_ddp"] = Figure(share, share, share)
    return figures


def _figure(rival: str) -> str:
    named = {
        "one engine": "speedup_over_one_engine",
        "one process": "throughput_vs_one_process",
        "independent trainers": "throughput_vs_independent",
        "DeepSpeed": "throughput_vs_deepspeed",
        "torch FSDP2": "throughput_vs_torch_fsdp2",
        "torch DDP x TP": "throughput_vs_torch_ddp_tp",
        "torch DDP": "throughput_vs_ddp",
    }
    return next(figure for name, figure in named.items() if rival.startswith(name))


def _charts(rows: Sequence[dict[str, Cell]], figures: dict[str, Figure]) -> tuple[Chart, Chart]:
    speeds = tuple(
        Bar(
            f"{row['system']}, {row['model']}, {row['engines']} engines",
            float(row["samples/s"]),
            float(row["min"]),
            float(row["max"]),
            row["system"] == "workbench",
        )
        for row in rows
    )
    ratios = tuple(Bar(name, f.median, f.min, f.max, True) for name, f in figures.items())
    return Chart("samples/s", speeds), Chart("the workbench's share", ratios, target=1.0)


def _notes(graph: Graph, turns: Turns) -> tuple[str, ...]:
    return (
        f"Ratios: {graph.source.name}, {graph.parameters:,} parameters, "
        f"{'x'.join(map(str, graph.input_shape))} input, {ENGINES} engines x 1 thread, "
        f"{turns.rows} rows per rank, SGD with momentum; {turns.rounds} interleaved rounds: "
        "median, range.",
        "Peak: live tensor bytes of one rank, from the first tensor to the second step; "
        "one engine and one process share their model.",
        "Loss: of the last step. All start alike and read the same rows; dropout draws other "
        "masks in each system, and independent trainers learn from their own rows alone.",
        "Saved: of the parameters that one process holds, by plan; no run is needed for that.",
        "DTensor has no fused update: FSDP2 and TP update their cut weights with foreach.",
    )
