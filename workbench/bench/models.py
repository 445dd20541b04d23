"""torchvision's classifiers: every one traced, and the smallest of each family verified."""

import time
from collections.abc import Iterator, Mapping

from workbench.bench.plot import Bar, Chart
from workbench.bench.progress import Part, Progress
from workbench.bench.report import Cell, Figure, Report
from workbench.client.cluster import Cluster
from workbench.model.errors import TraceError
from workbench.model.tracing.trace import trace
from workbench.model.vision import torchvision
from workbench.plan.graph.graph import Graph
from workbench.plan.plans.plan import Plan
from workbench.train.verify.verification import Verification

# The height and width of images for which 32 is too small: strides, pools and patches leave
# nothing.
SIZES = {"alexnet": 64, "inception_v3": 299, "maxvit_t": 224, "vit_h_14": 28}
QUICK = ("squeezenet1_1", "shufflenet_v2_x0_5")
RANKS = 4


def run(progress: Progress, *, quick: bool) -> Iterator[Report]:
    """Traces all classifiers, and verifies the smallest of each family; `quick` two families."""
    graphs: dict[str, Graph] = {}
    rows: dict[str, dict[str, Cell]] = {}
    names = list(QUICK) if quick else _names()
    families = len(set(map(family, names)))
    progress.begin(Part("traced", len(names), 3), Part("verified", families, 20))
    found: dict[str, Verification] = {}
    for name in progress.each("traced", names) if progress.wants("traced") else names:
        began = time.perf_counter()
        size = SIZES.get(name, 32)
        try:
            graphs[name] = trace(name, input_shape=(3, size, size), num_classes=10)
        except TraceError as error:
            rows[name] = {"model": name, "family": family(name), "refused": str(error)}
            continue
        rows[name] = _row(name, graphs[name], time.perf_counter() - began)
        yield _report(rows, graphs, found)
    with Cluster(RANKS, timeout=600.0) as cluster:
        for name in progress.each("verified", smallest(graphs).values()):
            plan = Plan.hybrid(graphs[name], RANKS, RANKS).with_batch_norm("synchronized")
            found[name] = cluster.verify(plan, precision="fp64")
            rows[name]["worst error, fp64"] = f"{_worst(found[name]):.1e}"
            rows[name]["exact"] = "yes" if found[name].exact else "NO"
            yield _report(rows, graphs, found)


def _report(
    rows: Mapping[str, Mapping[str, Cell]],
    graphs: Mapping[str, Graph],
    found: Mapping[str, Verification],
) -> Report:
    figures = {"traced": Figure.of([float(name in graphs) for name in rows])}
    if found:
        figures["exact"] = Figure.of([float(verified.exact) for verified in found.values()])
        figures["worst_fp64"] = Figure.of([_worst(verified) for verified in found.values()])
    return Report(
        "models",
        tuple(rows.values()),
        figures,
        (
            f"{len(graphs)} of {len(rows)} models are traced; {len(found)} are verified, "
            f"{sum(verified.exact for verified in found.values())} of them exact: the smallest of "
            f"each family, under Plan.hybrid on {RANKS} engines, in fp64, batch norm synchronized.",
        ),
        (
            Chart(
                "worst relative error, fp64",
                tuple(_bar(name, _worst(verified)) for name, verified in found.items()),
                target=1e-10,
            ),
        ),
    )


def family(name: str) -> str:
    """The module of torchvision that a model is from."""
    return str(torchvision().models.get_model_builder(name).__module__).rpartition(".")[2]


def smallest(graphs: Mapping[str, Graph]) -> dict[str, str]:
    """The model with the fewest parameters of each family."""
    found: dict[str, str] = {}
    for name in sorted(graphs, key=lambda name: graphs[name].parameters):
        found.setdefault(family(name), name)
    return found


def _names() -> list[str]:
    models = torchvision().models
    return sorted(models.list_models(module=models), key=lambda name: (family(name), name))


def _row(name: str, graph: Graph, seconds: float) -> dict[str, Cell]:
    apart = "a way of its own" if graph.evaluation else "as in training"
    return {
        "model": name,
        "family": family(name),
        "image": graph.input_shape[-1],
        "layers": len(graph.layers),
        "parameters": graph.parameters,
        "evaluation": apart,
        "traced in s": round(seconds, 2),
        "worst error, fp64": "-",
        "exact": "-",
    }


def _bar(name: str, error: float) -> Bar:
    return Bar(name, error, error, error, ours=True)


def _worst(verified: Verification) -> float:
    return max(difference.error for difference in verified.differences)
