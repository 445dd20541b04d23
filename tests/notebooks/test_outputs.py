"""Notebooks lie there with the outputs of one run, or with none."""

import re
from pathlib import Path

import nbformat
import pytest

from tests.notebooks.running import NOTEBOOKS, ROOT


def was_run(path: Path) -> bool:
    """Whether a notebook is committed with its outputs."""
    return any(cell.get("outputs") for cell in nbformat.read(path, as_version=4).cells)


def test_each_notebook_is_run_by_a_test() -> None:
    files = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    assert {path.stem.partition("-")[2].replace("-", "_") for path in NOTEBOOKS} <= files


WITH_OUTPUTS = [path for path in NOTEBOOKS if was_run(path)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_of_one_run_or_none(path: Path) -> None:
    """One that was changed since is committed bare: old outputs would tell of other cells."""
    notebook = nbformat.read(path, as_version=4)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    said = notebook.cells[1].id == "ran"
    assert (counts, said) in (
        (list(range(1, len(counts) + 1)), True),
        ([None] * len(counts), False),
    )


@pytest.mark.parametrize("path", WITH_OUTPUTS, ids=lambda path: path.stem)
def test_outputs_need_no_kernel(path: Path) -> None:
    """People look before they run anything, on forges too; `env/notebooks.py` makes the outputs."""
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata.kernelspec.name == "python3"
    assert "widgets" not in notebook.metadata
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.metadata.keys() <= {"tags"} for cell in codes)  # when it ran, and for how long
    assert sum(bool(cell.outputs) for cell in codes) >= len(codes) / 2
    outputs = [output for cell in codes for output in cell.outputs]
    assert not any(o.output_type == "error" or o.get("name") == "stderr" for o in outputs)
    data = [output.data for output in outputs if "data" in output]
    assert {kind for one in data for kind in one} <= {"text/html", "text/plain"}
    pictures = re.findall(r"<(?:img|svg)[^>]*>", "".join(d.get("text/html", "") for d in data))
    assert all(re.search(r'\b(?:alt|aria-label)="[^"]', picture) for picture in pictures)
    said = str(outputs)
    assert not any(place in said for place in (f"{ROOT}/", "/tmp/", "/home/", "/root/"))
    assert path.stat().st_size < 1e6


@pytest.mark.parametrize("path", WITH_OUTPUTS, ids=lambda path: path.stem)
def test_says_how_long_it_took_on_what(path: Path) -> None:
    cell = nbformat.read(path, as_version=4).cells[1]
    machine = r"took \d+ (s|min) on \d+ cores and \d+ GiB, .+: \w+, Python 3[.\d]+, torch [.\d]+,"
    assert (cell.id, cell.cell_type) == ("ran", "markdown")
    assert re.search(machine, cell.source)
