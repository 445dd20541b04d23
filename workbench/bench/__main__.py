"""`python -m workbench.bench NAME [--quick] [--json FILE] [--plot FILE]`: the way to measure."""

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from workbench.bench.plot import charts_svg
from workbench.bench.report import Report

# name: a module of this package, its function (quick: bool) -> Report, `run` if none is named, and
# what that measures
BENCHES = {
    "accuracy": ("accuracy", "a hybrid VGG-11 on scikit-learn's digits, against one process"),
    "exactness": ("exactness.exactness", "every kind of model and plan, against the unsplit model"),
    "collectives": ("collectives.collectives", "all-reduce through shared memory, against gloo's"),
    "codecs": ("codecs", "what coding costs, against the time on a wire that it saves"),
    "hetero": (
        "hetero.hetero",
        "shares for engines of unequal speed, against equal ones and the fastest alone",
    ),
    "hierarchical": (
        "collectives.collectives:run_on_hosts",
        "all-reduce over two emulated hosts with a shaped link, against gloo's",
    ),
    "loading": ("loading", "your own data, read ahead by workers, against data drawn in place"),
    "models": ("models", "torchvision's classifiers: all traced, each family's smallest verified"),
    "pipesgd": (
        "pipesgd.pipesgd",
        "pipelined SGD, on emulated hosts, against synchronous steps and torch's DDP",
    ),
    "jobserver": ("jobserver.jobserver", "what the job server schedules, costs and lets through"),
    "predict": ("predict.predict", "peak memory and traffic of a step, against what was predicted"),
    "recovery": (
        "recovery.recovery",
        "engines and server killed while runs train: what survives, and how soon",
    ),
    "search": ("search", "the best plan, found and proven, and run against others"),
    "widgets": (
        "widgets.widgets",
        "the plan editor and a dashboard in Chromium: how soon, smooth and small they are",
    ),
    "splitbrain": (
        "splitbrain",
        "convolutions replicated, linear layers sharded, against torch's DDP",
    ),
}
# bench: its own options
FURTHER = {
    "exactness": ("mutants", "random", "seed"),
    "collectives": ("algorithm",),
    "codecs": ("codec",),
    "predict": ("only", "cases_named"),
}


def main(arguments: list[str] | None = None) -> int:
    """Runs one benchmark and prints its report."""
    listed = "\n".join(f"  {name:<14}{what}" for name, (_, what) in BENCHES.items())
    parser = argparse.ArgumentParser(
        prog="python -m workbench.bench",
        description="Measures this machine, side by side and interleaved.",
        epilog=f"benchmarks:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=sorted(BENCHES), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and a smaller model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw it here, as SVG")
    of_exactness = parser.add_argument_group("of exactness, instead of what it does else")
    of_exactness.add_argument("--mutants", type=int, metavar="N", help="plant N faults, one a run")
    of_exactness.add_argument("--random", type=int, metavar="N", help="judge N drawn cases")
    of_exactness.add_argument("--seed", type=int, metavar="S", help="which; 0 where none is given")
    of_predict = parser.add_argument_group("of predict")
    of_predict.add_argument("--only", metavar="PART", help="memory: without times, in minutes")
    of_predict.add_argument(
        "--cases", dest="cases_named", metavar="NAME", help="those of a model, or model and plan"
    )
    own = parser.add_argument_group("besides what is built in: 'module:attribute' or entry point")
    own.add_argument("--algorithm", metavar="WHICH", help="of collectives: an all-reduce algorithm")
    own.add_argument("--codec", metavar="WHICH", help="of codecs: a codec")
    options = parser.parse_args(arguments)
    further: dict[str, Any] = {}
    for bench, names in FURTHER.items():
        given = {name: getattr(options, name) for name in names}
        given = {name: value for name, value in given.items() if value is not None}
        if given and options.name != bench:
            parser.error(f"--{', --'.join(given)}: of {bench} only, not of {options.name}")
        further |= given
    module, _, function = BENCHES[options.name][0].partition(":")
    run = getattr(import_module(f"workbench.bench.{module}"), function or "run")
    report: Report = run(quick=options.quick, **further)
    print(report.as_text())
    if options.json is not None:
        report.write(options.json)
    if options.plot is not None:
        options.plot.write_text(charts_svg(report.charts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
