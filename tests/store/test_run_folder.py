"""Folders and files of runs."""

import os

import pytest

from tests.plan.graphs import mlp
from tests.store.test_messages import experiment
from workbench.plan import Experiment, Plan
from workbench.store import run_folder as files
from workbench.store.files import write_whole


def test_every_run_has_a_folder_of_its_own(tmp_path):
    ran = experiment(Plan.data_parallel(mlp(4, 4), 1))
    folders = {files.new_directory(tmp_path / "runs", ran) for _ in range(3)}
    assert len(folders) == 3
    for folder in folders:
        assert folder.name.rstrip("-23").endswith("-Toy")
        assert Experiment.load(folder / "experiment.toml") == ran


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "metrics.csv"
    write_whole(path, "old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_attempts_are_numbered_by_their_folders(tmp_path):
    assert files.last_attempt(tmp_path) == 0
    for name in ("1", "2", "10", "part"):
        (tmp_path / "attempts" / name).mkdir(parents=True)
    assert files.last_attempt(tmp_path) == 10
