"""Drawn modules with drawn plans and experiments, against one process that shares no code.

The generator and its oracle are tests: `tests/oracle/` of a checkout.
"""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from workbench.bench.progress import Part, Progress
from workbench.bench.report import Cell, Figure, Report

EACH = 20
"""Cases of one unit of progress."""


def run(progress: Progress, count: int, seed: int) -> Iterator[Report]:
    """Verifies `count` cases, drawn from `seed`.

    Raises:
        SystemExit: this is no checkout, so there is no generator.
    """
    root = Path(__file__).resolve().parents[3]
    if not (root / "tests" / "oracle" / "hunting.py").is_file():
        raise SystemExit(
            f"--random needs the generator in tests/oracle, which is not in {root}: "
            "run it from a checkout of the project"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    progress.begin(Part("cases", -(-count // EACH), 0.5 * EACH))

    def numbers() -> Iterator[int]:
        for first in progress.each("cases", range(0, count, EACH)):
            yield from range(first, min(first + EACH, count))

    for found in import_module("tests.oracle.hunting").hunt(seed, numbers(), EACH):
        yield _report(found, seed)


def _report(found: Any, seed: int) -> Report:
    rows: list[dict[str, Cell]] = [
        {"verdict": what, "cases": found.count(what)} for what in ("equal", "refused", "wrong")
    ]
    judged = max(len(found.verdicts), 1)
    return Report(
        "exactness",
        tuple(rows),
        {
            "random_cases": Figure.of([float(len(found.verdicts))]),
            "random_wrong": Figure.of([float(found.count("wrong"))]),
            "random_refused_share": Figure.of([found.count("refused") / judged]),
        },
        (
            f"{len(found.verdicts)} modules, plans and experiments, drawn from seed {seed}: "
            "outputs, gradients, weights, buffers, the optimizer's state and evaluations of every "
            "step, and run.state_dict(), against one process in plain torch. Refused counts only "
            "errors that say where and what to do; everything else is wrong, as are hangs.",
            *(f"refused {count} x {why}" for why, count in found.refused),
            *(f"{wrong.count} x {wrong.why}\n    {wrong.case!r}" for wrong in found.wrong),
        ),
    )
