"""README.md: every block of code in it runs, and what it points at is there."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.bench.benches import BENCHES

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.M | re.S)
PYTHON = [text for language, text in BLOCKS if language == "python"]
SHELL = [text for language, text in BLOCKS if language == "sh"]

# What takes the place of words of the README, so that the test is short: (words, others).
SMALL = (
    ('"alexnet", input_shape=(3, 64, 64)', '"mobilenet_v3_small", input_shape=(3, 32, 32)'),
    ("world_size=4, group_size=4", "world_size=2, group_size=2"),
    ("wb.Cluster(4)", "wb.Cluster(2)"),
    ("steps=80", "steps=2"),
    ("classifier.1.weight", "classifier.0.weight"),  # MobileNet's first linear layer
)

# Cells of a notebook that IPython runs one after another, in a process of its own.
NOTEBOOK = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in json.load(sys.stdin):
    shell.run_cell(cell).raise_error()
shell.run_cell("assert run.metrics['step'].nunique() == 2").raise_error()
shell.run_cell("ranks.close(); cluster.stop()").raise_error()
"""


def small() -> list[str]:
    """The Python blocks, with a small model, two engines and few steps."""
    joined = "\0".join(PYTHON)
    for words, others in SMALL:
        assert joined.count(words) == 1, f"README.md no longer says {words} once"
        joined = joined.replace(words, others)
    return joined.split("\0")


@pytest.mark.slow
def test_the_python_blocks_run_as_a_notebook_would_run_them(tmp_path: Path) -> None:
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK],
        input=json.dumps(small()),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "<Prediction mobilenet_v3_small on 2 ranks" in done.stdout
    assert "<Verification mobilenet_v3_small fp64: exact" in done.stdout
    assert "torch.Size([512, 576])" in done.stdout, "each of two ranks has half of 1,024 rows"


def test_the_python_blocks_are_short() -> None:
    lines = [line for line in PYTHON[0].splitlines() if line.strip()]
    assert len(lines) <= 12


def test_the_shell_blocks_name_commands_that_are_there() -> None:
    """What they do is seen elsewhere: env/test runs these tests, those of env start env/lab."""
    for block in SHELL:
        subprocess.run(["sh", "-n", "-c", block], cwd=ROOT, check=True)
        for line in block.splitlines():
            command, *_ = shlex.split(line, comments=True)
            assert os.access(ROOT / command, os.X_OK), f"{command} is no program of this checkout"
            subprocess.run(["sh", "-n", command], cwd=ROOT, check=True)


def test_links_and_pictures_are_there() -> None:
    linked = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    shown = re.findall(r'(?:srcset|src)="([^"]+)"', README)
    for target in [*linked, *shown]:
        assert (ROOT / target).exists(), f"README.md points at {target}, which is not there"


# What the README says is measured: the benchmark in whose section of the page that stands.
MEASURED = {
    "throughput of VGG-11": "splitbrain",
    "its peak memory": "splitbrain",
    "largest difference": "exactness",
    "error of predicted peak memory": "predict",
    "Pipe-SGD with int8": "pipesgd",
    "runs whose loss was undisturbed": "recovery",
}


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d[\d.]*(?:e-?\d+)?", text))


def test_each_figure_stands_in_the_section_of_its_benchmark() -> None:
    """On the page of all figures."""
    page = (ROOT / "notebooks/docs/pages/measured.md").read_text("utf-8")
    sections = {}
    for heading, text in re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", page, re.M | re.S):
        sections[re.findall(r"`(\w+)`", heading)[0]] = text
    assert set(sections) <= set(BENCHES)
    (table,) = re.findall(r"^\| what \| figure \|\n\|---\|---\|\n(.*?)\n\n", README, re.M | re.S)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert len(rows) == len(MEASURED)
    for what, figure in rows:
        (bench,) = [name for words, name in MEASURED.items() if what.startswith(words)]
        assert numbers(figure), what
        assert numbers(figure) <= numbers(sections[bench]), f"{what}: {figure}"


def test_it_is_read_in_five_minutes() -> None:
    assert 700 <= len(README.split()) <= 900
