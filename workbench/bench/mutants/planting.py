"""How many of some seeded faults the tests kill."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import workbench
from workbench.bench.mutants.choosing import FOLDERS, LEFT_OUT, candidates, chosen, sources
from workbench.bench.mutants.suite import Outcome, attempt, copied, observe
from workbench.bench.report import Cell, Figure, Report

TESTS = ("oracle", *FOLDERS, "model", "predict", "cluster")
"""The folders of tests that are watched: all that plan or compute."""
MOST_S = 240.0
"""Of tests for one fault, as long as they take without it."""


def run(count: int, seed: int, told: Callable[[str], None] = print) -> Report:
    """Plants `count` faults, each alone in a copy of the checkout, and runs the tests near it.

    Raises:
        SystemExit: the workbench was installed without its tests.
    """
    checkout = Path(workbench.__file__).parent.parent
    if not (checkout / "tests" / "conftest.py").exists():
        raise SystemExit(f"mutants need a checkout with its tests; there are none in {checkout}")
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        found = list(_outcomes(checkout, Path(folder), count, seed, told))
    return report(found, seed)


def report(found: list[Outcome], seed: int) -> Report:
    """The share that was killed, by kind, and each that was not."""
    kinds: dict[str, list[Outcome]] = {}
    for outcome in found:
        kinds.setdefault(outcome.fault.kind, []).append(outcome)
    rows: list[dict[str, Cell]] = [
        {"fault": kind, "planted": len(those), "killed": sum(o.killed for o in those)}
        for kind, those in sorted(kinds.items())
    ]
    share = sum(outcome.killed for outcome in found) / len(found)
    seconds = sum(outcome.seconds for outcome in found) / len(found)
    left_out = "; ".join(f"{why}: {', '.join(files)}" for why, files in LEFT_OUT.items())
    return Report(
        "exactness",
        tuple(rows),
        {"mutants_killed_share": Figure(share, share, share)},
        (
            f"{len(found)} faults of seed {seed} in {', '.join(FOLDERS)}; {seconds:.0f} s each.",
            "A fault is killed by a quick test that fails, crashes or hangs; those that execute "
            "the changed lines were run.",
            f"Not looked at: branches for GPUs, and what {left_out}.",
            *(
                f"survived: {o.fault} ({o.said or f'{o.tests} tests'})"
                for o in found
                if not o.killed
            ),
        ),
    )


def _outcomes(
    checkout: Path, folder: Path, count: int, seed: int, told: Callable[[str], None]
) -> Iterator[Outcome]:
    root = copied(checkout, folder / "checkout")
    faults = chosen(candidates(root), count, seed)
    tests = [f"tests/{name}" for name in TESTS if (root / "tests" / name).exists()]
    told(f"watching what the quick tests of {', '.join(tests)} execute")
    seen = observe(root, folder / "observed", sources(root), tests)
    told(f"{len(seen.tests)} tests pass, {len(seen.failed)} fail: {', '.join(seen.failed)}")
    for number, fault in enumerate(faults, 1):
        outcome = attempt(root, folder / str(number), fault, seen.near(fault, MOST_S))
        told(f"{number}/{count}  {fault}  {outcome.by or 'SURVIVED'}  {outcome.said}")
        yield outcome
