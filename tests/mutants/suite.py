"""Runs the tests of a copy of the checkout, unchanged or with a fault in it."""

import ast
import compileall
import json
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any
from uuid import uuid4

import psutil

from tests.mutants import witness
from tests.mutants.faults import Fault
from tests.mutants.observer import CHOSEN, FOUND

COPIED = ("workbench", "tests", "env", "pyproject.toml", "README.md")
NOT_COPIED = ("__pycache__", "node_modules", "bundle", ".*")
# How much longer than without a fault a test may take, before it counts as hung.
SLOWER, BESIDES_S = 10.0, 20.0
# Seconds that engines may take to start, and a process to load torch.
START_S = 180.0
OWN = "WORKBENCH_MUTANT"
"""An environment variable that marks the processes of one run of the tests."""


@dataclass(frozen=True)
class Test:
    """A test that passes without faults, its seconds, and whether it needs engines."""

    name: str
    seconds: float
    engines: bool = False

    @property
    def file(self) -> str:
        """The path of its file, from the root of the checkout."""
        return self.name.partition("::")[0]

    @property
    def allowed_s(self) -> float:
        """The seconds that it may take with a fault."""
        return SLOWER * self.seconds + BESIDES_S


@dataclass(frozen=True)
class Observed:
    """The tests without faults: which pass, by number, and which execute each line of a file.

    `importers` has, for every file, the files that import something from it.
    """

    tests: Mapping[int, Test]
    failed: tuple[str, ...]
    executed: witness.Executed
    importers: Mapping[str, tuple[str, ...]]

    @classmethod
    def joined(cls, parts: "Sequence[Observed]") -> "Observed":
        """What runs of different tests of one checkout have shown, each with its own numbers."""
        tests: dict[int, Test] = {}
        executed: witness.Executed = {}
        for index, part in enumerate(parts):

            def number(of: int, index: int = index) -> int:
                return of * len(parts) + index if of != witness.NO_TEST else of

            tests |= {number(of): test for of, test in part.tests.items()}
            for file, lines in part.executed.items():
                for line, numbers in lines.items():
                    known = executed.setdefault(file, defaultdict(set))
                    known[line].update(map(number, numbers))
        failed = tuple(name for part in parts for name in part.failed)
        importers = {file: those for part in parts for file, those in part.importers.items()}
        return cls(tests, failed, executed, importers)

    def near(self, fault: Fault, most_s: float) -> list[Test]:
        """The tests that execute a fault's lines, up to `most_s` seconds of them.

        Tests without engines come first; of these those in the file of the same name, then those
        in the folder of the same name, then the quickest. For a line that is executed at import,
        all tests count that execute anything in the file or in one that imports it; for one in a
        function that is called then, as for each class of a kind, those in the file of that name.
        """
        first, last = fault.lines
        own = Path("tests", *Path(fault.file).parts[1:])
        of_own_file = own.with_name(f"test_{own.stem}.py").as_posix()
        if fault.function:
            lines = self.executed.get(fault.file, {})
            numbers = {n for line in range(first, last + 1) for n in lines.get(line, ())}
            if witness.NO_TEST in numbers:
                numbers |= {n for n, test in self.tests.items() if test.file == of_own_file}
        else:
            files = (fault.file, *self.importers[fault.file])
            every = [self.executed.get(file, {}).values() for file in files]
            numbers = {n for lines in every for those in lines for n in those}

        def order(test: Test) -> tuple[bool, bool, bool, float, str]:
            path = Path(test.file)
            another = path.name != Path(of_own_file).name
            return test.engines, another, path.parent != own.parent, test.seconds, test.name

        tests = sorted((self.tests[n] for n in numbers if n in self.tests), key=order)
        total = 0.0
        found: list[Test] = []
        for test in tests:
            total += test.seconds
            if found and total > most_s:
                break
            found.append(test)
        return found


@dataclass(frozen=True)
class Outcome:
    """The outcome of a fault: the test that killed it ("": none), and that one's message.

    `tests` were selected for it, and took so many `seconds`, starting of engines included.
    """

    fault: Fault
    by: str
    said: str
    tests: int
    seconds: float

    @property
    def killed(self) -> bool:
        """Whether a test failed."""
        return bool(self.by)


def copied(checkout: Path, root: Path) -> Path:
    """Copies what tests need, and compiles it; returns `root`.

    A compiled file is used where the source's hash is right: a fault may leave size and time alone.
    """
    root.mkdir(parents=True)
    for name in COPIED:
        if (checkout / name).is_dir():
            ignored = shutil.ignore_patterns(*NOT_COPIED)
            shutil.copytree(checkout / name, root / name, ignore=ignored)
        elif (checkout / name).exists():
            shutil.copy(checkout / name, root / name)
    mode = PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(root, quiet=2, workers=0, invalidation_mode=mode)
    return root


def observe(root: Path, folder: Path, files: Sequence[str], tests: Sequence[str]) -> Observed:
    """Runs the quick tests at the paths `tests` in a copy, and records which lines of `files` run.

    The records are in `folder`, which is made.
    """
    folder.mkdir(parents=True)
    watched = witness.prepare(folder / "witness", root, files)
    arguments = ["-m", "not slow and not gpu", *tests]
    _pytest(root, folder, arguments, {}, watched, limit_s=None)
    return observed(root, folder)


def observed(root: Path, folder: Path) -> Observed:
    """The records that `observe` has left in a folder, of the copy at `root`."""
    begun: dict[str, dict[str, Any]] = {}
    seconds: dict[str, float] = {}
    failed: dict[str, None] = {}
    for row in _rows(folder):
        if "number" in row:
            begun[row["test"]] = row
        elif row["phase"] == "call":
            seconds[row["test"]] = row["seconds"]
        if row.get("outcome") == "failed":
            failed[row["test"]] = None
    tests = {
        begun[name]["number"]: Test(name, taken, begun[name]["engines"])
        for name, taken in seconds.items()
        if name not in failed
    }
    executed = witness.read(folder / "witness")
    return Observed(tests, tuple(failed), executed, _importers(root, executed))


def _importers(root: Path, files: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """For each of these files, those of them that import something from it by its name."""
    imported = {
        file: {
            node.module
            for node in ast.walk(ast.parse((root / file).read_text()))
            if isinstance(node, ast.ImportFrom)
        }
        for file in files
    }
    return {
        file: tuple(other for other, names in imported.items() if _module(file) in names)
        for file in imported
    }


def _module(file: str) -> str:
    return ".".join(Path(file).with_suffix("").parts)


def attempt(root: Path, folder: Path, fault: Fault, tests: Sequence[Test]) -> Outcome:
    """Plants a fault in a copy, runs tests in their order until one fails, and removes it again."""
    begin = time.perf_counter()
    if not tests:
        return Outcome(fault, "", "no quick test executes it", 0, 0.0)
    folder.mkdir(parents=True)
    path = root / fault.file
    source = path.read_text()
    path.write_text(fault.planted(source))
    try:
        limit_s = START_S + SLOWER * sum(test.seconds for test in tests)
        files = dict.fromkeys(test.file for test in tests)
        allowed = {test.name: test.allowed_s for test in tests}
        status = _pytest(root, folder, ["-x", *files], allowed, {}, limit_s)
    finally:
        path.write_text(source)
    by, said = verdict(_rows(folder), status)
    return Outcome(fault, by, said, len(tests), time.perf_counter() - begin)


def verdict(found: Sequence[Mapping[str, Any]], status: int | None) -> tuple[str, str]:
    """The test that failed, and its message; "" and what is to be said where none did.

    A test that hangs ends pytest with a status. All of them together being slow (None) may be
    another process's fault, and kills nothing.
    """
    if status == 0:
        return "", ""
    for row in found:
        if row.get("outcome") == "failed":
            return row["test"], row["said"]
    if status is None:
        return "", "undecided: its tests took longer than they may"
    if found and status != 5:  # pytest's for no tests
        return found[-1]["test"], f"ended with status {status}"
    return "collection", "the tests cannot be collected"


def _rows(folder: Path) -> list[dict[str, Any]]:
    found = folder / "found"
    return [json.loads(line) for line in found.read_text().splitlines()] if found.exists() else []


def _pytest(
    root: Path,
    folder: Path,
    arguments: Sequence[str],
    allowed: Mapping[str, float],
    environment: Mapping[str, str],
    limit_s: float | None,
) -> int | None:
    """Runs pytest in a copy; its exit status, or None if it took more than `limit_s` seconds."""
    mark = uuid4().hex
    own = {
        "PYTHONPATH": str(root),
        "PYTHONDONTWRITEBYTECODE": "1",
        FOUND: str(folder / "found"),
        OWN: mark,
        **environment,
    }
    if allowed:
        (folder / "chosen").write_text(json.dumps(allowed))
        own[CHOSEN] = str(folder / "chosen")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "tests.mutants.observer", "-o", "faulthandler_timeout=0"]
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=root,
            env={**os.environ, **own},
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process, mark)


def _end(process: "subprocess.Popen[bytes]", mark: str) -> None:
    """Kills what is left of a run: a fault may keep processes from ending by themselves."""
    if process.poll() is None:
        process.kill()
        process.wait()
    for other in psutil.process_iter():
        with suppress(psutil.Error):
            if other.environ().get(OWN) == mark:
                other.kill()
