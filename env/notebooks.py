"""Runs notebooks and keeps what they show, `python env/notebooks.py [00 03 ...]`; all unless told.

    notebooks/*.ipynb         outputs that read well where no kernel runs, and under the title how
                              long the notebook took, on what machine, with which versions
    notebooks/images/*.png    of the tour alone, which runs in Chromium: see `env/pictures.py`

They run one after another, each from its first cell to its last, as they are committed. What is
kept holds no view of a widget (but the HTML that each widget brings along), nothing of this host
but its size, and a text for every picture. A notebook with a cell that fails keeps what it had;
the others run, and the exit status is 1.
"""

import argparse
import os
import platform
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import nbformat
import psutil
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
TOUR = "00-tour.ipynb"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
WIDGET = "application/vnd.jupyter.widget-view+json"
RAN = "ran"  # id of the cell that says so
CELL_S = 1800  # at most for one cell
MOST_BYTES = 10**6
BUSY_S = 3.0  # of a look at what else the machine does, before a notebook begins
BUSY_PERCENT = 10


class NotebookError(Exception):
    """A notebook that cannot be kept: a cell failed, or shows what only this host has."""


def main() -> int:
    """Runs the notebooks that the command line names."""
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = str(ROOT)  # of the kernels, installed or not
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="how names begin, such as 00 or 02-pipe")
    names = parser.parse_args().names or [""]
    paths = [p for p in sorted(NOTEBOOKS.glob("*.ipynb")) if p.name.startswith(tuple(names))]
    if not paths:
        parser.error(f"no notebook's name begins with {' or '.join(names)}")
    failed = [path.name for path in paths if not _kept(path)]
    if failed:
        print(f"not kept: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _kept(path: Path) -> bool:
    print(f"{path.name} ...", flush=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # What an earlier calibration has left on this host is not looked at, nor replaced.
        os.environ["XDG_CACHE_HOME"] = f"{folder}/.cache"
        try:
            run = _in_chromium if path.name == TOUR else executed
            text = kept(path, Path(folder), run)
        except NotebookError as error:
            print(f"{path.name}: {error}", file=sys.stderr, flush=True)
            return False
    path.write_text(text, "utf-8")
    print(f"{path.name}: {len(text) / 1024:,.0f} KiB", flush=True)
    return True


def kept(path: Path, folder: Path, run: Callable[[Path, Path], NotebookNode]) -> str:
    """The text of a notebook after it ran.

    Args:
        path: the notebook.
        folder: an empty folder to run it in.
        run: runs the notebook in the folder, and returns it with its outputs.

    Raises:
        NotebookError: a cell failed, or shows what cannot be kept.
    """
    busy, began = psutil.cpu_percent(interval=BUSY_S), time.monotonic()
    ran = run(path, folder)
    seconds = time.monotonic() - began
    outputs = {cell.id: cell.outputs for cell in ran.cells if cell.cell_type == "code"}
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    notebook.cells = [cell for cell in notebook.cells if cell.id != RAN]
    notebook.cells.insert(1, NotebookNode(id=RAN, cell_type="markdown", metadata={}, source=""))
    notebook.cells[1].source = _told(seconds, busy)
    for count, cell in enumerate((c for c in notebook.cells if c.cell_type == "code"), 1):
        cell.execution_count = count
        cell.metadata = {key: cell.metadata[key] for key in cell.metadata if key == "tags"}
        try:
            cell.outputs = [_still(one, count, folder) for one in _joined(outputs[cell.id])]
        except NotebookError as error:
            raise NotebookError(f"cell {cell.id!r}: {error}") from None
    text = nbformat.writes(notebook) + "\n"
    if len(text) > MOST_BYTES:
        raise NotebookError(f"{len(text):,} bytes; at most {MOST_BYTES:,} are kept")
    return text


def executed(path: Path, folder: Path) -> NotebookNode:
    """A notebook with the outputs of a run from its first cell to its last, without a browser.

    Raises:
        NotebookError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(
        notebook, timeout=CELL_S, kernel_name=KERNEL["name"], resources=resources
    )
    began = {}

    def start(cell: NotebookNode, **_: object) -> None:
        began[cell.id] = time.monotonic()

    def end(cell: NotebookNode, **_: object) -> None:
        print(f"    {time.monotonic() - began[cell.id]:6.1f} s  {cell.id}", flush=True)

    client.on_cell_start, client.on_cell_executed = start, end
    try:
        client.execute()
    except CellExecutionError as error:
        failed = next(c.id for c in notebook.cells if _has_failed(c))
        raise NotebookError(f"cell {failed!r}: {error.ename}: {error.evalue}") from None
    except (CellTimeoutError, DeadKernelError) as error:
        raise NotebookError(str(error)) from None
    return notebook


def _has_failed(cell: NotebookNode) -> bool:
    return any(output.output_type == "error" for output in cell.get("outputs", ()))


def _in_chromium(path: Path, folder: Path) -> NotebookNode:
    from env import pictures

    try:
        return pictures.executed(path, folder)
    except pictures.PictureError as error:
        raise NotebookError(str(error)) from None


def _told(seconds: float, busy: float) -> str:
    """How long a notebook took, on what machine, and with which versions."""
    import torch

    from workbench import __version__

    minutes = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
    memory = psutil.virtual_memory().total / 2**30
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    names = [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())]
    gpus = ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names)) or "no GPU"
    others = f"\nOther work took {busy:.0f} % of the cores." if busy >= BUSY_PERCENT else ""
    return (
        f"*The outputs below took {minutes} on {cores} cores and {memory:.0f} GiB, {gpus}: "
        f"{platform.system()}, Python {platform.python_version()}, "
        f"torch {torch.__version__.partition('+')[0]}, workbench {__version__}.{others} "
        "What you run replaces them.*"
    )


def _joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Outputs, of which neighbours of one stream are one."""
    joined: list[NotebookNode] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if last is not None and last.get("name", "") == output.get("name") is not None:
            last.text += output.text
        else:
            joined.append(output)
    return joined


def _still(output: NotebookNode, count: int, folder: Path) -> NotebookNode:
    """An output as it is seen without a kernel, with nothing of this host in it."""
    if output.output_type == "error" or output.get("name") == "stderr":
        raise NotebookError(f"it wrote an error: {output.get('text') or output.get('evalue')}")
    if output.output_type == "stream":
        output.text = of_any_host(output.text, folder)
        return output
    data = output.data
    data.pop(WIDGET, None)
    if not {"text/html", "text/plain"} & set(data):
        raise NotebookError(f"it shows {', '.join(data)} and no text")
    if strange := {kind for kind in data if not kind.startswith("text/")}:
        raise NotebookError(f"{', '.join(strange)} has no alternative text: show it in an <img>")
    for kind, text in data.items():
        data[kind] = of_any_host(text, folder)
    for image in re.findall(r"<img[^>]*>", data.get("text/html", "")):
        if not re.search(r'\balt="[^"]', image):
            raise NotebookError(f"a picture without an alternative text: {image[:80]}")
    output.metadata = {}
    if output.output_type == "execute_result":
        output.execution_count = count
    return output


def of_any_host(text: str, folder: Path) -> str:
    """A text without the names of this host, its folders and its processes.

    Raises:
        NotebookError: it names a folder that no reader has.
    """
    text = text.replace(f"{folder}/", "")
    host = re.escape(socket.gethostname())
    text = re.sub(rf"\b{host}(-\d+-[0-9a-f]{{8}})?\b", "localhost", text)  # and of its clusters
    text = re.sub(r"\bpid \d+", "pid …", text)
    temporary = re.escape(tempfile.gettempdir())
    text = re.sub(rf"{temporary}/ipykernel_\d+/\d+\.py", "cell.py", text)  # where a cell stands
    text = text.replace(str(ROOT), "…").replace(f"{Path.home()}/", "~/")
    if found := re.search(rf"(?:/home/|/root/|{temporary}/)\S*", text):
        raise NotebookError(f"it names a folder of this host: {found[0]}")
    return text


if __name__ == "__main__":
    sys.exit(main())
