"""Folders and files of runs."""

import json
import os

import pytest

from tests.plan.graphs import mlp
from tests.store.test_messages import experiment
from workbench.plan import Experiment, Plan
from workbench.plan.io.files import write_whole
from workbench.store import run_folder as files
from workbench.store.errors import ClusterError
from workbench.store.messages import TrainingOutcome
from workbench.store.record import AttemptRecord, ErrorRecord


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


def test_how_a_run_ended_is_text_that_is_read_back(tmp_path):
    traffic = (("all", "all_reduce", "fc", "backward", 1, 2, 3, 0.5, 1, 2),)
    reported = TrainingOutcome("finished", 3, None, {"loss": 0.5}, traffic=traffic)
    attempt = AttemptRecord(1, (0, 1), 10.0, 20.0, 3)
    error = ErrorRecord("RankError", "rank 1 failed", 1, "fc")
    found = files.RunOutcome(
        job=7,
        state="failed",
        reason="",
        step=3,
        attempts=(attempt,),
        error=error,
        ranks=(reported,),
    )
    assert files.RunOutcome.load(tmp_path) is None
    (tmp_path / "environment.json").write_text('{"seed": 3}')
    found.save(tmp_path, files.JobTimes(1.0, 2.0, 3.0))
    assert files.RunOutcome.load(tmp_path) == found
    known = json.loads((tmp_path / "environment.json").read_text())
    assert known == {"seed": 3, "times": {"submitted": 1.0, "started": 2.0, "ended": 3.0}}
    files.RunOutcome.forget(tmp_path)
    files.RunOutcome.forget(tmp_path)
    assert files.RunOutcome.load(tmp_path) is None
    (tmp_path / "outcome.json").write_text('{"state": "merry"}')
    with pytest.raises(ClusterError, match=r"outcome\.json cannot be read"):
        files.RunOutcome.load(tmp_path)


@pytest.mark.parametrize("name", ["../../secret", "/dev/zero", "sub/file"])
def test_an_index_that_names_files_elsewhere_is_damaged(tmp_path, name):
    (tmp_path / "secret").write_bytes(b"x")
    entry = f'[tensors.w]\npieces = [{{ file = "{name}" }}]\n'
    (tmp_path / "index.toml").write_text(entry)
    assert files.damaged_files(tmp_path) == ["index.toml"]


def test_a_pipe_in_a_checkpoint_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "rank-00000.safetensors")
    entry = '[tensors.w]\npieces = [{ file = "rank-00000.safetensors" }]\n'
    (tmp_path / "index.toml").write_text(entry)
    assert files.damaged_files(tmp_path) == ["rank-00000.safetensors"]
    (tmp_path / "index.toml").unlink()
    os.mkfifo(tmp_path / "index.toml")
    assert files.damaged_files(tmp_path) == ["index.toml"]


@pytest.mark.parametrize(
    "content",
    [b"", b"tensors = 1", b"[tensors]\nw = 1", b"a = " + b"[" * 5000, b"a = " + b"1" * 5000],
)
def test_an_index_of_any_bytes_is_damaged_or_names_nothing(tmp_path, content):
    (tmp_path / "index.toml").write_bytes(content)
    assert files.damaged_files(tmp_path) == ["index.toml"]


@pytest.mark.parametrize(
    "header",
    [b"[]", b"1", b'{"w": 1}', b'{"w": {"data_offsets": []}}', b'{"w": {"data_offsets": ["a", 1]}}',
     b"[" * 5000, b'{"__metadata__": 1, "w": {"data_offsets": [0, 0]}}'],
)  # fmt: skip
def test_a_header_of_any_bytes_is_no_whole_file(tmp_path, header):
    path = tmp_path / "rank-00000.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    assert not files.is_whole(path)
