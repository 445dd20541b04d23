"""Tries hostile files on every reader: none may execute, or change what is alive."""

import codecs
import faulthandler
import os
import random
import resource
import shutil
import sys
import threading
import traceback
import types
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.hostile import samples
from tests.hostile.changes import changed
from tests.hostile.readers import READERS, Reader
from workbench.plan.graph.graph import Graph

HANGS_S = 120
MOST_BYTES = 4 << 30  # beyond what reading all samples took
RUNS = ("exec", "compile", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn")
RUNS += ("os.spawn", "subprocess.Popen", "pickle.find_class", "ctypes.dlopen", "marshal.loads")
RUNS += ("object.__setattr__", "object.__delattr__", "socket.connect", "socket.bind")
RUNS += ("code.__new__",)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
LIVE = ("torch", "torch.serialization", "torch._utils", "torch.storage", "pathlib", "collections")
LIVE += ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
LIVE += ("builtins", "os", "copyreg", "workbench.plan.plans.plan", "workbench.plan.experiment.sync")
ENCODINGS = (
    "cp437",
    "utf-8-sig",
    "utf-16",
    "utf-16-be",
    "utf-16-le",
    "utf-32",
    "utf-32-be",
    "utf-32-le",
)
PLANTED = "from pathlib import Path\nPath(__file__).with_name('executed').touch()\n"


@dataclass
class Tripwire:
    """Notes what happens while files are read; an audit hook stays as long as its process does.

    Attributes:
        found: what was executed, imported, written or asked of what is planted.
        opened: how often the file that was changed was opened.
    """

    found: Counter[str] = field(default_factory=Counter)
    opened: int = 0
    _path: str = ""
    _again: bytes = b""
    _is_armed: bool = False
    _may_write: bool = False
    _busy: threading.local = field(default_factory=threading.local)

    def __post_init__(self) -> None:
        sys.addaudithook(self._note)

    @contextmanager
    def armed(self, path: Path, again: bytes, *, may_write: bool) -> Iterator[None]:
        """Notes what the body does; who opens a file a second time finds something else."""
        self._may_write = may_write
        self._path, self._again, self.opened, self._is_armed = str(path), again, 0, True
        try:
            yield
        finally:
            self._is_armed = False

    def touched(self, what: str) -> None:
        """Notes that a planted object was asked for something."""
        if self._is_armed:
            self.found[f"touched {what}"] += 1

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._is_armed or getattr(self._busy, "is_so", False):
            return
        self._busy.is_so = True
        try:
            if event == "open":
                self._open(args[0], args[2])
            elif event == "import":
                self.found[f"import {args[0]}"] += 1
            elif event in RUNS:
                self.found[f"{event} {str(args)[:100]}"] += 1
        finally:
            self._busy.is_so = False

    def _open(self, path: Any, flags: Any) -> None:
        if isinstance(flags, int) and flags & WRITES and not self._may_write:
            self.found[f"written {Path(str(path)).name}"] += 1
        if str(path) == self._path:
            self.opened += 1
            if self.opened == 2 and self._again:
                Path(self._path).write_bytes(self._again)


class Planted(types.ModuleType):
    """A module that is imported already, and says so when it is asked for anything."""

    tripwire: Tripwire

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__"):
            type(self).tripwire.touched(name)
            return print
        return super().__getattribute__(name)


def planted(folder: Path, tripwire: Tripwire) -> None:
    """Puts there what files will name: imported or not, and as extensions of a package."""
    (folder / "planted_file.py").write_text(PLANTED)
    installed = folder / "planted-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n")
    kinds = ("algorithms", "codecs", "data", "schemes", "strategies", "rules")
    groups = (f"[workbench.{kind}]\nplanted_{kind} = planted_file:Thing\n" for kind in kinds)
    (installed / "entry_points.txt").write_text("\n".join(groups))
    sys.path.insert(0, str(folder))
    Planted.tripwire = tripwire
    sys.modules["planted_live"] = Planted("planted_live")


def alive() -> dict[str, int]:
    """The identity of everything in some live modules, and in their classes and functions."""
    found = {}
    for name in LIVE:
        module = sys.modules[name]
        for key, value in list(vars(module).items()):
            found[f"{name}.{key}"] = id(value)
            if isinstance(value, type | types.FunctionType):
                for inner, held in list(vars(value).items()):
                    found[f"{name}.{key}.{inner}"] = id(held)
            if isinstance(value, types.FunctionType):
                found[f"{name}.{key}()"] = hash((id(value.__code__), id(value.__defaults__)))
    return found


def tried(reader: Reader, sample: Path, draw: random.Random, tripwire: Tripwire) -> str:
    """Changes a file of a sample, and reads it; what became of it."""
    with TemporaryDirectory() as place:
        folder = Path(place, "sample")
        shutil.copytree(sample / reader.kind, folder)
        file = draw.choice(sorted(path for path in folder.glob(reader.files) if path.is_file()))
        was = file.read_bytes()
        changed(file, draw)
        now = file.read_bytes()
        if draw.random() < 0.3:  # innocent where it is opened first
            file.write_bytes(was)
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        try:
            with warnings.catch_warnings(), tripwire.armed(file, now, may_write=reader.writes):
                warnings.simplefilter("ignore")
                reader.read(folder, file)
            return "safe"
        except reader.refuses:
            return "refused"
        except Exception as error:
            frames = [f for f in traceback.extract_tb(error.__traceback__) if "/workbench/" in f[0]]
            at = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
            return f"{type(error).__name__} at {at}: {str(error)[:60]}"
        finally:
            faulthandler.cancel_dump_traceback_later()


def fuzz(count: int, seed: int = 0) -> tuple[dict[str, Counter[str]], Counter[str], int]:
    """Tries files; (what became of them by reader, what was executed, live objects changed)."""
    draw, tripwire = random.Random(seed), Tripwire()
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in READERS}
    with TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(Path(place, "state")))
        sample = Path(place, "samples")
        samples.make(sample)
        # Their author knows how a model's description is signed off, and does so.
        patch.setattr(Graph, "fingerprint", property(lambda self: "0" * 12))
        samples.sign_off(sample)
        planted(Path(place), tripwire)
        for reader in READERS.values():  # what it imports late is there then
            for file in sorted(p for p in (sample / reader.kind).glob(reader.files) if p.is_file()):
                with TemporaryDirectory() as warm:
                    shutil.copytree(sample / reader.kind, Path(warm, "sample"))
                    copy = Path(warm, "sample", file.relative_to(sample / reader.kind))
                    reader.read(Path(warm, "sample"), copy)
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MOST_BYTES, taken + MOST_BYTES))
        for name in ENCODINGS:  # which zipfile and json import late
            codecs.lookup(name)
        before = alive()
        for _ in range(count):
            name = draw.choice(sorted(READERS))
            outcomes[name][tried(READERS[name], sample, draw, tripwire)] += 1
        after = alive()
        if Path(place, "executed").exists() or "planted_file" in sys.modules:
            tripwire.found["planted_file was imported"] += 1
        sys.path.remove(place)
        del sys.modules["planted_live"]
    moved = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    for key in sorted(moved):
        tripwire.found[f"changed {key}"] += 1
    return outcomes, tripwire.found, len(moved)


def main(count: int, seed: int = 0) -> int:
    """Prints what became of so many files; 1 where one did more than to be refused or safe."""
    outcomes, found, moved = fuzz(count, seed)
    for name, each in outcomes.items():
        print(f"{name}: {dict(each.most_common(8))}")
    executed = sum(times for what, times in found.items() if not what.startswith("changed "))
    print(f"{count} files: {executed} executed, {moved} live objects changed; {dict(found)}")
    return int(bool(found) or set().union(*outcomes.values()) > {"refused", "safe"})
