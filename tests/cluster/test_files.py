"""Folders and files of runs."""

import os
import subprocess
import sys

import pytest

from tests.cluster.test_message import experiment
from tests.plan.graphs import mlp
from workbench.cluster import files
from workbench.plan import Experiment, Plan


def test_every_run_has_a_folder_of_its_own(tmp_path):
    ran = experiment(Plan.data_parallel(mlp(4, 4), 1))
    folders = {files.new_directory(tmp_path / "runs", ran) for _ in range(3)}
    assert len(folders) == 3
    for folder in folders:
        assert folder.name.rstrip("-23").endswith("-Toy")
        assert Experiment.load(folder / "experiment.toml") == ran


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "metrics.csv"
    files.write(path, "old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_left_is_swept(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    mine = files.new_scratch(tmp_path)
    orphan = tmp_path / mine.name.replace(f"-{os.getpid()}-", f"-{ended.pid}-")
    other = tmp_path / f".cluster-elsewhere-{ended.pid}-00000000"
    for folder in (mine, orphan, other):
        folder.mkdir()
        (folder / "weights").touch()
    files.sweep(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([mine, other])
