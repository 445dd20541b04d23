"""`python -m workbench.bench NAME [--quick] [--budget MINUTES]`: the way to measure."""

import argparse
import sys
from pathlib import Path
from typing import Any

from workbench.bench.benches import BENCHES, measure_all
from workbench.bench.harness.progress import Progress, UnknownPartError

ALL = "all"
MEASURED = Path("build/measured.json")
INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Runs one benchmark, or all of them, and prints the reports."""
    listed = "\n".join(f"  {name:<14}{bench.what}" for name, bench in BENCHES.items())
    parser = argparse.ArgumentParser(
        prog="python -m workbench.bench",
        description="Measures this machine, side by side and interleaved. An interrupt (Ctrl-C) "
        "ends a benchmark with the figures so far.",
        epilog=f"benchmarks:\n{listed}\n  {ALL:<14}all of them",
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
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help=f"also write the result here; {ALL} writes {MEASURED} else",
    )
    exactness = parser.add_argument_group("of exactness, instead of its own models")
    exactness.add_argument("--random", type=int, metavar="N", help="judge N drawn cases")
    exactness.add_argument("--seed", type=int, metavar="S", help="which; 0 where none is given")
    predict = parser.add_argument_group("of predict")
    predict.add_argument(
        "--cases", dest="cases_named", metavar="NAME", help="those of a model, or model and plan"
    )
    own = parser.add_argument_group("besides what is built in: 'module:attribute' or entry point")
    own.add_argument("--algorithm", metavar="WHICH", help="of collectives: an all-reduce algorithm")
    own.add_argument("--codec", metavar="WHICH", help="of codecs: a codec")
    options = parser.parse_args(arguments)
    own_options = _own_options(parser, options)
    budget_s = None if options.budget is None else 60 * options.budget
    if options.name == ALL:
        if options.only is not None:
            parser.error(f"--only: of one benchmark, not of {ALL}")
        path = options.json or MEASURED
        content, interrupted = measure_all(path, budget_s, quick=options.quick)
        print(f"written: {path}", file=sys.stderr)
        return INTERRUPTED if interrupted else int(bool(content["missing"]))
    try:
        report, interrupted = BENCHES[options.name].run(
            Progress(budget_s=budget_s, only=options.only),
            quick=options.quick,
            keep=lambda report: None if options.json is None else report.write(options.json),
            **own_options,
        )
    except UnknownPartError as error:
        parser.error(f"--only: {error}")
    if report is not None:
        print(report.as_text())
    return INTERRUPTED if interrupted else 0


def _own_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict[str, Any]:
    """The keywords of the named benchmark; those of others are refused."""
    keywords: dict[str, Any] = {}
    for name, bench in BENCHES.items():
        given = {each: getattr(options, each) for each in bench.options}
        given = {each: value for each, value in given.items() if value is not None}
        if given and options.name != name:
            parser.error(f"--{', --'.join(given)}: of {name} only, not of {options.name}")
        keywords |= given
    return keywords


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: more than 0 minutes are needed")
    return minutes


if __name__ == "__main__":
    sys.exit(main())
