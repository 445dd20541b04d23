"""All benchmarks, one after another, and the page of their figures: `workbench.bench all`.

    measured.md      machine, versions, date; of each benchmark the figures, medians with their
                     ranges, and the notes that a reader needs
    measured.json    the same with all rows, for programs

Both are written after each benchmark, so that an interrupted run keeps what it has.
"""

import json
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from workbench.bench.benches import BENCHES, Bench
from workbench.bench.progress import Progress
from workbench.bench.report import Report, machine, versions
from workbench.plan.io.files import write_whole

WIDTH = 150  # of a line of the page


@dataclass
class Measured:
    """What all benchmarks have found.

    Attributes:
        day: when.
        reports: the report of each benchmark.
        missing: why a benchmark has none.
    """

    day: str
    reports: dict[str, Report] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Writes `measured.md` and `measured.json`."""
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "measured.md", self.as_markdown())
        found = {name: report.as_json() for name, report in self.reports.items()}
        content = {
            "day": self.day,
            "machine": machine(),
            "versions": versions(),
            "benches": found,
            "missing": self.missing,
        }
        write_whole(folder / "measured.json", json.dumps(content, indent=2) + "\n")

    def as_markdown(self) -> str:
        """The page."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield from ("# Measured", "")
        yield from _paragraph(
            "Every figure comes from `python -m workbench.bench NAME`; `all` has written this "
            f"page, on {self.day}. A figure is the median of interleaved rounds or of cases, "
            "beside its range."
        )
        about = {**machine(), **versions()}
        yield from ("| | |", "|---|---|")
        yield from (f"| {name} | {value} |" for name, value in about.items())
        for name, report in self.reports.items():
            yield from ("", f"## `{name}`: {BENCHES[name].what}", "")
            if report.crowded:
                yield from _paragraph(report.crowded)
            yield from ("| figure | median | range |", "|---|---|---|")
            for label, one in report.figures.items():
                yield f"| `{label}` | {one.median:.3g} | {one.min:.3g} .. {one.max:.3g} |"
            yield ""
            for note in report.notes:
                yield from _paragraph(note, "* ")
        if self.missing:
            yield from ("", "## Not measured", "")
            for name, why in self.missing.items():
                yield from _paragraph(f"`{name}`: {why}", "* ")


def measure_all(
    folder: Path,
    budget_s: float | None,
    *,
    quick: bool,
    benches: Mapping[str, Bench] = BENCHES,
    now: Callable[[], float] = time.monotonic,
) -> tuple[Measured, bool]:
    """Runs every benchmark and writes the page.

    A budget is divided as the benchmarks' usual times are; what one does not use, the later ones
    have.

    Args:
        folder: where the page is written.
        budget_s: the seconds for all of them; None: as many as they take.
        quick: whether they are short and small.
        benches: the benchmarks by name.
        now: the clock, in seconds.

    Returns:
        What was found, and whether it was interrupted.
    """
    found, began = Measured(time.strftime("%Y-%m-%d")), now()
    coming = dict(benches)
    while coming:
        share = next(iter(coming.values())).minutes / sum(one.minutes for one in coming.values())
        name = next(iter(coming))
        bench = coming.pop(name)
        left = None if budget_s is None else (budget_s - (now() - began)) * share
        progress = Progress(budget_s=left, now=now)
        progress.say(f"bench {name}: {bench.what}")
        interrupted = False
        try:
            report, interrupted = bench.run(progress, quick=quick)
        except Exception as error:  # no Chromium, no root, out of memory: the others go on
            report, found.missing[name] = None, f"{type(error).__name__}: {error}"
        if report is not None:
            found.reports[name] = report
        elif interrupted:
            found.missing[name] = "It was interrupted before its first figure."
        found.write(folder)
        if interrupted:
            return found, True
    return found, False


def _paragraph(text: str, begin: str = "") -> list[str]:
    lines = textwrap.wrap(
        text,
        WIDTH,
        initial_indent=begin,
        subsequent_indent=" " * len(begin),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines if begin else [*lines, ""]
