"""Plants faults and prints the share of them that the tests kill."""

import argparse
from pathlib import Path

from tests.mutants.planting import run
from workbench.bench.harness.progress import Progress

parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
parser.add_argument("count", type=int, help="how many faults, one a run")
parser.add_argument("--seed", type=int, default=0, help="which")
parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result here")

if __name__ == "__main__":
    options, report = parser.parse_args(), None
    try:
        for report in run(Progress(), options.count, options.seed):
            if options.json is not None:
                report.write(options.json)
    except KeyboardInterrupt:
        pass
    if report is not None:
        print(report.as_text())
