"""Drawn modules with drawn plans and experiments, against one process that shares no code.

The generator and its oracle are tests: `tests/oracle/` of a checkout.
"""

import sys
from importlib import import_module
from pathlib import Path

from workbench.bench.report import Cell, Figure, Report


def run(count: int, seed: int) -> Report:
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
    found = import_module("tests.oracle.hunting").hunt(count, seed)
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
