"""VGG with its classifier sharded over engines, against the systems that one would use instead.

    workbench             convolutions replicated, linear layers sharded over the group
    torch DDP             the best of several bucket sizes
    torch FSDP2           the better of keeping and gathering again
    DeepSpeed             ZeRO, the best of stages 1, 2 and 3, where it is installed
    torch DDP x TP        DTensor's tensor parallelism for the same linear layers, the best mesh
    one process           as many threads as there are engines, the same global batch
    one engine            one thread, a rank's part of the batch
    independent trainers  a whole model on each engine, no communication

There are as many engines as cores, or GPUs. Systems that are compared run interleaved on the same
engines: each round has some steps of every system, which are built anew for it. Not all of them fit
into memory at once, so there are several parts, and the workbench is in each:

    ddp            torch DDP, one engine and one process
    fsdp           torch FSDP2, torch DDP x TP
    independent    independent trainers
    deepspeed      DeepSpeed
    oversubscribed as ddp, with four engines where there are fewer: no headline
    grid           the workbench alone, on other numbers of engines and groups
    saved          from plans alone, what sharding saves in groups of up to 32

A rank of a group of k holds all P_conv parameters of the convolutions and a k-th of the P_FC of the
linear layers, so that it saves P_FC / P (1 - 1/k) (SplitBrain, arXiv:2112.15317); where a layer's
outputs are no multiple of k, the rank that holds most counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from workbench.bench.harness.match import Match, Measured, Results, run_round
from workbench.bench.harness.nets import INPUT_SHAPE, SmallVGG
from workbench.bench.harness.progress import Part, Progress
from workbench.bench.harness.report import MIB, Cell, Devices, Figure, Report, engines_here
from workbench.bench.harness.rivals import ZERO_MISSING, zero_is_installed
from workbench.client.cluster import Cluster
from workbench.model.tracing.trace import trace
from workbench.model.vision import torchvision
from workbench.plan.experiment.experiment import SGD, Experiment, Synthetic
from workbench.plan.graph.graph import Graph
from workbench.plan.plans.plan import Plan

CROWD = 4  # engines of the part "oversubscribed", and the most of the grid
DDP = (("ddp 1", "ddp 5", "ddp 25", "ddp 100"), ("alone",))
ZERO = ("deepspeed 1", "deepspeed 2", "deepspeed 3")
FIGURES = {
    "one engine": "speedup_over_one_engine",
    "one process": "throughput_vs_one_process",
    "independent trainers": "throughput_vs_independent",
    "DeepSpeed": "throughput_vs_deepspeed",
    "torch FSDP2": "throughput_vs_torch_fsdp2",
    "torch DDP x TP": "throughput_vs_torch_ddp_tp",
    "torch DDP": "throughput_vs_ddp",
}
PEERS = [FIGURES[name] for name in ("torch DDP", "torch FSDP2", "torch DDP x TP", "DeepSpeed")]
GROUP_SIZES = (2, 4, 8, 16, 32)
SMALL = "small VGG"


@dataclass(frozen=True)
class Turns:
    """The amount of work of every system: rounds, steps of a round, and rows of a rank."""

    rounds: int
    steps: int
    rows: int


FULL, OF_THE_GRID, QUICK = Turns(5, 5, 32), Turns(1, 9, 32), Turns(2, 1, 8)


@dataclass(frozen=True)
class Model:
    """A model to train: a graph, and its module unless it is torchvision's."""

    graph: Graph
    module: nn.Module | None = None


def run(progress: Progress, *, quick: bool) -> Iterator[Report]:
    """Measures throughput and peak memory; `quick` takes a small VGG, few rows, and no grid."""
    turns, engines = QUICK if quick else FULL, engines_here()
    model = _model("small" if quick else "vgg11")
    matches = _matches(engines, quick)
    grid = [] if quick else _grid()
    crowded = any(match.part == "oversubscribed" for match in matches)
    progress.begin(
        *(Part(match.part, turns.rounds, match.seconds) for match in matches),
        *([] if quick or crowded else [Part("oversubscribed", 0, 60)]),  # named, it is no error
        *([Part("grid", len(grid), 20)] if grid else []),
        Part("saved", 1, 5),
    )
    report = _Growing(model.graph, turns, engines)
    for match in filter(lambda match: progress.wants(match.part), matches):
        results, rivals = report.match(match), match.rivals
        # One of its own: engines have their own cores only if there are no more of them.
        with Cluster(match.engines, timeout=300.0) as cluster:
            for _ in progress.each(match.part):
                ranks = _measure(cluster, model, match.engines, match.engines, rivals, turns)
                results.add(ranks)
                rivals = [[name] for name in ranks[0].chosen]
                yield report.so_far()
    if grid and progress.wants("grid"):
        with Cluster(max(count for _, count, _ in grid), timeout=300.0) as cluster:
            for name, count, group in progress.each("grid", grid):
                other, results = _model(name), Results()
                results.add(_measure(cluster, other, count, group, (), OF_THE_GRID))
                report.grid += results.rows(other.graph, count, group)
                yield report.so_far()
    for _ in progress.each("saved"):
        report.saved = savings(quick=quick)
        yield report.so_far()


def _matches(engines: int, quick: bool) -> list[Match]:
    if quick:
        rivals = (("ddp 25",), ("alone",), ("fsdp keep",), ("tensor-parallel 2",))
        matches = [Match("ddp", engines, rivals, 15)]
    else:
        meshes = [f"tensor-parallel {k}" for k in range(2, engines + 1) if engines % k == 0]
        matches = [
            Match("ddp", engines, DDP, 60),
            Match("fsdp", engines, (("fsdp keep", "fsdp reshard"), meshes), 90),
            Match("independent", engines, (("independent",),), 40),
        ]
    if zero_is_installed():
        matches.append(Match("deepspeed", engines, (ZERO,), 90))
    if not quick and Devices.here().count < CROWD:
        matches.append(Match("oversubscribed", CROWD, DDP, 60))
    return matches


def _grid() -> list[tuple[str, int, int]]:
    """(model, engines, group size), of no more engines than there are devices."""
    counts = [n for n in (1, 2, CROWD) if n <= max(2, Devices.here().count)]
    sizes = [(n, k) for n in counts for k in (1, 2, 4) if k <= n]
    return [(name, n, k) for name in ("vgg11", "vgg16", "small") for n, k in sizes]


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
    return run_round(cluster, experiment, model.module, rivals, turns.steps)


class _Growing:
    """The report as it grows, with the model, the work and the engines of the headline."""

    def __init__(self, graph: Graph, turns: Turns, engines: int) -> None:
        self._graph, self._turns, self._engines = graph, turns, engines
        self._matches: list[tuple[Match, Results]] = []
        self.grid: list[dict[str, Cell]] = []
        self.saved: list[dict[str, Cell]] = []

    def match(self, match: Match) -> Results:
        """The results of a match, which are to be added to."""
        self._matches.append((match, Results()))
        return self._matches[-1][1]

    def so_far(self) -> Report:
        """The report of all results so far."""
        rows: list[dict[str, Cell]] = []
        figures: dict[str, Figure] = {}
        devices, notes = Devices.here(), _notes(self._graph, self._engines, self._turns)
        for match, results in self._matches:
            rows += results.rows(self._graph, match.engines, match.engines)
            end = "_oversubscribed" if match.part == "oversubscribed" else ""
            figures |= {f"{name}{end}": figure for name, figure in _figures(results).items()}
            if results.seconds and match.engines > devices.count:
                notes += (f"{match.part}: {match.engines} engines on {devices}; no headline.",)
        peers = [figures[name] for name in PEERS if name in figures]
        if peers:
            figures["throughput_vs_best_peer"] = min(peers, key=lambda figure: figure.median)
        if not zero_is_installed():
            notes += (ZERO_MISSING,)
        return Report(
            "splitbrain",
            (*rows, *self.grid, *self.saved),
            figures | saved_figures(self.saved),
            notes,
            engines=self._engines,
        )


def _figures(results: Results) -> dict[str, Figure]:
    """Ratios of the workbench to every system that it ran with."""
    speeds, figures = results.speeds, {}
    for name, theirs in speeds.items():
        if name == "workbench":
            continue
        figure = next(figure for start, figure in FIGURES.items() if name.startswith(start))
        figures[figure] = Figure.ratio(speeds["workbench"], theirs)
        if name.startswith("torch DDP,"):
            share = results.peaks["workbench"] / results.peaks[name]
            figures["peak_bytes_vs_ddp"] = Figure.of([share])
    return figures


def _notes(graph: Graph, engines: int, turns: Turns) -> tuple[str, ...]:
    return (
        f"Ratios: {graph.source.name}, {graph.parameters:,} parameters, "
        f"{'x'.join(map(str, graph.input_shape))} input, {engines} engines x 1 thread on "
        f"{Devices.here()}, {turns.rows} rows per rank, SGD with momentum; interleaved rounds of "
        f"{turns.steps} steps: median, range.",
        "Peak: live tensor bytes of one rank, from the first tensor to the second step; "
        "one engine and one process share their model.",
        "Loss: of the last step. All start alike and read the same rows; dropout draws other "
        "masks in each system, and independent trainers learn from their own rows alone.",
        "Saved: of the parameters that one process holds, by plan; no run is needed for that.",
        "DTensor has no fused update: FSDP2 and TP update their sharded weights with foreach.",
    )


def savings(*, quick: bool) -> list[dict[str, Cell]]:
    """Parameters that a rank need not hold, from plans: for every model, sharding and group size.

    `quick`: of the small VGG alone.
    """
    rows: list[dict[str, Cell]] = []
    for name, graph in _graphs(quick):
        linear = [layer.name for layer in graph.layers if layer.kind == "linear"]
        sharded = {"all": linear} | ({"all but the last": linear[:-1]} if name == SMALL else {})
        for which, layers in sharded.items():
            for k in GROUP_SIZES:
                plan = Plan.data_parallel(graph, k)
                for layer in layers:
                    plan = plan.with_layer(layer, scheme="shard_out", group_size=k)
                held = max(map(plan.parameters_of, range(k)))
                rows.append(
                    {
                        "model": name,
                        "linear layers cut": which,
                        "group": k,
                        "parameter MiB per rank": held * 4 / MIB,
                        "saved %": 100 * (1 - held / graph.parameters),
                    }
                )
    return rows


def saved_figures(rows: Sequence[dict[str, Cell]]) -> dict[str, Figure]:
    """The savings of the small VGG, in percent, by group size; all linear layers sharded."""
    return {
        f"parameters_saved_k{row['group']}": Figure.of([float(row["saved %"])])
        for row in rows
        if row["model"] == SMALL and row["linear layers cut"] == "all"
    }


def _graphs(quick: bool) -> Iterator[tuple[str, Graph]]:
    yield SMALL, trace(SmallVGG(), input_shape=INPUT_SHAPE)
    if quick:
        return
    yield "small VGG, half width", trace(SmallVGG(width=32), input_shape=INPUT_SHAPE)
    for hidden in (4096, 512):
        yield f"VGG-11, head of {hidden}", trace(_vgg11_with_head(hidden), input_shape=INPUT_SHAPE)
    for name in ("vgg11", "vgg16"):
        for classes in (1000, 10):
            graph = trace(name, input_shape=INPUT_SHAPE, num_classes=classes)
            yield f"{name}, {classes} classes", graph


def _vgg11_with_head(hidden: int) -> nn.Module:
    """VGG-11 for images of 32 x 32: its features are 512 numbers, and need no pool."""
    with torch.device("meta"):
        features = torchvision().models.vgg11(num_classes=10).features
    head = [nn.Linear(512, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()]
    return nn.Sequential(features, nn.Flatten(), *head, nn.Linear(hidden, 10))
