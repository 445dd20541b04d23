"""The report of a benchmark: a table as text, and JSON."""

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any

from workbench.hosts.host import probe
from workbench.plan.io.files import write_whole

Cell = str | int | float
Row = Mapping[str, Cell]
MIB = 2**20


@dataclass(frozen=True)
class Figure:
    """A measured ratio: its median over interleaved rounds, and its range."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Figure":
        """The figure of one sample for each round."""
        return cls(statistics.median(samples), min(samples), max(samples))

    @classmethod
    def ratio(cls, above: Sequence[float], below: Sequence[float]) -> "Figure":
        """The figure of the ratios of each round."""
        return cls.of([a / b for a, b in zip(above, below, strict=True)])

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.min:.3g} .. {self.max:.3g})"


@dataclass(frozen=True)
class Report:
    """The results of a benchmark.

    Attributes:
        bench: the benchmark's name.
        rows: the lines of the table; neighbours with the same columns share one table.
        figures: the ratios, by name.
        notes: the notes that a reader needs to judge them.
        engines: the engines whose speed is measured, each with a thread of its own; 0: none are.
    """

    bench: str
    rows: tuple[Row, ...]
    figures: Mapping[str, Figure]
    notes: tuple[str, ...] = ()
    engines: int = 0

    @property
    def crowded(self) -> str:
        """That engines share devices, as a sentence; "" if they do not."""
        devices = Devices.here()
        if self.engines <= devices.count:
            return ""
        return f"Oversubscribed: {self.engines} engines on {devices}."

    def as_text(self) -> str:
        """The table, the figures, the notes, and the machine."""
        lines = [f"bench {self.bench}"]
        for _, rows in groupby(self.rows, key=tuple):
            lines += [*_table(list(rows)), ""]
        width = max((len(name) for name in self.figures), default=0)
        lines += [f"{name.ljust(width)}  {figure}" for name, figure in self.figures.items()]
        lines += ["", *self.notes, *filter(None, [self.crowded])]
        lines += [", ".join(f"{k}: {v}" for k, v in machine().items())]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """{"bench", "machine", "versions", "engines", "rows", "figures", "notes"}."""
        return {
            "bench": self.bench,
            "machine": machine(),
            "versions": versions(),
            "engines": self.engines,
            "oversubscribed": bool(self.crowded),
            "rows": [dict(row) for row in self.rows],
            "figures": {name: asdict(figure) for name, figure in self.figures.items()},
            "notes": list(self.notes),
        }

    def write(self, path: Path) -> None:
        """Writes `as_json()` to a file, atomically."""
        write_whole(path, json.dumps(self.as_json(), indent=2) + "\n")


def machine() -> dict[str, Cell]:
    """The properties of this machine that affect speed."""
    host = probe()
    gpus: dict[str, Cell] = {"gpus": ", ".join(gpu.name for gpu in host.gpus)}
    return {
        **(gpus if host.gpus else {}),
        "cpu": _cpu(),
        "cores": len(host.cores),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


@dataclass(frozen=True)
class Devices:
    """How many devices of this machine engines can have for themselves, and what they are.

    They are "GPUs" where there are any, else physical "cores", within a container's quota.
    """

    count: int
    kind: str

    @classmethod
    def here(cls) -> "Devices":
        """Those that this process may use."""
        host = probe()
        if host.gpus:
            return cls(len(host.gpus), "GPUs")
        return cls(max(1, int(min(len(host.cores), host.quota or len(host.cores)))), "cores")

    def __str__(self) -> str:
        return f"{self.count} {self.kind if self.count > 1 else self.kind[:-1]}"


def engines_here(at_most: int = 8) -> int:
    """As many engines as devices, so that none waits for another's; two at least."""
    return max(2, min(Devices.here().count, at_most))


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that affect the figures."""
    known = {"python": platform.python_version()}
    for name in ("parallel-workbench", "torch", "torchvision", "ipyparallel"):
        try:
            known[name] = version(name)
        except PackageNotFoundError:
            known[name] = "not installed"
    return known


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _table(rows: Sequence[Mapping[str, Cell]]) -> list[str]:
    names = list(rows[0])
    cells = [names, *([_shown(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    return [
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in cells)
    ]


def _shown(value: Cell) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
