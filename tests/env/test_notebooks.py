"""env/notebooks.py: what it keeps of a notebook that ran, and what it refuses to keep."""

import socket
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

import env.notebooks
from env.notebooks import ROOT, NotebookError, executed, kept

TMP = tempfile.gettempdir()
IMAGE = '<img alt="two lanes" src="data:image/svg+xml;base64,AA==">'
WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture(autouse=True)
def a_quick_look(monkeypatch):
    monkeypatch.setattr(env.notebooks, "BUSY_S", 0.01)


def written(folder, *sources):
    """A notebook with a title and code cells, that has not been run."""
    cells = [v4.new_code_cell(source, id=f"cell-{i}") for i, source in enumerate(sources)]
    title = v4.new_markdown_cell("# Title", id="title")
    path = folder / "notebook.ipynb"
    nbformat.write(v4.new_notebook(cells=[title, *cells]), path)
    return path


def keeping(folder, *outputs):
    """What is kept of a notebook whose one cell had these outputs."""

    def run(path, _folder):
        notebook = nbformat.read(path, 4)
        notebook.cells[-1].outputs = list(outputs)
        notebook.cells[-1].metadata = {"execution": {"iopub.status.busy": "2026"}}
        notebook.metadata["widgets"] = {}
        return notebook

    return nbformat.reads(kept(written(folder, "1"), folder, run), 4)


def shown(**data):
    return v4.new_output("display_data", {k.replace("_", "/"): v for k, v in data.items()})


@pytest.mark.slow
def test_cells_run_in_the_folder_and_their_outputs_are_kept(tmp_path):
    source = "import os, sys\nprint(os.getcwd() + '/x', 1)\nprint(2, flush=True)"
    notebook = nbformat.reads(kept(written(tmp_path, "y = 1", source), tmp_path, executed), 4)
    assert [cell.id for cell in notebook.cells] == ["title", "ran", "cell-0", "cell-1"]
    assert [cell.execution_count for cell in notebook.cells[2:]] == [1, 2]
    (stream,) = notebook.cells[3].outputs
    assert stream.text == "x 1\n2\n"


@pytest.mark.slow
def test_a_cell_that_fails_is_named_with_its_error(tmp_path):
    with pytest.raises(NotebookError, match="cell 'cell-1': ZeroDivisionError: division by zero"):
        kept(written(tmp_path, "x = 1", "1 / 0"), tmp_path, executed)


def test_a_view_of_a_widget_leaves_its_picture(tmp_path):
    output = shown(text_html=IMAGE, text_plain="<Lanes>")
    output.data[WIDGET] = {"model_id": "1"}
    notebook = keeping(tmp_path, output)
    assert notebook.cells[-1].outputs[0].data == {"text/html": IMAGE, "text/plain": "<Lanes>"}
    assert "widgets" not in notebook.metadata
    assert notebook.cells[-1].metadata == {}


def test_time_machine_and_versions_stand_under_the_title(tmp_path):
    ran = keeping(tmp_path).cells[1].source
    for words in ("0 s on ", " cores and ", " GiB", "torch ", "Python 3."):
        assert words in ran
    assert not any(host in ran for host in (socket.gethostname(), str(ROOT), "/"))


@pytest.mark.parametrize(("busy", "said"), [(3.0, False), (80.4, True)])
def test_a_machine_with_other_work_is_called_one(tmp_path, monkeypatch, busy, said):
    monkeypatch.setattr(env.notebooks.psutil, "cpu_percent", lambda **_: busy)
    assert ("Other work took 80 % of the cores." in keeping(tmp_path).cells[1].source) == said


def test_it_is_said_once_however_often_it_is_run(tmp_path):
    once = keeping(tmp_path)
    path = tmp_path / "notebook.ipynb"
    nbformat.write(once, path)
    twice = nbformat.reads(kept(path, tmp_path, lambda path, _: nbformat.read(path, 4)), 4)
    assert [cell.id for cell in twice.cells] == [cell.id for cell in once.cells]


def test_this_host_and_its_folders_are_not_named(tmp_path):
    host = socket.gethostname()
    text = f"{host}, {host}-4711-0123abcd (pid 4711): {tmp_path}/a, {Path.home()}/b, "
    text += f"{ROOT}/c, {TMP}/ipykernel_4711/1.py:22\n"
    output = v4.new_output("stream", name="stdout", text=text)
    kept_text = keeping(tmp_path, output).cells[-1].outputs[0].text
    assert kept_text == "localhost, localhost (pid …): a, ~/b, …/c, cell.py:22\n"


@pytest.mark.parametrize(
    ("output", "why"),
    [
        (shown(image_png="AA=="), "and no text"),
        (shown(image_png="AA==", text_plain="1"), "has no alternative text"),
        (shown(text_html='<img src="data:">', text_plain="1"), "without an alternative text"),
        (shown(text_html='<img alt="" src="data:">', text_plain="1"), "without an alternative"),
        (v4.new_output("stream", name="stderr", text="careful"), "wrote an error: careful"),
        (v4.new_output("error", ename="E", evalue="no", traceback=[]), "wrote an error: no"),
        (shown(text_plain=f"{TMP}/secret"), "names a folder of this host"),
        (shown(text_plain="x" * 10**6), "at most 1,000,000"),
    ],
)
def test_what_no_reader_could_read_is_refused(tmp_path, output, why):
    with pytest.raises(NotebookError, match=why):
        keeping(tmp_path, output)
