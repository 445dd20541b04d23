"""Peak memory and traffic of real steps, beside what was predicted for them.

Each case runs three steps on local engines; the last one is metered, tensor by tensor, and its
collectives are recorded. Every rank is compared.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from workbench.bench.plot import Bar, Chart
from workbench.bench.report import Cell, Figure, Report
from workbench.bench.small_vgg import INPUT_SHAPE, SmallVGG
from workbench.bench.stepping import Observed
from workbench.cluster.cluster import Cluster
from workbench.cluster.errors import RunError
from workbench.model.trace import trace
from workbench.plan.experiment import SGD, AdamW, Experiment, Synthetic
from workbench.plan.graph import Graph
from workbench.plan.plan import Plan
from workbench.predict.prediction import Prediction, predict

ENGINES = 4
ROWS = 32  # of a rank
MIB = 2**20
MOMENTUM = SGD(lr=0.01, momentum=0.9)
MODELS = ("vgg11", "resnet18", "mobilenet_v3_small", "densenet121", "googlenet", "vit_b_16")


@dataclass(frozen=True)
class Case:
    """What is run, and how it is called."""

    plan: str
    experiment: Experiment
    module: nn.Module | None = None


def run(*, quick: bool) -> Report:
    """Measures every case; `quick` takes a small VGG under two plans."""
    rows: list[dict[str, Cell]] = []
    notes: list[str] = []
    with Cluster(ENGINES, timeout=300.0) as cluster:
        for case in _small() if quick else _all():
            model = case.experiment.plan.graph.source.name
            try:
                found: list[Observed] = cluster.call(
                    "workbench.bench.stepping:measure", case.experiment, module=case.module
                )
            except RunError as error:  # for want of memory, perhaps; the others go on
                notes.append(f"{model}, {case.plan}: {error}")
            else:
                rows.append(_row(case, predict(case.experiment.plan, None, case.experiment), found))
    errors = [float(row["memory error"]) for row in rows]
    worst = max(errors)
    figures = {
        "memory_error_median": Figure.of(errors),
        "memory_error_worst": Figure(worst, worst, worst),
        "traffic_exact": Figure.of([float(row["traffic"] == "equal") for row in rows]),
    }
    text = (
        f"Peak: live tensor bytes of the rank that is furthest off, shared memory included; "
        f"{statistics.fmean(errors):.2%} off on average over {len(rows)} cases.",
        "Traffic: calls, messages and bytes of every collective of every rank.",
        *notes,
    )
    return Report("predict", tuple(rows), figures, text, (_chart(rows),))


def _row(case: Case, prediction: Prediction, found: list[Observed]) -> dict[str, Cell]:
    memory, experiment = prediction.memory, case.experiment
    errors = [abs(memory[rank].peak_bytes / seen.peak_bytes - 1) for rank, seen in enumerate(found)]
    rank = max(range(len(errors)), key=errors.__getitem__)
    equal = all(
        sorted(prediction.traffic.rows(rank)) == sorted(seen.traffic)
        for rank, seen in enumerate(found)
    )
    return {
        "model": experiment.plan.graph.source.name,
        "plan": case.plan,
        "optimizer": experiment.optimizer.kind,
        "precision": experiment.precision,
        "measured MiB": found[rank].peak_bytes / MIB,
        "predicted MiB": memory[rank].peak_bytes / MIB,
        "memory error": errors[rank],
        "when": str(memory[rank].moment),
        "traffic": "equal" if equal else "NOT EQUAL",
    }


def _small() -> Iterator[Case]:
    module = SmallVGG()
    graph = trace(module, input_shape=INPUT_SHAPE)
    for name, plan in (
        ("hybrid, 4", Plan.hybrid(graph, ENGINES)),
        ("hybrid, 2 x 2, rounds B/K", Plan.hybrid(graph, ENGINES, 2, rounds="B/K")),
    ):
        yield Case(name, _experiment(plan), module)


def _all() -> Iterator[Case]:
    yield from _small()
    module = SmallVGG()
    graph = trace(module, input_shape=INPUT_SHAPE)
    plan = Plan.hybrid(graph, ENGINES)
    yield Case("hybrid, 4, rounds B", _experiment(plan.with_rounds("B")), module)
    for name, changed in (
        ("hybrid, 4, 2 micro-batches", dict[str, object](accumulate=2)),
        ("hybrid, 4", dict[str, object](optimizer=AdamW())),
        ("hybrid, 4", dict[str, object](precision="bf16", batch_size=32)),
        ("hybrid, 4", dict[str, object](precision="fp64", batch_size=32)),
    ):
        yield Case(name, _experiment(plan).replace(**changed), module)
    yield Case("unequal filters, 2", _experiment(_unequal(graph)), module)
    for name in MODELS:
        graph = trace(name, input_shape=INPUT_SHAPE)
        for label, chosen in (
            ("data parallel, 4", Plan.data_parallel(graph, ENGINES)),
            (
                "data parallel, 2, synchronized",
                Plan.data_parallel(graph, 2).with_batch_norm("synchronized"),
            ),
            ("hybrid, 4", Plan.hybrid(graph, ENGINES)),
            ("hybrid, 2 x 2", Plan.hybrid(graph, ENGINES, 2)),
        ):
            for optimizer in (MOMENTUM, AdamW()):
                yield Case(label, _experiment(chosen).replace(optimizer=optimizer))


def _unequal(graph: Graph) -> Plan:
    """Convolutions and linear layers in pieces of 3 to 1."""
    plan = Plan.hybrid(graph, 2)
    plan = plan.with_layer("features.14", scheme="shard_out", group_size=2, shares=(3, 1))
    return plan.with_layer("classifier.0", shares=(3, 1))


def _experiment(plan: Plan) -> Experiment:
    return Experiment(
        plan=plan,
        data=Synthetic(samples=512),
        batch_size=ROWS * plan.world_size,
        optimizer=MOMENTUM,
        steps=3,
    )


def _chart(rows: list[dict[str, Cell]]) -> Chart:
    bars = []
    for row in rows:
        ratio = float(row["predicted MiB"]) / float(row["measured MiB"])
        name = f"{row['model']}, {row['plan']}, {row['optimizer']}, {row['precision']}"
        bars.append(Bar(name, ratio, ratio, ratio, True))
    return Chart("predicted / measured peak", tuple(bars), target=1.0)
