"""Records which test executes which lines, in pytest's process and all that it starts.

Ranks are processes of their own. Each of them finds a `sitecustomize` on its path, which calls
`start` here; then it records every executed line of the watched files, with the number of the
running test, which pytest's process keeps in a shared file (observer.py). A record is written at
once, since ranks are killed. Code that shows nothing new in many calls is not watched any more in
that test: brute force calls the same functions a million times.
"""

import mmap
import os
import struct
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

FOLDER, FILES = "WORKBENCH_WITNESS", "WORKBENCH_WITNESSED"
"""Environment variables: the folder of records; the list of watched files."""

_TURN = struct.Struct("<I")
_RECORD = struct.Struct("<III")  # test, file, line
NO_TEST = 0
CALLS_IN_VAIN = 300

# file -> line -> numbers of the tests that execute it
Executed = dict[str, dict[int, set[int]]]


def prepare(folder: Path, root: Path, files: Sequence[str]) -> dict[str, str]:
    """Makes `folder` for records of `files`, which are under `root`.

    Returns the environment variables with which a process, and all that it starts, is watched.
    """
    folder.mkdir()
    (folder / "turn").write_bytes(_TURN.pack(NO_TEST))
    (folder / "files").write_text("\n".join(files))
    (folder / "path").mkdir()
    start = "from tests.mutants.witness import start\n\nstart()\n"
    (folder / "path" / "sitecustomize.py").write_text(start)
    path = os.pathsep.join([str(folder / "path"), str(root)])
    return {FOLDER: str(folder), "PYTHONPATH": path, FILES: str(root)}


def next_test(number: int) -> None:
    """Marks in pytest's process that test `number` begins, if tests are watched."""
    if FOLDER in os.environ:
        with Path(os.environ[FOLDER], "turn").open("r+b", buffering=0) as turn:
            turn.write(_TURN.pack(number))
        if sys.gettrace() is None:  # Python drops a hook that fails, as in too deep a recursion
            sys.settrace(threading.gettrace())


def read(folder: Path) -> Executed:
    """The records of all processes."""
    files = (folder / "files").read_text().splitlines()
    executed: Executed = {file: defaultdict(set) for file in files}
    for path in folder.glob("*.lines"):
        content = path.read_bytes()
        whole = len(content) - len(content) % _RECORD.size
        for test, file, line in _RECORD.iter_unpack(content[:whole]):
            executed[files[file]][line].add(test)
    return executed


def start() -> None:
    """Watches all threads of this process, if the environment says so."""
    if FOLDER not in os.environ:
        return
    trace = _Witness(Path(os.environ[FOLDER]), Path(os.environ[FILES])).trace
    threading.settrace(trace)
    sys.settrace(trace)


class _Witness:
    def __init__(self, folder: Path, root: Path) -> None:
        files = (folder / "files").read_text().splitlines()
        self._files = {str(root / file): index for index, file in enumerate(files)}
        with (folder / "turn").open("rb") as turn:
            self._turn = mmap.mmap(turn.fileno(), _TURN.size, access=mmap.ACCESS_READ)
        self._out = (folder / f"{os.getpid()}.lines").open("ab", buffering=0)
        self._known: dict[CodeType, int | None] = {}
        self._test = NO_TEST
        self._seen: set[tuple[int, int]] = set()
        self._in_vain: dict[CodeType, int] = {}  # calls since the last new line

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Python's hook for calls: watches the lines of code in watched files."""
        code = frame.f_code
        try:
            file = self._known[code]
        except KeyError:
            file = self._known[code] = self._files.get(code.co_filename)
        if file is None:
            return None
        self._turn_to_test()
        calls = self._in_vain[code] = self._in_vain.get(code, 0) + 1
        return self._line if calls <= CALLS_IN_VAIN else None

    def _turn_to_test(self) -> None:
        (test,) = _TURN.unpack(self._turn)
        if test != self._test:
            self._test, self._seen, self._in_vain = test, set(), {}

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self._turn_to_test()
            file = self._known[frame.f_code]
            assert file is not None
            key = file, frame.f_lineno
            if key not in self._seen:
                self._seen.add(key)
                self._in_vain[frame.f_code] = 0
                self._out.write(_RECORD.pack(self._test, *key))
        return self._line
