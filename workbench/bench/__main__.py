"""`python -m workbench.bench NAME [--quick] [--budget MINUTES]`: the way to measure."""

import argparse
import sys
from pathlib import Path
from typing import Any

from workbench.bench.benches import BENCHES
from workbench.bench.page import measure_all
from workbench.bench.plot import charts_svg
from workbench.bench.progress import Progress, UnknownPartError

ALL = "all"
PAGE = Path("build/measured")
INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Runs one benchmark and prints its report, or all of them and writes the page."""
    listed = "\n".join(f"  {name:<14}{bench.what}" for name, bench in BENCHES.items())
    parser = argparse.ArgumentParser(
        prog="python -m workbench.bench",
        description="Measures this machine, side by side and interleaved. An interrupt (Ctrl-C) "
        "ends a benchmark with what it has found.",
        epilog=f'benchmarks:\n{listed}\n  {ALL:<14}all of them; writes the page "Measured"',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=[*sorted(BENCHES), ALL], metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and a smaller model")
    parser.add_argument(
        "--budget",
        type=_minutes,
        metavar="MINUTES",
        help="how long it may take, about: rounds and cases follow from it",
    )
    parser.add_argument("--only", metavar="PART", help="one part; an unknown one lists them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw it here, as SVG")
    of_all = parser.add_argument_group("of all")
    of_all.add_argument(
        "--into", type=Path, metavar="FOLDER", help=f"of measured.md and .json; else {PAGE}"
    )
    of_exactness = parser.add_argument_group("of exactness, instead of what it does else")
    of_exactness.add_argument("--mutants", type=int, metavar="N", help="plant N faults, one a run")
    of_exactness.add_argument("--random", type=int, metavar="N", help="judge N drawn cases")
    of_exactness.add_argument("--seed", type=int, metavar="S", help="which; 0 where none is given")
    of_predict = parser.add_argument_group("of predict")
    of_predict.add_argument(
        "--cases", dest="cases_named", metavar="NAME", help="those of a model, or model and plan"
    )
    own = parser.add_argument_group("besides what is built in: 'module:attribute' or entry point")
    own.add_argument("--algorithm", metavar="WHICH", help="of collectives: an all-reduce algorithm")
    own.add_argument("--codec", metavar="WHICH", help="of codecs: a codec")
    options = parser.parse_args(arguments)
    further = _own_options(parser, options)
    budget_s = None if options.budget is None else 60 * options.budget
    if options.name == ALL:
        for name in ("only", "json", "plot"):
            if getattr(options, name) is not None:
                parser.error(f"--{name}: of one benchmark, not of {ALL}")
        folder = options.into or PAGE
        found, interrupted = measure_all(folder, budget_s, quick=options.quick)
        print(found.as_markdown())
        print(f"written: {folder}/measured.md and measured.json", file=sys.stderr)
        return INTERRUPTED if interrupted else int(bool(found.missing))
    if options.into is not None:
        parser.error(f"--into: of {ALL} only; --json writes a benchmark's result")
    try:
        report, interrupted = BENCHES[options.name].run(
            Progress(budget_s=budget_s, only=options.only),
            quick=options.quick,
            keep=lambda found: None if options.json is None else found.write(options.json),
            **further,
        )
    except UnknownPartError as error:
        parser.error(f"--only: {error}")
    if report is not None:
        print(report.as_text())
        if options.plot is not None:
            options.plot.write_text(charts_svg(report.charts))
    return INTERRUPTED if interrupted else 0


def _own_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict[str, Any]:
    """The keywords of the benchmark that is named; those of others are refused."""
    found: dict[str, Any] = {}
    for bench, names in ((name, one.options) for name, one in BENCHES.items()):
        given = {name: getattr(options, name) for name in names}
        given = {name: value for name, value in given.items() if value is not None}
        if given and options.name != bench:
            parser.error(f"--{', --'.join(given)}: of {bench} only, not of {options.name}")
        found |= given
    return found


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: more than 0 minutes are needed")
    return minutes


if __name__ == "__main__":
    sys.exit(main())
