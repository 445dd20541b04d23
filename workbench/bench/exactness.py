"""Split models against unsplit ones: `cluster.verify` over models, plans and precisions.

`--random N` judges drawn modules, plans and experiments instead, against one process that shares no
code. The generator and that oracle are tests: `tests/oracle/` of a checkout.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

from torch import nn

from workbench.bench.harness.nets import CifarNet, SmallVGG, SmoothDenseNet
from workbench.bench.harness.progress import Part, Progress
from workbench.bench.harness.report import Cell, Figure, Report
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


def run(progress: Progress, *, quick: bool, random: int = 0, seed: int = 0) -> Iterator[Report]:
    """Verifies models under equal and unequal plans, fp64 and fp32; `quick` a small VGG alone.

    With `random`, that many modules, plans and experiments are drawn instead.
    """
    if random:
        yield from _run_random(progress, random, seed)
        return
    progress.say("tracing the models")
    cases = [case for name in ((SMALL,) if quick else MODELS) for case in _cases(name, quick)]
    progress.begin(Part("cases", len(cases), 5 if quick else 20))
    rows: list[dict[str, Cell]] = []
    verified: list[Verification] = []
    notes: list[str] = []
    with Cluster(WORLD, timeout=300.0) as cluster:
        for case in progress.each("cases", cases):
            plan = case.plan.with_batch_norm("synchronized")
            options = dict(precision=case.precision, module=case.module, steps=2)
            try:
                verified.append(cluster.verify(plan, **options))
            except RunError as error:  # out of memory, perhaps; the others continue
                notes.append(f"{case.name}, {case.label}, {case.precision}: {error}")
            else:
                rows.append(_row(case.name, case.label, verified[-1]))
            yield _report(rows, verified, notes)


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
    rows: Sequence[Mapping[str, Cell]], verified: Sequence[Verification], notes: Sequence[str]
) -> Report:
    figures = {name: figure for p in PRECISIONS for name, figure in figures_of(verified, p).items()}
    exact = sum(each.exact for each in verified)
    if verified:
        figures["exact"] = Figure.of([each.exact * 1.0 for each in verified])
    return Report(
        "exactness",
        tuple(rows),
        figures,
        (
            f"{exact} of {len(verified)} verifications are exact. Relative errors of outputs, each "
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


def figures_of(verified: Sequence[Verification], precision: str) -> dict[str, Figure]:
    """The worst error of each verification; separate where the unsplit model itself exceeds it."""
    alike = [v for v in verified if v.precision == precision]
    within = [v for v in alike if _rounding(v) <= TOLERANCE[precision]]
    beyond = [v for v in alike if _rounding(v) > TOLERANCE[precision]]
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


EACH = 20  # drawn cases of one unit of progress


def _run_random(progress: Progress, count: int, seed: int) -> Iterator[Report]:
    """Judges `count` cases that are drawn from `seed`, in a process of the checkout's tests.

    Raises:
        SystemExit: this is no checkout, so there is no generator.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / "tests" / "oracle" / "hunting.py").is_file():
        raise SystemExit(
            f"--random needs the generator in tests/oracle, which is not in {root}: "
            "run it from a checkout of the project"
        )
    progress.begin(Part("cases", -(-count // EACH), 0.5 * EACH))
    command = [sys.executable, "-m", "tests.oracle.hunting", str(seed)]
    with subprocess.Popen(
        command, cwd=root, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as hunting:
        assert hunting.stdin is not None
        assert hunting.stdout is not None
        try:
            for first in progress.each("cases", range(0, count, EACH)):
                print(first, min(first + EACH, count), file=hunting.stdin, flush=True)
                yield _random_report(hunting.stdout.readline(), seed)
            hunting.stdin.close()  # then failures are made small
            yield _random_report(hunting.stdout.readline(), seed)
        except BaseException:
            hunting.terminate()
            raise


def _random_report(line: str, seed: int) -> Report:
    if not line:
        raise RuntimeError("tests.oracle.hunting ended by itself: see its messages above")
    hunt: dict[str, Any] = json.loads(line)
    verdicts: dict[str, int] = hunt["verdicts"]
    rows: list[dict[str, Cell]] = [
        {"verdict": verdict, "cases": count} for verdict, count in verdicts.items()
    ]
    judged = sum(verdicts.values())
    figures = {
        "random_cases": float(judged),
        "random_wrong": float(verdicts["wrong"]),
        "random_refused_share": verdicts["refused"] / max(judged, 1),
    }
    return Report(
        "exactness",
        tuple(rows),
        {name: Figure.of([value]) for name, value in figures.items()},
        (
            f"{judged} modules, plans and experiments, drawn from seed {seed}: "
            "outputs, gradients, weights, buffers, the optimizer's state and evaluations of every "
            "step, and run.state_dict(), against one process in plain torch. Refused counts only "
            "errors that say where and what to do; everything else is wrong, as are hangs.",
            *(f"refused {count} x {why}" for why, count in hunt["refused"]),
            *(f"{count} x {why}\n    {case}" for count, why, case in hunt["wrong"]),
        ),
    )
