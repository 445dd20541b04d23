"""The share of seeded faults that the tests kill: `python -m tests.mutants 200 --seed 404`.

The faults are a sample of all that could be planted, spread evenly over kinds and files.
"""

import os
import random
import tempfile
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from fnmatch import fnmatch
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.faults import Fault, faults, signatures
from tests.mutants.suite import Observed, Outcome, attempt, copied, observe
from workbench.bench.harness.progress import Part, Progress
from workbench.bench.harness.report import Cell, Figure, Report

FOLDERS = ("comm", "layers", "train", "program", "plan")
LEFT_OUT = {
    "shows, explains or names": (
        "*/__init__.py",
        "*/errors.py",
        "plan/display/*.py",
        "plan/io/html.py",
        "plan/plans/table.py",
        "plan/io/units.py",
        "program/show.py",
    ),
    "measures, traces or keeps account": (
        "plan/experiment/metrics.py",
        "plan/io/files.py",
        "train/run/memory.py",
        "train/measure/*.py",
        "train/trace/*.py",
    ),
    "says how fast machines are": ("plan/machine/*.py",),
    "needs a GPU": ("comm/shared_memory/gpu_*.py",),
}
"""Files that decide no value of a run, by their purpose."""


def candidates(root: Path) -> list[Fault]:
    """Every fault that can be planted in the sources below `root`."""
    known = signatures(path.read_text() for path in sorted((root / "workbench").rglob("*.py")))
    return [
        fault for file in sources(root) for fault in faults((root / file).read_text(), file, known)
    ]


def sources(root: Path) -> list[str]:
    """The files in which faults are planted, from the root of a checkout."""
    left_out = [f"workbench/{pattern}" for patterns in LEFT_OUT.values() for pattern in patterns]
    return [
        file
        for folder in FOLDERS
        for path in sorted((root / "workbench" / folder).rglob("*.py"))
        if not any(fnmatch(file := path.relative_to(root).as_posix(), p) for p in left_out)
    ]


def chosen(among: Iterable[Fault], count: int, seed: int) -> list[Fault]:
    """`count` faults, or all: every kind in turn, in the file with the fewest so far."""
    rng = random.Random(seed)
    left: dict[str, dict[str, list[Fault]]] = defaultdict(lambda: defaultdict(list))
    for fault in among:
        left[fault.kind][fault.file].append(fault)
    had: Counter[str] = Counter()
    found: list[Fault] = []
    while left and len(found) < count:
        kinds = sorted(left)
        rng.shuffle(kinds)
        for kind in kinds[: count - len(found)]:
            files = left[kind]
            fewest = min(had[file] for file in files)
            file = rng.choice([file for file in sorted(files) if had[file] == fewest])
            found.append(files[file].pop(rng.randrange(len(files[file]))))
            had[file] += 1
            if not files[file]:
                del files[file]
            if not files:
                del left[kind]
    return found


TESTS = ("oracle", *FOLDERS, "model", "predict", "client")
"""The folders of tests that are watched: all that plan or compute."""
MOST_S = 240.0
"""The most seconds of tests for one fault, as measured without it."""
WORKERS = min(4, os.cpu_count() or 1)
"""Copies of the checkout that are tested at once; each starts engines of its own, of some 3 GiB."""


def run(progress: Progress, count: int, seed: int) -> Iterator[Report]:
    """Plants `count` faults, each alone in a copy of the checkout, and runs the tests near it."""
    checkout = Path(__file__).resolve().parents[2]
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        outcomes = _outcomes(checkout, Path(folder), count, seed, progress)
        with closing(outcomes):
            progress.begin(Part("faults", count, 25))
            for number in progress.each("faults"):
                found.append(one := next(outcomes))
                by = f"{one.by or 'SURVIVED'}  {one.said}"
                progress.say(f"{number + 1}/{count}  {one.fault}  {by}")
                yield report(found, seed)


def report(found: list[Outcome], seed: int) -> Report:
    """The share of killed faults, by kind, and each that survived."""
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
        "mutants",
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
    checkout: Path, folder: Path, count: int, seed: int, progress: Progress
) -> Generator[Outcome]:
    roots: SimpleQueue[Path] = SimpleQueue()
    for index in range(WORKERS):
        roots.put(copied(checkout, folder / f"checkout-{index}"))
    watched = sources(checkout)
    faults = chosen(candidates(checkout), count, seed)

    def observed(name: str) -> Observed:
        with _taken(roots) as root:
            return observe(root, folder / f"observed-{name}", watched, [f"tests/{name}"])

    def tried(number: int, fault: Fault) -> Outcome:
        with _taken(roots) as root:
            return attempt(root, folder / str(number), fault, seen.near(fault, MOST_S))

    progress.say(f"watching what the quick tests of {', '.join(TESTS)} execute")
    pool = ThreadPoolExecutor(WORKERS)
    try:
        seen = Observed.joined(list(pool.map(observed, TESTS)))
        failed = ", ".join(seen.failed)
        progress.say(f"{len(seen.tests)} tests pass, {len(seen.failed)} fail: {failed}")
        yield from pool.map(tried, range(1, count + 1), faults)
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _taken(roots: "SimpleQueue[Path]") -> Iterator[Path]:
    """One of the copies, until the body ends."""
    root = roots.get()
    try:
        yield root
    finally:
        roots.put(root)
