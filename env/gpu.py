"""What is to be seen first on a GPU, within ten minutes, and one table of it: `env/gpu`.

Each part is a command of its own, with a limit of time; a part that fails or takes too long leaves
the others alone, and a benchmark keeps what it has found. `--dry` runs those that do without a GPU,
some of them shorter, on this machine's cores, to see that they work before there is one, and names
the rest. `python env/gpu.py` does the same with another Python than that of .venv.

    FOLDER/gpu.md      the table, with device and versions, for the documentation
    FOLDER/gpu.json    the same, with the figures of each benchmark
    FOLDER/NAME.log    what a part has said
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from workbench.bench.harness.report import machine, versions

ROOT = Path(__file__).resolve().parent.parent
INTO = ROOT / "build" / "gpu"
PYTHON = sys.executable
BENCH = (PYTHON, "-m", "workbench.bench")
ENDED_WITHIN_S = 30.0
TOTAL_S = 600  # of all parts
LEAST_S = 1.0  # for a part to begin
SHOWN = 6  # figures of a benchmark in the table
GPUS = """
import torch
for index in range(torch.cuda.device_count()):
    about = torch.cuda.get_device_properties(index)
    print(f"{about.name}, {about.total_memory / 2**30:.0f} GiB")
if not torch.cuda.is_available():
    raise SystemExit("torch sees no GPU")
"""
CALIBRATION = """
import tempfile
import workbench as wb
graph = wb.trace("vgg11", input_shape=(3, 32, 32), num_classes=10)
with tempfile.TemporaryDirectory() as folder, wb.Cluster(1, directory=folder) as cluster:
    print(cluster.calibrate(wb.Plan.data_parallel(graph, 1), rows=32, within_s=20.0, keep=False))
"""


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        name: its name.
        command: what is run, in the checkout.
        limit_s: the seconds that it may take, of those that are left to all.
        needs_gpu: whether it is left out of a dry run.
        dry: what is run there instead of the command; none: the same.
        shows: the pattern of the figures that are in the table.
        bench: whether it is a benchmark, which writes its figures.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    needs_gpu: bool = False
    bench: bool = False
    dry: tuple[str, ...] = ()
    shows: str = "*"


# Several files at once: most of what takes long waits for engines to start. A plugin that measures
# warns that it cannot then, and a warning is an error.
SIDE_BY_SIDE = ("-n", "3", "--dist", "loadfile")
PYTEST = (PYTHON, "-m", "pytest", "-q", "-p", "no:benchmark", *SIDE_BY_SIDE, "tests/gpu")
MEMORY = (*BENCH, "predict", "--only", "memory")
SPLITBRAIN = (*BENCH, "splitbrain", "--only", "ddp")
CROWD = (*BENCH, "splitbrain", "--only", "oversubscribed")
GRID = (*BENCH, "splitbrain", "--only", "grid")
SUMS = (*BENCH, "collectives", "--only", "sizes")
AT_224 = ("--cases", "at 224")
ALONE = ("--cases", "at 224, alone")
MINUTE = ("--budget", "1")
PARTS = (
    Part("device", (PYTHON, "-c", GPUS), 60, needs_gpu=True),
    Part("tests", PYTEST, 200, needs_gpu=True),
    Part("tests load", (PYTHON, "-m", "pytest", "-q", "--collect-only", "tests/gpu"), 60),
    Part("memory", (*MEMORY, *AT_224), 120, bench=True, dry=(*MEMORY, "--quick")),
    Part("splitbrain", (*SPLITBRAIN, *MINUTE), 120, bench=True, dry=(*SPLITBRAIN, "--quick")),
    Part("sums", (*SUMS, *MINUTE), 90, bench=True, dry=(*SUMS, "--quick"), shows="bucket_*"),
    Part("times", (*BENCH, "predict", *ALONE), 150, bench=True, needs_gpu=True),
    Part("calibration", (PYTHON, "-c", CALIBRATION), 120),
    Part("exactness", (*BENCH, "exactness", "--quick"), 180, bench=True),
    Part("oversubscribed", (*CROWD, *MINUTE), 120, bench=True, needs_gpu=True),
    Part("grid", (*GRID, *MINUTE), 120, bench=True, needs_gpu=True),
)


@dataclass
class Outcome:
    """What became of a part.

    Attributes:
        part: the part.
        seconds: those that it took.
        said: "ok", or why not.
        figures: the figures of a benchmark, by name: {"median", "min", "max"}.
        last: the last line that it has printed.
    """

    part: Part
    seconds: float
    said: str
    figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    last: str = ""


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Runs the parts, and writes the table after each."""
    parser = argparse.ArgumentParser(prog="env/gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--dry", action="store_true", help="only what does without a GPU")
    parser.add_argument(
        "--only",
        action="append",
        choices=[part.name for part in parts],
        metavar="PART",
        help=f"one of {', '.join(part.name for part in parts)}; several times: each of them",
    )
    parser.add_argument("--within", type=int, default=TOTAL_S, metavar="SECONDS", help="of all")
    parser.add_argument("--into", type=Path, default=INTO, metavar="FOLDER", help=f"else {INTO}")
    options = parser.parse_args(arguments)
    folder: Path = options.into.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    parts = [part for part in parts if not options.only or part.name in options.only]
    left_out = [part.name for part in parts if part.needs_gpu and options.dry]
    found: list[Outcome] = []
    end = time.monotonic() + options.within
    _write(folder, found, left_out)
    for part in parts:
        if part.name not in left_out:
            limit_s = min(part.limit_s, max(end - time.monotonic() - ENDED_WITHIN_S, 0.0))
            print(f"{part.name} (at most {limit_s:.0f} s) ...", file=sys.stderr, flush=True)
            found.append(run(part, folder, limit_s, dry=options.dry))
            _write(folder, found, left_out)
    print((folder / "gpu.md").read_text())
    return int(any(one.said != "ok" for one in found))


def run(part: Part, folder: Path, limit_s: float, *, dry: bool) -> Outcome:
    """Runs one part; in a dry run, as if there were no GPU."""
    if limit_s < LEAST_S:
        return Outcome(part, 0.0, "no time was left")
    path, figures = folder / f"{part.name.replace(' ', '-')}.log", folder / f"{part.name}.json"
    figures.unlink(missing_ok=True)
    command = [*((dry and part.dry) or part.command)]
    command += ["--json", str(figures)] if part.bench else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if dry:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    began, said = time.monotonic(), "ok"
    with path.open("w") as output:
        done = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            if status := done.wait(limit_s):
                said = f"failed, with status {status}: {path.name}"
        except subprocess.TimeoutExpired:
            said = f"took more than {limit_s:.0f} s"
            _interrupt(done)
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    content: Any = json.loads(figures.read_text()) if figures.exists() else {"figures": {}}
    seconds = time.monotonic() - began
    return Outcome(part, seconds, said, content["figures"], lines[-1] if lines else "")


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does: a benchmark keeps what it has found, and its engines end."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(ENDED_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def table(found: Sequence[Outcome], left_out: Sequence[str]) -> Iterator[str]:
    """The table as Markdown."""
    about = {**machine(), **versions()}
    yield from (", ".join(f"{name} {value}" for name, value in about.items()), "")
    yield from ("| part | seconds | outcome | found |", "|---|---|---|---|")
    for one in found:
        shown = [
            f"`{name}` {value['median']:.3g} ({value['min']:.3g} .. {value['max']:.3g})"
            for name, value in shown_of(one)
        ]
        words = ", ".join(shown) or one.last.replace("|", "/")
        yield f"| {one.part.name} | {one.seconds:.0f} | {one.said} | {words} |"
    if left_out:
        yield from ("", f"Not run, since they need a GPU: {', '.join(left_out)}.")


def shown_of(one: Outcome) -> list[tuple[str, Mapping[str, float]]]:
    """The first figures of a part that its pattern names."""
    named = [pair for pair in one.figures.items() if fnmatch(pair[0], one.part.shows)]
    return named[:SHOWN]


def _write(folder: Path, found: Sequence[Outcome], left_out: Sequence[str]) -> None:
    (folder / "gpu.json").write_text(json.dumps(_content(found, left_out), indent=2))
    (folder / "gpu.md").write_text("".join(f"{line}\n" for line in table(found, left_out)))


def _content(found: Sequence[Outcome], left_out: Sequence[str]) -> dict[str, Any]:
    parts = {
        one.part.name: {"seconds": one.seconds, "outcome": one.said, "figures": one.figures}
        for one in found
    }
    about = {"machine": machine(), "versions": versions()}
    return {**about, "parts": parts, "not run": list(left_out)}


if __name__ == "__main__":
    sys.exit(main())
