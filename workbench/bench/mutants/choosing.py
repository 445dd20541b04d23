"""Which faults are planted: some of all that could be, evenly over kinds and over files."""

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path

from workbench.bench.mutants.faults import Fault, faults, signatures

FOLDERS = ("comm", "layers", "train", "plan")
LEFT_OUT = {
    "shows, explains or names": (
        "*/__init__.py",
        "*/errors.py",
        "plan/explain.py",
        "plan/show*.py",
        "plan/text.py",
        "train/loop/blame.py",
    ),
    "measures or keeps account": (
        "plan/metrics.py",
        "train/loop/memory.py",
        "train/loop/metrics.py",
        "train/measure/*.py",
    ),
    "traces": (
        "comm/groups/phases.py",
        "plan/phases.py",
        "plan/span.py",
        "train/trace/*.py",
    ),
    "says how fast machines are": (
        "plan/device.py",
        "plan/experience.py",
        "plan/fitting.py",
        "plan/known_machines.py",
        "plan/link.py",
        "plan/machine.py",
        "plan/sample.py",
    ),
}
"""Files that decide no value of a run, by what they do instead."""


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
    """`count` of them, or all: every kind in turn, in a file that has had the fewest so far."""
    rng = random.Random(seed)
    left: dict[str, dict[str, list[Fault]]] = defaultdict(lambda: defaultdict(list))
    for fault in among:
        left[fault.kind][fault.file].append(fault)
    had: Counter[str] = Counter()
    found: list[Fault] = []
    while left and len(found) < count:
        for kind in _shuffled(rng, left)[: count - len(found)]:
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


def _shuffled(rng: random.Random, names: Iterable[str]) -> Sequence[str]:
    ordered = sorted(names)
    rng.shuffle(ordered)
    return ordered
