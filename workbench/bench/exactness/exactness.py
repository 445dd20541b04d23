"""Split models against unsplit ones: `cluster.verify` over models, plans and precisions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from torch import nn

from workbench.bench.exactness import random_cases
from workbench.bench.exactness.mutants import planting
from workbench.bench.nets import CifarNet, SmallVGG, SmoothDenseNet
from workbench.bench.plot import Bar, Chart
from workbench.bench.progress import Part, Progress
from workbench.bench.report import Cell, Figure, Report
from workbench.client.cluster import Cluster
from workbench.model.tracing.trace import trace
from workbench.plan.graph.graph import Graph
from workbench.plan.placement.rules import SPLITTABLE
from workbench.plan.plans.plan import Plan
from workbench.store.errors import RunError
from workbench.train.verify.verification import KINDS, MOST, TOLERANCE, Verification

SMALL, CIFAR, SMOOTH = "small VGG", "CIFAR net", "densenet121, SiLU for ReLU"
MODELS = (
    "mobilenet_v3_small",
    "resnet18",
    "googlenet",
    "densenet121",
    SMOOTH,
    "alexnet",
    "vit_b_16",
    "vgg11",
    CIFAR,
)
OWN: Mapping[str, Callable[[], nn.Module]] = {
    SMALL: lambda: SmallVGG(width=8),
    CIFAR: CifarNet,
    SMOOTH: SmoothDenseNet,
}
# The models that are also verified with unequal parts.
UNEQUAL = (CIFAR, "mobilenet_v3_small", "resnet18", "densenet121", SMOOTH, "vgg11")
# AlexNet's strides leave nothing of smaller images.
SIZES = {"alexnet": 64}
WORLD = 4
_MOST_SHARE = 9
PRECISIONS: tuple[Literal["fp64", "fp32"], ...] = ("fp64", "fp32")


def run(
    progress: Progress, *, quick: bool, mutants: int = 0, random: int = 0, seed: int = 0
) -> Iterator[Report]:
    """Verifies models under equal and unequal plans, fp64 and fp32; `quick` a small VGG alone.

    With `mutants`, that many faults are planted instead, to see which of them the tests kill; with
    `random`, that many modules, plans and experiments are drawn (`random_cases.py`).
    """
    if mutants:
        yield from planting.run(progress, mutants, seed)
        return
    if random:
        yield from random_cases.run(progress, random, seed)
        return
    progress.say("tracing the models")
    cases = [case for name in ((SMALL,) if quick else MODELS) for case in _cases(name, quick)]
    progress.begin(Part("cases", len(cases), 5 if quick else 20))
    rows: list[dict[str, Cell]] = []
    found: list[Verification] = []
    notes: list[str] = []
    with Cluster(WORLD, timeout=300.0) as cluster:
        for case in progress.each("cases", cases):
            plan, precision = case.plan.with_batch_norm("synchronized"), case.precision
            try:
                given = dict(precision=precision, module=case.module, steps=2)
                found.append(cluster.verify(plan, **given))
            except RunError as error:  # out of memory, perhaps; the others continue
                notes.append(f"{case.name}, {case.label}, {precision}: {error}")
            else:
                rows.append(_row(case.name, case.label, found[-1]))
            yield _report(rows, found, notes)


@dataclass(frozen=True)
class _Case:
    """A model and its plan by their names, and the precision."""

    name: str
    label: str
    plan: Plan
    module: nn.Module | None
    precision: Literal["fp64", "fp32"]


def _cases(name: str, quick: bool) -> Iterator[_Case]:
    """The plans of one model."""
    size = SIZES.get(name, 32)
    module = OWN[name]() if name in OWN else None
    graph = trace(module or name, input_shape=(3, size, size), num_classes=10)
    plans = {
        **(unequal_plans(graph) if quick or name in UNEQUAL else {}),
        "data parallel, 4": Plan.data_parallel(graph, 4),
        "data parallel, 2": Plan.data_parallel(graph, 2),
        "hybrid, 4": Plan.hybrid(graph, 4, 4),
        "hybrid, 2 x 2": Plan.hybrid(graph, 4, 2),
    }
    for label, plan in plans.items():
        for precision in PRECISIONS if name != SMOOTH else PRECISIONS[1:]:
            yield _Case(name, label, plan, module, precision)


def _report(
    rows: Sequence[Mapping[str, Cell]], found: Sequence[Verification], notes: Sequence[str]
) -> Report:
    figures = {name: figure for p in PRECISIONS for name, figure in figures_of(found, p).items()}
    exact = sum(v.exact for v in found)
    if found:
        figures["exact"] = Figure.of([v.exact * 1.0 for v in found])
    return Report(
        "exactness",
        tuple(rows),
        figures,
        (
            f"{exact} of {len(found)} verifications are exact. Relative errors of outputs, every "
            "gradient of the first step, and all weights, buffers and the optimizer's state after "
            "two steps, of loss and accuracy in evaluation, and of a second run against the first; "
            "batch norm is synchronized.",
            "Rounding: how far the unsplit model in fp32 is from itself in fp64. Where that is "
            "more than the tolerance of 1e-4 (DenseNet's gradients: rounding turns ReLUs over, and "
            "each is one of few summands), no split can be within it. These are figures of their "
            "own: beyond_fp32, and rounding_fp32 of the same unsplit models beside it; they count "
            f"as exact up to ten times the rounding, but below {MOST}, since a wrong factor is off "
            "by more.",
            f"{SMOOTH}: the same layers, cuts and sums with nothing that turns over, held to the "
            "tolerance in fp32; with ReLU, fp64 holds them to 1e-10.",
            *notes,
        ),
        (_chart(rows),),
    )


def unequal_plans(graph: Graph) -> dict[str, Plan]:
    """Plans by label: filters with random shares, with none on a rank, by layer, beside rows.

    They are drawn anew for each model: exactness must not depend on them.
    """
    rng = Random(graph.source.name)
    whole = Plan.filters(graph, WORLD, _drawn(rng, WORLD))
    none = Plan.filters(graph, WORLD, _drawn(rng, WORLD, zero=True), grain=1)
    layers = [layer.name for layer in graph.layers if layer.kind in SPLITTABLE]
    each = {name: _drawn(rng, WORLD, zero=index % 3 == 0) for index, name in enumerate(layers)}
    by_layer = Plan.filters(graph, WORLD, each, grain=1)
    groups = Plan.filters(graph, WORLD, _drawn(rng, 2), group_size=2)
    hybrid = Plan.hybrid(graph, WORLD)
    return {
        "filters": whole,
        "filters, none on a rank": none,
        "filters by layer, rows": by_layer.with_rows(_drawn(rng, WORLD, zero=True)),
        "filters 2 x 2, rows": groups.with_rows(_drawn(rng, WORLD, zero=True)),
        "hybrid, rows": hybrid.with_rows(_drawn(rng, WORLD, zero=True)),
    }


def _drawn(rng: Random, ranks: int, *, zero: bool = False) -> tuple[int, ...]:
    """Random shares, one of which is zero if `zero`."""
    shares = [rng.randint(1, _MOST_SHARE) for _ in range(ranks)]
    if zero:
        shares[rng.randrange(ranks)] = 0
    return tuple(shares)


def _row(name: str, plan: str, verification: Verification) -> dict[str, Cell]:
    errors: dict[str, Cell] = {
        kind: f"{verification.of(kind).error:.1e}" if kind in verification.kinds else "-"
        for kind in KINDS
    }
    return {
        "model": name,
        "plan": plan,
        "precision": verification.precision,
        **errors,
        "rounding": f"{_rounding(verification):.1e}",
        "exact": "yes" if verification.exact else "NO",
    }


def figures_of(found: Sequence[Verification], precision: str) -> dict[str, Figure]:
    """The worst error of each verification; separate where the unsplit model itself exceeds it."""
    those = [v for v in found if v.precision == precision]
    within = [v for v in those if _rounding(v) <= TOLERANCE[precision]]
    beyond = [v for v in those if _rounding(v) > TOLERANCE[precision]]
    figures = {}
    if within:
        figures[f"worst_{precision}"] = Figure.of([_error(v) for v in within])
    if beyond:
        figures[f"beyond_{precision}"] = Figure.of([_error(v) for v in beyond])
        figures[f"rounding_{precision}"] = Figure.of([_rounding(v) for v in beyond])
    return figures


def _error(verification: Verification) -> float:
    return max(difference.error for difference in verification.differences)


def _rounding(verification: Verification) -> float:
    """The error of the unsplit model against itself in double precision."""
    return max(difference.rounding for difference in verification.differences)


def _chart(rows: Sequence[Mapping[str, Cell]]) -> Chart:
    bars = []
    for row in rows:
        if row["precision"] == "fp64":
            error = float(row["gradient"])
            bars.append(Bar(f"{row['model']}, {row['plan']}", error, error, error, ours=True))
    return Chart("worst relative error of a gradient, fp64", tuple(bars), target=1e-10)
