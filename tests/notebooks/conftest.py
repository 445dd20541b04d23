"""Kernels run this checkout, and leave no process."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.notebooks.running import ROOT


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
