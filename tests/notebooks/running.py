"""Notebooks, read with other parameters and run in a kernel."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
Outputs = dict[str, list[nbformat.NotebookNode]]


def read(name: str, *, without: Sequence[str] = (), **parameters: Any) -> nbformat.NotebookNode:
    """A notebook with other values in its cell of parameters, and without some cells."""
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    assert set(without) <= {cell.id for cell in notebook.cells}
    notebook.cells = [cell for cell in notebook.cells if cell.id not in without]
    (cell,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", ())]
    given = {line.split(" =")[0] for line in cell.source.splitlines()}
    assert parameters.keys() <= given, "a parameter that the notebook does not have"
    cell.source += "".join(f"\n{name} = {value!r}" for name, value in parameters.items())
    return notebook


def outputs_of(notebook: nbformat.NotebookNode, folder: Path) -> Outputs:
    """The outputs of a notebook's cells, by their ids, once it has run."""
    options = {"timeout": 300, "resources": {"metadata": {"path": str(folder)}}}
    NotebookClient(notebook, **options).execute()
    return {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}


def text_of(outputs: list[nbformat.NotebookNode]) -> str:
    return "".join(output.get("text", "") for output in outputs)
