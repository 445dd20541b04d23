"""Every notebook runs; the first one also in a real JupyterLab, by clicks."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from playwright.sync_api import BrowserContext, Locator, Page

from tests.browser import PATIENCE_S, Lab, browser, chromium, lab, run_all, wait_until_all_ran

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FIRST = ROOT / "notebooks" / "01-first-light.ipynb"

# What takes the place of the cell tagged "parameters", so that a test is short.
SMALL = {"MODEL": "mobilenet_v3_small", "ENGINES": 2, "TARGET": 0.0}
SHORT: dict[str, dict[str, Any]] = {
    "00-tour.ipynb": {"MODEL": "mobilenet_v3_small", "ENGINES": 2, "STEPS": 16, "WITHIN_S": 5.0},
    "01-first-light.ipynb": {**SMALL, "STEPS": 3, "ROUNDS": 1, "LAPS": 3},
    "02-pipe-sgd.ipynb": {"STEPS": 6, "ROUNDS": 1, "LESSONS": 10},
    "03-unequal-devices.ipynb": {
        **{"SPEEDS": (2, 1), "BATCH": 24, "DIVISOR": 10},
        **{"STEPS": 4, "ROUNDS": 1, "WITHIN_S": 5.0},
    },
    "04-job-server.ipynb": {
        **{"MODEL": "squeezenet1_1", "LARGER": "squeezenet1_0", "ENGINES": 2, "STEPS": 12},
        **{"ROUNDS": 1, "SIZES": (2**12,)},
    },
    "05-your-own-model.ipynb": {"STEPS": 4, "IMAGES": 16},
    "08-your-own-idea.ipynb": {"STEPS": 8},
    "09-language-model.ipynb": {"STEPS": 24, "BLOCKS": 1},
    "07-beyond-one-machine.ipynb": {"MODEL": "mobilenet_v3_small", "STEPS": 12},
    "06-predict-and-search.ipynb": {"ENGINES": 2, "BATCH": 16, "STEPS": 6, "WITHIN_S": 5.0},
}


def read(path: Path, *, without: Sequence[str] = (), **parameters: Any) -> nbformat.NotebookNode:
    """A notebook with other values in its cell of parameters, and without some cells."""
    notebook = nbformat.read(path, as_version=4)
    assert set(without) <= {cell.id for cell in notebook.cells}
    notebook.cells = [cell for cell in notebook.cells if cell.id not in without]
    (cell,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", ())]
    given = {line.split(" =")[0] for line in cell.source.splitlines()}
    assert parameters.keys() <= given, "a parameter that the notebook does not have"
    cell.source += "".join(f"\n{name} = {value!r}" for name, value in parameters.items())
    return notebook


@pytest.fixture(autouse=True)
def kernels_import_this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))


@pytest.fixture
def no_process_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    _, alive = psutil.wait_procs(processes_of(tmp_path), timeout=15)
    assert alive == []


def processes_of(folder: Path) -> list[psutil.Process]:
    """The processes that work in a folder, or were told of it."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(folder) in " ".join([process.cwd(), *process.cmdline()]):
                found.append(process)
    return found


def was_run(path: Path) -> bool:
    """Whether a notebook is committed with its outputs."""
    return any(cell.get("outputs") for cell in nbformat.read(path, as_version=4).cells)


WITH_OUTPUTS = [path for path in NOTEBOOKS if was_run(path)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_outputs_are_of_one_run_or_none(path: Path) -> None:
    """One that was changed since is committed bare: old outputs would tell of other cells."""
    notebook = nbformat.read(path, as_version=4)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    said = notebook.cells[1].id == "ran"
    assert (counts, said) in (
        (list(range(1, len(counts) + 1)), True),
        ([None] * len(counts), False),
    )


@pytest.mark.parametrize("path", WITH_OUTPUTS, ids=lambda path: path.name)
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


@pytest.mark.parametrize("path", WITH_OUTPUTS, ids=lambda path: path.name)
def test_says_how_long_it_took_on_what(path: Path) -> None:
    cell = nbformat.read(path, as_version=4).cells[1]
    machine = r"took \d+ (s|min) on \d+ cores and \d+ GiB, .+: \w+, Python 3[.\d]+, torch [.\d]+,"
    assert (cell.id, cell.cell_type) == ("ran", "markdown")
    assert re.search(machine, cell.source)


@pytest.mark.slow
@pytest.mark.usefixtures("no_process_is_left")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_runs(path: Path, tmp_path: Path) -> None:
    notebook = read(path, **SHORT[path.name])
    options = {"timeout": 300, "resources": {"metadata": {"path": str(tmp_path)}}}
    NotebookClient(notebook, **options).execute()
    outputs = {c.id: c.outputs for c in notebook.cells if c.cell_type == "code"}
    if path.name == "00-tour.ipynb":
        assert "group_size 3 does not divide" in text_of(outputs["failure"])
        assert "16 steps, none lost" in text_of(outputs["check"])
        (table,) = outputs["phases"]
        assert "samples/s, predicted" in table.data["text/plain"]
        (comparison,) = outputs["compare"]
        assert "ms predicted" in comparison.data["text/plain"]
        (shown,) = [o for o in outputs["ranks"] if "ranks 0, 1: done" in str(o.data)]
        assert "the largest piece" in shown.data["text/html"]
    if path.name == "01-first-light.ipynb":
        assert "group" in text_of(outputs["failure"])
        (dashboard,) = [o for o in outputs["experiment"] if "text/html" in o.get("data", {})]
        assert "finished, 3 of 3 steps" in dashboard.data["text/plain"]
        assert "data:image/svg+xml;base64," in dashboard.data["text/html"]
        assert "times as fast, over 1 rounds" in text_of(outputs["answer"])
    if path.name == "02-pipe-sgd.ipynb":
        assert "5.45 x as fast as PS-Sync" in text_of(outputs["headline"])
        (curve,) = outputs["curve"]
        shown = re.findall(r"^([\d.]+) +([\d.]+) ", curve.data["text/plain"], re.M)
        assert shown[0] == ("0.05", "14.06")
        assert shown[3] == ("0.28", "5.45")
        assert "ranks agree" in text_of(outputs["check"])
        for drawn in ("model", "race", "learn"):
            (chart,) = [o for o in outputs[drawn] if "text/html" in o.get("data", {})]
            assert "data:image/svg+xml;base64," in chart.data["text/html"]
    if path.name == "03-unequal-devices.ipynb":
        assert "over the fastest alone 1.50" in text_of(outputs["ideal"])
        (table,) = outputs["result"][-1:]
        assert "filters, by speed" in table.data["text/plain"]
        assert text_of(outputs["exact"]).count("<Verification") == 2
        assert "none lost, and all ranks agree" in text_of(outputs["check"])
    if path.name == "04-job-server.ipynb":
        assert "died: its process was ended by SIGKILL" in text_of(outputs["kill"])
        assert "All 12 losses are equal, bit for bit" in text_of(outputs["check"])
        (ledger,) = outputs["bytes"]
        assert "through the server" in ledger.data["text/plain"]
        assert "the run has nothing to tell" in text_of(outputs["orphaned"])
        assert "the plan is for 4 ranks" in text_of(outputs["failure"])
    if path.name == "05-your-own-model.ipynb":
        assert "has lost the batch" in text_of(outputs["untraceable"])
        assert "'shard_heads'; did you mean" in text_of(outputs["failure"])
        assert "cannot be read as an image" in text_of(outputs["damaged"])
        assert "by a plain torch module" in text_of(outputs["home"])
    if path.name == "08-your-own-idea.ipynb":
        kinds = ("algorithm", "codec", "scheme", "strategy", "rule")
        for kind in kinds:
            assert "checks hold" in str(outputs[kind]), kind
            assert "✗" not in str(outputs[kind]), kind
        assert "✗" in str(outputs["failure"])
        codes = {cell.id: cell.source for cell in notebook.cells}
        assert all(len(codes[kind].splitlines()) <= 30 for kind in kinds)
    if path.name == "09-language-model.ipynb":
        assert "scaled_dot_product_attention" in text_of(outputs["ways"])
        assert str(outputs["verify"]).count("fp64: exact") == 3
        assert "fp64: exact" in str(outputs["clipped"])
        assert "must not depend on others" in text_of(outputs["mean"])
        (table,) = outputs["compare"]
        assert "peak MiB, measured" in table.data["text/plain"]
        assert "the same model, up to rounding" in text_of(outputs["check"])
        assert text_of(outputs["home"]).startswith("def ")
    if path.name == "07-beyond-one-machine.ipynb":
        assert "engine_launcher_class" in text_of(outputs["ground"])
        assert "groups across hosts" in text_of(outputs["race"])
        assert "goes on with ranks on engines" in text_of(outputs["vanish"])
        assert "ipcluster_config.py is not there" in text_of(outputs["failure"])
    if path.name == "06-predict-and-search.ipynb":
        assert "does not divide world_size 3" in text_of(outputs["failure"])
        assert "Memory is as predicted" in text_of(outputs["check"])
        (matrix,) = [o for o in outputs["recorded"] if "text/html" in o.get("data", {})]
        assert "recorded exactly that, pair by pair" in matrix.data["text/html"]
        for drawn in ("memory", "traffic", "what-if", "timing", "stale", "jobs", "engines"):
            (shown,) = [o for o in outputs[drawn] if "text/html" in o.get("data", {})]
            assert "application/vnd.jupyter.widget-view+json" in shown.data


def text_of(outputs: list[nbformat.NotebookNode]) -> str:
    return "".join(output.get("text", "") for output in outputs)


class Visit:
    """The first notebook, opened in JupyterLab with other parameters."""

    def __init__(
        self, context: BrowserContext, server: Lab, folder: Path, notebook: nbformat.NotebookNode
    ) -> None:
        self.errors: list[str] = []
        self.foreign: list[str] = []
        context.on("request", self._on_request)
        nbformat.write(notebook, folder / "notebook.ipynb")
        self.page: Page = server.open(context, "notebook.ipynb")
        self.page.on("console", self._on_console)
        run_all(self.page)
        self.dashboard = self.page.locator(".wb-dashboard")

    def _on_console(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith(("http://127.0.0.1", "ws://127.0.0.1", "data:", "blob:")):
            self.foreign.append(request.url)

    def wait_for(self, condition: str, timeout_s: float) -> None:
        """Waits until `condition` is true of the dashboard's data attributes, `d`."""
        script = (
            "() => { const d = document.querySelector('.wb-dashboard')?.dataset;"
            f" return d && ({condition}); }}"
        )
        self.page.wait_for_function(script, timeout=1000 * timeout_s)

    def figure(self, name: str) -> int:
        return int(self.dashboard.get_attribute(f"data-{name}") or -1)

    @property
    def stop_button(self) -> Locator:
        return self.page.get_by_role("button", name="Stop", exact=True)

    @property
    def num_errors(self) -> int:
        """Tracebacks, and whatever else was written to stderr."""
        return self.page.locator("[data-mime-type='application/vnd.jupyter.stderr']").count()

    def photograph(self, name: str) -> None:
        """Keeps a picture if the environment names a folder for it."""
        if folder := os.environ.get("WORKBENCH_SCREENSHOTS"):
            self.dashboard.scroll_into_view_if_needed()
            self.page.screenshot(path=Path(folder) / f"{name}.png")


@pytest.fixture
def visit(
    tmp_path: Path, no_process_is_left: None
) -> Iterator[Callable[[nbformat.NotebookNode], Visit]]:
    """Opens a notebook in JupyterLab and runs all; nothing may be fetched from elsewhere."""
    if chromium() is None:
        pytest.skip("no Chromium is installed")
    visits: list[Visit] = []
    with lab(tmp_path) as server, browser() as context:

        def make(notebook: nbformat.NotebookNode) -> Visit:
            visits.append(Visit(context, server, tmp_path, notebook))
            return visits[-1]

        yield make
        for made in visits:
            assert made.errors == []
            assert made.foreign == []


def live(visit: Visit) -> None:
    """Waits until points were added while somebody looked: nothing is drawn out of sight."""
    visit.dashboard.wait_for(state="attached", timeout=1000 * PATIENCE_S)
    visit.dashboard.evaluate("e => e.scrollIntoView({block: 'end'})")
    visit.wait_for("d.state === 'running' && +d.points >= 2", PATIENCE_S)
    first = visit.figure("points")
    visit.wait_for(f"d.state === 'running' && +d.points > {first}", PATIENCE_S)
    visit.photograph("live")


@pytest.mark.slow
def test_first_light_in_jupyterlab(visit: Callable[[nbformat.NotebookNode], Visit]) -> None:
    others = ("race", "result", "answer")  # which need no browser
    opened = visit(read(FIRST, without=others, **SMALL, STEPS=60))
    live(opened)
    # In one condition: at the run's end the notebook shows its output, and so the view, anew.
    opened.wait_for("d.state === 'finished' && +d.done === 60 && +d.points === 60", PATIENCE_S)
    assert opened.stop_button.is_disabled()
    wait_until_all_ran(opened.page, PATIENCE_S)
    assert opened.num_errors == 0
    opened.photograph("end")


@pytest.mark.slow
def test_the_stop_button_in_jupyterlab(visit: Callable[[nbformat.NotebookNode], Visit]) -> None:
    others = ("race", "result", "answer")
    opened = visit(read(FIRST, without=others, **SMALL, STEPS=10**6))
    live(opened)
    opened.stop_button.click()
    opened.wait_for("d.state === 'stopped' && +d.done >= 2", PATIENCE_S)
    assert opened.stop_button.is_disabled()
    wait_until_all_ran(opened.page, PATIENCE_S)
    assert opened.num_errors == 0
