"""The benchmarks by name, and how one is run, or all: with progress, keeping what was measured."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from workbench.bench.harness.progress import Progress
from workbench.bench.harness.report import Report, machine, versions
from workbench.plan.io.files import write_whole

UNFINISHED = "It has not ended: these are the figures so far."
INTERRUPTED = "It was interrupted: these are the figures before."


@dataclass(frozen=True)
class Bench:
    """One benchmark.

    Attributes:
        place: "module" or "module:function" of this package; `run` is the function if none is
            named. It takes a `Progress` and `quick`, and yields a report of all results so far
            whenever there are more.
        what: what it measures.
        minutes: how long it takes on four cores, about, without a budget.
        options: the names of its own keywords.
    """

    place: str
    what: str
    minutes: float
    options: tuple[str, ...] = ()

    def run(
        self,
        progress: Progress,
        *,
        quick: bool = False,
        keep: Callable[[Report], None] = lambda report: None,
        **options: Any,
    ) -> tuple[Report | None, bool]:
        """Runs it to its end, or until an interrupt.

        Args:
            progress: its budget and its only part, if there are any.
            quick: whether it is short and small.
            keep: takes each report, of all results so far.
            options: its own keywords.

        Returns:
            The last report, or None without results; and whether it was interrupted.
        """
        module, _, function = self.place.partition(":")
        run = getattr(import_module(f"workbench.bench.{module}"), function or "run")
        last: Report | None = None
        interrupted: tuple[str, ...] = ()
        try:
            for last in run(progress, quick=quick, **options):
                keep(_noted(last, UNFINISHED))
        except KeyboardInterrupt:
            interrupted = (INTERRUPTED,)
        if last is not None:
            last = _noted(last, *progress.notes(), *interrupted)
            keep(last)
        return last, bool(interrupted)


def _noted(report: Report, *notes: str) -> Report:
    return replace(report, notes=(*report.notes, *notes))


BENCHES: Mapping[str, Bench] = {
    "splitbrain": Bench(
        "splitbrain", "convolutions replicated, linear layers sharded, against torch's DDP", 20
    ),
    "lm": Bench(
        "lm", "a language model cut by heads and vocabulary, against torch's tensor parallelism", 8
    ),
    "collectives": Bench(
        "collectives", "all-reduce through shared memory, against gloo's", 10, ("algorithm",)
    ),
    "hierarchical": Bench(
        "collectives:run_on_hosts",
        "all-reduce over two emulated hosts with a shaped link, against gloo's",
        6,
    ),
    "codecs": Bench(
        "codecs", "what coding costs, against the time on a wire that it saves", 3, ("codec",)
    ),
    "exactness": Bench(
        "exactness",
        "every kind of model and plan, against the unsplit model",
        25,
        ("random", "seed"),
    ),
    "accuracy": Bench(
        "accuracy", "a hybrid VGG-11 on scikit-learn's digits, against one process", 25
    ),
    "loading": Bench("loading", "your own data, read ahead by workers, against data in place", 4),
    "predict": Bench(
        "predict.predict",
        "peak memory, traffic and time of a step, against what was predicted",
        40,
        ("cases_named",),
    ),
    "search": Bench("search", "the best plan, found and proven, and run against others", 10),
    "hetero": Bench(
        "hetero",
        "shares for engines of unequal speed, against equal ones and the fastest alone",
        25,
    ),
    "recovery": Bench(
        "recovery", "processes killed while runs train: what survives, and how soon", 30
    ),
    "jobserver": Bench("jobserver", "what the job server schedules, costs and lets through", 8),
    "widgets": Bench(
        "widgets", "the plan editor and a dashboard in Chromium: how soon, smooth and small", 15
    ),
    "pipesgd": Bench(
        "pipesgd", "pipelined SGD, on emulated hosts, against synchronous steps and torch's DDP", 30
    ),
}


def measure_all(
    path: Path,
    budget_s: float | None,
    *,
    quick: bool,
    benches: Mapping[str, Bench] = BENCHES,
    now: Callable[[], float] = time.monotonic,
) -> tuple[Mapping[str, Any], bool]:
    """Runs every benchmark, prints its table, and writes all results to a JSON file after each.

    A budget is divided as the benchmarks' usual times are; the rest of one's share goes to those
    after it. A benchmark that fails is named under "missing" with the reason.

    Returns:
        The content of the file, and whether it was interrupted.
    """
    began, reports, missing = now(), dict[str, Any](), dict[str, str]()
    content = {
        "day": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
        "benches": reports,
        "missing": missing,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    left = dict(benches)
    for name, bench in benches.items():
        share = bench.minutes / sum(one.minutes for one in left.values())
        del left[name]
        budget = None if budget_s is None else (budget_s - (now() - began)) * share
        progress, report, interrupted = Progress(budget_s=budget, now=now), None, False
        progress.say(f"bench {name}: {bench.what}")
        try:
            report, interrupted = bench.run(progress, quick=quick)
        except Exception as error:  # no Chromium, no root, out of memory: the others go on
            missing[name] = f"{type(error).__name__}: {error}"
        if report is not None:
            reports[name] = report.as_json()
            print(report.as_text(), end="\n\n", flush=True)
        elif interrupted:
            missing[name] = "It was interrupted before its first figure."
        write_whole(path, json.dumps(content, indent=2) + "\n")
        if interrupted:
            return content, True
    return content, False
