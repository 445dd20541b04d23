"""The benchmarks by name, and how one is run: with its progress, and keeping what it has found."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from workbench.bench.progress import Progress
from workbench.bench.report import Report


@dataclass(frozen=True)
class Bench:
    """One benchmark.

    Attributes:
        place: "module" or "module:function" of this package; `run` is the function if none is
            named. It takes a `Progress` and `quick`, and yields a report of all that was found so
            far whenever there is more.
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
            keep: takes each report, of all that was found so far.
            options: its own keywords.

        Returns:
            The last report, None if nothing was found; and whether it was interrupted.
        """
        module, _, function = self.place.partition(":")
        run = getattr(import_module(f"workbench.bench.{module}"), function or "run")
        last: Report | None = None
        interrupted: tuple[str, ...] = ()
        try:
            for last in run(progress, quick=quick, **options):
                keep(_noted(last, "It has not ended: this is what was found so far."))
        except KeyboardInterrupt:
            interrupted = ("It was interrupted: this is what was found before.",)
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
        "collectives.collectives",
        "all-reduce through shared memory, against gloo's",
        10,
        ("algorithm",),
    ),
    "hierarchical": Bench(
        "collectives.collectives:run_on_hosts",
        "all-reduce over two emulated hosts with a shaped link, against gloo's",
        6,
    ),
    "exactness": Bench(
        "exactness.exactness",
        "every kind of model and plan, against the unsplit model",
        25,
        ("mutants", "random", "seed"),
    ),
    "accuracy": Bench(
        "accuracy", "a hybrid VGG-11 on scikit-learn's digits, against one process", 25
    ),
    "models": Bench(
        "models", "torchvision's classifiers: all traced, each family's smallest verified", 15
    ),
    "packages": Bench(
        "packages.packages",
        "timm's and transformers' models as they are: traced, cut, verified",
        45,
    ),
    "loading": Bench("loading", "your own data, read ahead by workers, against data in place", 4),
    "codecs": Bench(
        "codecs",
        "what coding costs, against the time on a wire that it saves",
        3,
        ("codec",),
    ),
    "predict": Bench(
        "predict.predict",
        "peak memory, traffic and time of a step, against what was predicted",
        40,
        ("cases_named",),
    ),
    "search": Bench("search", "the best plan, found and proven, and run against others", 10),
    "hetero": Bench(
        "hetero.hetero",
        "shares for engines of unequal speed, against equal ones and the fastest alone",
        25,
    ),
    "recovery": Bench(
        "recovery.recovery",
        "engines and server killed while runs train: what survives, and how soon",
        40,
    ),
    "jobserver": Bench(
        "jobserver.jobserver", "what the job server schedules, costs and lets through", 8
    ),
    "widgets": Bench(
        "widgets.widgets",
        "the plan editor and a dashboard in Chromium: how soon, smooth and small they are",
        15,
    ),
    "pipesgd": Bench(
        "pipesgd.pipesgd",
        "pipelined SGD, on emulated hosts, against synchronous steps and torch's DDP",
        30,
    ),
}
