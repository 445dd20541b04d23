"""VGG with its classifier sharded over engines, against the systems that one would use instead.

    workbench             convolutions replicated, linear layers cut over the group
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
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from workbench.bench.nets import INPUT_SHAPE, SmallVGG
from workbench.bench.plot import Bar, Chart
from workbench.bench.progress import Part, Progress
from workbench.bench.report import Cell, Devices, Figure, Report, engines_here
from workbench.bench.rivals.interleaved import Measured
from workbench.bench.rivals.matches import Found, Match, bars_of, measured, rows_of
from workbench.bench.rivals.rivals import ZERO_MISSING, zero_is_installed
from workbench.bench.rivals.savings import figures_of, savings
from workbench.client.cluster import Cluster
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import SGD, Experiment, Synthetic
from workbench.plan.graph.graph import Graph
from workbench.plan.plans.plan import Plan

CROWD = 4  # engines of the part "oversubscribed", and the most of the grid
DDP = (("ddp 1", "ddp 5", "ddp 25", "ddp 100"), ("alone",))
ZERO = ("deepspeed 1", "deepspeed 2", "deepspeed 3")
PEERS = (
    "throughput_vs_ddp",
    "throughput_vs_torch_fsdp2",
    "throughput_vs_torch_ddp_tp",
    "throughput_vs_deepspeed",
)
GRID = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4))


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
    there = any(match.part == "oversubscribed" for match in matches)  # named, it is no error
    progress.begin(
        *(Part(match.part, turns.rounds, match.seconds) for match in matches),
        *([] if quick or there else [Part("oversubscribed", 0, 60)]),
        *([Part("grid", len(grid), 20)] if grid else []),
        Part("saved", 1, 5),
    )
    found = _Results(model.graph, turns, engines)
    for match in filter(lambda match: progress.wants(match.part), matches):
        one, rivals = found.match(match), match.rivals
        # One of its own: engines have their own cores only if there are no more of them.
        with Cluster(match.engines, timeout=300.0) as cluster:
            for _ in progress.each(match.part):
                ranks = _measure(cluster, model, match.engines, match.engines, rivals, turns)
                one.add(ranks)
                rivals = [[name] for name in ranks[0].chosen]
                yield found.report()
    if grid and progress.wants("grid"):
        with Cluster(max(count for _, count, _ in grid), timeout=300.0) as cluster:
            for name, count, group in progress.each("grid", grid):
                other, cell = _model(name), Found()
                cell.add(_measure(cluster, other, count, group, (), OF_THE_GRID))
                found.rows += rows_of(other.graph, count, group, cell)
                yield found.report()
    for _ in progress.each("saved"):
        found.saved = savings(quick=quick)
        yield found.report()


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
    return measured(cluster, experiment, model.module, rivals, turns.steps)


class _Results:
    """The report, as it grows.

    Args:
        graph: the model of the ratios.
        turns: the amount of work.
        engines: the number of engines of the headline.
    """

    def __init__(self, graph: Graph, turns: Turns, engines: int) -> None:
        self._graph, self._turns, self._engines = graph, turns, engines
        self._matches: list[tuple[Match, Found]] = []
        self.rows: list[dict[str, Cell]] = []
        self.saved: list[dict[str, Cell]] = []

    def match(self, match: Match) -> Found:
        """What a match will find."""
        self._matches.append((match, Found()))
        return self._matches[-1][1]

    def report(self) -> Report:
        """The report of all that was found so far."""
        rows: list[dict[str, Cell]] = []
        figures: dict[str, Figure] = {}
        for match, found in self._matches:
            rows += rows_of(self._graph, match.engines, match.engines, found)
            end = "_oversubscribed" if match.part == "oversubscribed" else ""
            figures |= {f"{name}{end}": figure for name, figure in _figures(found).items()}
        peers = [figures[name] for name in PEERS if name in figures]
        if peers:
            figures["throughput_vs_best_peer"] = min(peers, key=lambda figure: figure.median)
        rows += self.rows
        notes = _notes(self._graph, self._engines, self._turns)
        there = Devices.here()
        for match, found in self._matches:
            if found.seconds and match.engines > there.count:
                crowd = f"{match.part}: {match.engines} engines on {there}; no headline."
                notes = (*notes, crowd)
        if not zero_is_installed():
            notes = (*notes, ZERO_MISSING)
        return Report(
            "splitbrain",
            (*rows, *self.saved),
            figures | figures_of(self.saved),
            notes,
            _charts(rows, figures),
            engines=self._engines,
        )


def _figures(found: Found) -> dict[str, Figure]:
    """Ratios of the workbench to every system that it ran with."""
    speeds = found.speeds
    figures = {}
    for name, theirs in speeds.items():
        if name == "workbench":
            continue
        ratios = [a / b for a, b in zip(speeds["workbench"], theirs, strict=True)]
        figures[_figure(name)] = Figure.of(ratios)
        if name.startswith("torch DDP,"):
            share = found.peaks["workbench"] / found.peaks[name]
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


def _charts(
    rows: Sequence[Mapping[str, Cell]], figures: Mapping[str, Figure]
) -> tuple[Chart, Chart]:
    speeds = bars_of(rows, "{system}, {model}, {engines} engines")
    ratios = tuple(Bar(name, f.median, f.min, f.max, True) for name, f in figures.items())
    return Chart("samples/s", speeds), Chart("the workbench's share", ratios, target=1.0)


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
        "DTensor has no fused update: FSDP2 and TP update their cut weights with foreach.",
    )
