"""What the commands are called, and what they take."""

import argparse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

Command = Callable[[argparse.Namespace], int]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options; `carry_out` among them is the command itself."""
    parser = argparse.ArgumentParser(
        prog="python -m workbench",
        description="Runs, follows and predicts hybrid-parallel experiments.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _run(commands.add_parser("run", help="run an experiment and follow it"))
    _jobs(commands.add_parser("jobs", help="show clusters and their jobs"))
    _attach(commands.add_parser("attach", help="follow the jobs of a cluster that is there"))
    _predict(commands.add_parser("predict", help="say what a plan will need; nothing runs"))
    _program(commands.add_parser("program", help="list what ranks execute in a step"))
    _verify(commands.add_parser("verify", help="hold a plan against the unsplit model"))
    return parser.parse_args(arguments)


def _run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", type=Path, metavar="EXPERIMENT.toml")
    parser.add_argument("--engines", type=int, metavar="N", help="of the cluster; else the plan's")
    parser.add_argument("--cluster", metavar="NAME", help="that is there, or is to be called so")
    parser.add_argument("--directory", type=Path, default=Path("runs"), help="where runs are kept")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="a run's folder, or checkpoint")
    parser.add_argument("--priority", type=int, default=0, help="higher goes first")
    parser.add_argument("--detach", action="store_true", help="submit it and return")
    _trust(parser)
    parser.set_defaults(carry_out=_late("run"))


def _jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cluster", nargs="?", metavar="NAME", help="its name or folder; else all")
    parser.set_defaults(carry_out=_late("jobs"))


def _attach(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cluster", metavar="NAME", help="its name or folder")
    parser.add_argument("job", type=int, nargs="?", metavar="JOB", help="else all that go on")
    parser.set_defaults(carry_out=_late("attach"))


def _predict(parser: argparse.ArgumentParser) -> None:
    _of_a_plan(parser)
    parser.add_argument(
        "--machine", metavar="NAME", help="a known machine, or one's file; else no times"
    )
    parser.set_defaults(carry_out=_late("predict"))


def _program(parser: argparse.ArgumentParser) -> None:
    _of_a_plan(parser)
    parser.add_argument("--rank", type=int, metavar="R", help="what this one executes; else all")
    parser.set_defaults(carry_out=_late("program"))


def _verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN.toml", help="or an experiment")
    parser.add_argument("--steps", type=int, default=2, help="updates before weights are compared")
    parser.add_argument("--precision", choices=("fp64", "fp32"), default="fp64")
    parser.add_argument("--directory", type=Path, default=Path("runs"), help="for scratch files")
    _trust(parser)
    parser.set_defaults(carry_out=_late("verify"))


def _of_a_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN.toml", help="or an experiment")
    of = "instead of the experiment's; of a plan alone, "
    parser.add_argument("--batch-size", type=int, metavar="N", help=f"{of}32 for each rank")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16", "fp64"), help=f"{of}fp32")
    _trust(parser)


def _trust(parser: argparse.ArgumentParser) -> None:
    told = "import the functions and classes that the file names, which runs their code"
    parser.add_argument("--trust", action="store_true", help=told)


def _late(name: str) -> Command:
    """A command that is imported when it is carried out: `--help` needs no torch."""

    def command(options: argparse.Namespace) -> int:
        found: Command = getattr(import_module("workbench.client.commands"), name)
        return found(options)

    return command
