"""The search for plans: its time, its proven gap, and the speed of its plans.

First the search alone, for large models on machines from data sheets, and for a stack of many equal
blocks, which is traced before, on all of them. Then on local engines: they are calibrated, a plan
is searched, and it runs interleaved with others that are predicted to be good; each time is
compared with its prediction. The user's stored measurements are not replaced.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from scipy.stats import kendalltau
from torch import nn

from workbench.bench.harness.match import MEASURE_PLANS, Measured
from workbench.bench.harness.nets import GPT, INPUT_SHAPE, SmallVGG
from workbench.bench.harness.progress import Part, Progress
from workbench.bench.harness.report import MIB, Cell, Figure, Report, Row
from workbench.client.cluster import Cluster
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import SGD, Experiment, Synthetic
from workbench.plan.graph.graph import Graph
from workbench.plan.machine.machine import Machine
from workbench.plan.placement.layer_plan import LayerPlan
from workbench.plan.plans.plan import Plan
from workbench.predict.prediction import predict
from workbench.predict.search import MemoryLimitError, SearchResult, search
from workbench.predict.search.result import summary

ENGINES = 4
RANKS = 8
ROWS = 32  # of a rank
REPEATS = 3
OTHERS = 3  # plans beside the searched one that differ from it in one layer
CALIBRATIONS = 3  # at most: what was searched is measured too, and searched again
MODELS = ("vgg16", "resnet152", "vit_l_16")
IMAGE = (3, 224, 224)
MACHINES = ("h100-nvlink", "cpu-10gbe")
FREE = "of the free peak"
LIMITS: tuple[str | float | None, ...] = (None, "4GiB", 0.35, 0.45, 0.6)
"""Numbers are of the peak of the plan that is best without a limit."""
BLOCKS, WIDTH, TOKENS, VOCABULARY = 48, 128, 32, 100  # of the stack
MOMENTUM = SGD(lr=0.01, momentum=0.9)


Rows = list[dict[str, Cell]]


@dataclass(frozen=True)
class Model:
    """A model to train: a graph, and its module unless it is torchvision's."""

    graph: Graph
    module: nn.Module | None = None


@dataclass
class _Results:
    """The rows of each part, and the samples of figures that no row has."""

    searched: Rows = field(default_factory=list)
    stack: Rows = field(default_factory=list)
    ran: Rows = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    taus: list[float] = field(default_factory=list)
    traced: list[float] = field(default_factory=list)

    def report(self) -> Report:
        """The report of all results so far."""
        solved = [row for row in self.searched if row["gap"] != "-"]
        free = [row for row in solved if row["limit"] == "-"]
        limited = [row for row in solved if str(row["limit"]).endswith(FREE)]
        samples = {
            "search_seconds": [float(row["seconds"]) for row in free],
            "gap": [float(row["gap"]) for row in free],
            "gap_under_limit": [float(row["gap"]) for row in solved if row["limit"] == LIMITS[1]],
            "limited_seconds": [float(row["seconds"]) for row in limited],
            "limited_gap": [float(row["gap"]) for row in limited],
            "stack_trace_seconds": self.traced,
            "stack_search_seconds": [float(row["seconds"]) for row in self.stack],
            "stack_gap": [float(row["gap"]) for row in self.stack],
            "chosen_vs_best": self.ratios,
            "kendall_tau": self.taus,
        }
        notes = (
            f"seconds: median of {REPEATS} searches, each from nothing, at {RANKS} ranks of {ROWS} "
            "rows (under a limit: of one); gap: by how much, at most, a plan could be predicted to "
            "be faster; search_seconds and gap are of searches without a limit, limited_seconds "
            f"and limited_gap of limits that are a part {FREE}.",
            f"stack: a language model of {BLOCKS} blocks, on all machines of `Machine.presets()`.",
            "chosen_vs_best: median seconds of the plan that was searched over those of the "
            "fastest plan that ran, for each model; 1: it is the fastest.",
        )
        figures = {name: Figure.of(values) for name, values in samples.items() if values}
        rows = (*self.searched, *self.stack, *self.ran)
        return Report("search", rows, figures, notes, engines=ENGINES)


def run(progress: Progress, *, quick: bool) -> Iterator[Report]:
    """Searches, then runs the plans; `quick` takes one large model, and a small one to run."""
    cases = _cases(quick)
    models = 1 if quick else 2
    presets = () if quick else Machine.presets()
    progress.begin(
        Part("searched", len(cases), 15),
        *([Part("stack", len(presets), 4)] if presets else []),
        Part("ran", models, 180),
    )
    results = _Results()
    graphs: dict[str, Graph] = {}
    free: Row | None = None
    for name, machine, limit in progress.each("searched", cases):
        if name not in graphs:
            graphs[name] = trace(name, input_shape=IMAGE, num_classes=1000)
        row = _row(graphs[name], machine, limit, free)
        free = row if limit is None else free
        results.searched.append(row)
        yield results.report()
    for machine in progress.each("stack", presets):
        if not results.traced:
            net, began = GPT(BLOCKS, WIDTH, TOKENS, VOCABULARY), time.perf_counter()
            graphs["stack"] = trace(net, input_shape=(TOKENS,), vocabulary=VOCABULARY)
            results.traced.append(time.perf_counter() - began)
        results.stack.append(_row(graphs["stack"], machine, None, None))
        yield results.report()
    if not progress.wants("ran"):
        return
    with _own_cache(), Cluster(ENGINES, timeout=300.0) as cluster:
        for model in progress.each("ran", _models(quick)):
            rows, ratio = _ran(cluster, model, progress.fitting(9), quick)
            results.ran += rows
            results.ratios.append(ratio)
            results.taus.append(_tau(rows))
            yield results.report()


def _cases(quick: bool) -> list[tuple[str, str, str | float | None]]:
    """(model, machine, limit of memory)."""
    few = 1 if quick else None
    return [
        (name, machine, limit)
        for name in MODELS[:few]
        for machine in MACHINES[:few]
        for limit in LIMITS[:few]
    ]


def _row(graph: Graph, name: str, limit: str | float | None, free: Row | None) -> dict[str, Cell]:
    shown = f"{limit:g} {FREE}" if isinstance(limit, float) else limit or "-"
    row: dict[str, Cell] = {"model": graph.source.name, "machine": name, "limit": shown}
    if isinstance(limit, float):
        assert free is not None
        limit *= float(free["peak MiB"]) * MIB
    machine, seconds = Machine.preset(name), []
    for _ in range(REPEATS if limit is None else 1):
        try:
            result = search(
                graph,
                machine,
                world_size=RANKS,
                memory_limit=limit,
                batch_size=ROWS * RANKS,
                optimizer=MOMENTUM,
            )
        except MemoryLimitError as error:
            empty = {"gap": "-", "step ms": "-", "peak MiB": "-", "plan": str(error)}
            return {**row, "seconds": 0.0, **empty}
        seconds.append(result.seconds)
    return {
        **row,
        "seconds": statistics.median(seconds),
        "gap": result.gap,
        "step ms": result.step_time * 1e3,
        "peak MiB": result.prediction.memory.peak_bytes / MIB,
        "plan": summary(result.plan),
    }


def _models(quick: bool) -> Iterator[Model]:
    module = SmallVGG(16 if quick else 64)
    yield Model(trace(module, input_shape=INPUT_SHAPE), module)
    if not quick:  # all its plans are in memory at once, on all ranks
        yield Model(trace("resnet18", input_shape=INPUT_SHAPE, num_classes=10))


def _ran(
    cluster: Cluster, model: Model, rounds: int, quick: bool
) -> tuple[list[dict[str, Cell]], float]:
    """(a row for each plan, median seconds of the searched plan over the least)."""
    graph = model.graph
    experiment = Experiment(
        plan=Plan.data_parallel(graph, ENGINES),
        data=Synthetic(samples=2048),
        batch_size=ROWS * ENGINES,
        optimizer=MOMENTUM,
        steps=1,
    )
    plans = _plans(graph)
    if quick:
        plans = dict(list(plans.items())[:3])
    machine, result = _calibrated(cluster, model, experiment, plans, quick)
    plans = {name: plan for name, plan in plans.items() if plan != result.plan}
    plans |= _others(result) | {"searched": result.plan}
    ranks: list[Measured] = cluster.call(
        MEASURE_PLANS,
        experiment,
        module=model.module,
        plans=[plan.to_toml() for plan in plans.values()],
        rounds=2 if quick else rounds,
        steps=2 if quick else 3,
    )
    measured = [ranks[0].seconds[str(number)] for number in range(len(plans))]
    rows: list[dict[str, Cell]] = [
        {
            "runs": graph.source.name,
            "plan": name,
            "predicted ms": predict(plan, machine, experiment).step_time * 1e3,
            "measured ms": statistics.median(seconds) * 1e3,
            "schemes": summary(plan),
        }
        for (name, plan), seconds in zip(plans.items(), measured, strict=True)
    ]
    medians = [statistics.median(seconds) for seconds in measured]
    return rows, medians[-1] / min(medians)


def _calibrated(
    cluster: Cluster, model: Model, experiment: Experiment, plans: dict[str, Plan], quick: bool
) -> tuple[Machine, SearchResult]:
    """A machine that has measured these plans, and the plan that is best for it."""
    wanted = list(plans.values())
    for _ in range(1 if quick else CALIBRATIONS):
        machine = cluster.calibrate(
            *wanted, rows=ROWS, within_s=2.0 if quick else 40.0, module=model.module
        )
        result = search(model.graph, machine, experiment, world_size=ENGINES)
        if result.plan in wanted:
            break
        wanted.append(result.plan)
    return machine, result


def _others(result: SearchResult) -> dict[str, Plan]:
    """Plans that differ from the searched one in one layer, with the least extra cost."""
    changes = [
        (option.more_s, name, option.choice)
        for name, reason in result.why.items()
        for option in reason.options
        if option.choice != reason.chosen
    ]
    changes.sort(key=lambda change: change[0])
    layers, graph = result.plan.layers, result.plan.graph
    return {
        f"searched, but {name}": Plan(graph, ENGINES, {**layers, name: choice})
        for _, name, choice in changes[:OTHERS]
    }


@contextmanager
def _own_cache() -> Iterator[None]:
    """Keeps new measurements separate from those that are stored for the user."""
    name = "XDG_CACHE_HOME"  # which `platformdirs` asks
    before = os.environ.get(name)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[name] = folder
        try:
            yield
        finally:
            del os.environ[name]
            if before is not None:
                os.environ[name] = before


def _plans(graph: Graph) -> dict[str, Plan]:
    """Some plans that users would try."""
    filters = {
        layer.name: LayerPlan("shard_out", ENGINES)
        for layer in graph.layers
        if layer.kind in ("conv2d", "linear") and layer.output_shape[0] >= ENGINES
    }
    return {
        "data parallel": Plan.data_parallel(graph, ENGINES),
        "hybrid, 2": Plan.hybrid(graph, ENGINES, 2),
        "hybrid, 4": Plan.hybrid(graph, ENGINES),
        "hybrid, 4, rounds B/K": Plan.hybrid(graph, ENGINES, rounds="B/K"),
        "filters, 4": Plan(graph, ENGINES, filters),
    }


def _tau(rows: Sequence[Mapping[str, Cell]]) -> float:
    """Kendall's rank correlation of predicted and measured times."""
    sides = ("predicted ms", "measured ms")
    predicted, measured = ([row[side] for row in rows] for side in sides)
    return float(kendalltau(predicted, measured).statistic)
