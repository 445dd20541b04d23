"""Folders and files of runs."""

import json
import math
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
from workbench.store.run_folder import (
    EVALUATIONS,
    META,
    Best,
    FolderChanges,
    add_evaluation,
    checkpoint_path,
    last_evaluation,
    read_evaluations,
    worth,
)


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


def test_of_a_step_the_last_line_counts(tmp_path):
    assert read_evaluations(tmp_path) == {}
    for done, loss in ((4, 1.0), (2, 3.0), (4, 0.5)):
        add_evaluation(tmp_path, done, {"loss": loss, "miou": math.nan})
    with (tmp_path / EVALUATIONS).open("a") as file:
        file.write('{"done": 6, "lo')  # its writer was killed
    found = read_evaluations(tmp_path)
    assert list(found) == [2, 4]
    assert found[4]["loss"] == 0.5
    assert math.isnan(found[2]["miou"])


def test_the_last_one_has_names_that_a_line_about_a_run_has_room_for(tmp_path):
    assert last_evaluation(tmp_path) == {}
    for done in (4, 2):
        add_evaluation(tmp_path, done, {"loss": done, "accuracy": 0.5, "steps": 7.0})
    assert last_evaluation(tmp_path) == {"test_loss": 4, "accuracy": 0.5, "test_steps": 7.0}


def test_losses_are_to_be_small_and_metrics_large():
    figures = {"loss": 2.0, "f1": 0.5}
    assert [worth(figures, by) for by in ("loss", "-loss", "f1", "-f1")] == [-2.0, -2.0, 0.5, -0.5]
    best = Best().then(1, {"f1": math.nan}, "f1")
    assert best == Best()
    best = best.then(2, {"f1": 0.5}, "f1")
    assert best.then(3, {"f1": 0.5}, "f1") is best  # the first of equal ones
    assert best.then(4, {"f1": 0.6}, "f1") == Best(4, 0.6)


def test_only_what_has_a_checkpoint_can_be_best(tmp_path):
    for done, f1 in ((2, 0.5), (4, 0.9), (6, 0.7)):
        add_evaluation(tmp_path, done, {"f1": f1})
    for done in (2, 6):
        checkpoint_path(tmp_path, done).mkdir()
        (checkpoint_path(tmp_path, done) / META).touch()
    assert Best.of(tmp_path, "f1") == Best(6, 0.7)
    assert Best.of(tmp_path, "f1", before=5) == Best(2, 0.5)
    assert Best.of(tmp_path, "f1", before=1) == Best()


def test_a_file_that_came_within_the_same_coarse_second_is_seen(tmp_path, monkeypatch):
    """As over SFTP, whose dates are whole seconds, and of the server's clock."""
    now = [100.0]
    monkeypatch.setattr(files.time, "monotonic", lambda: now[0])
    os.utime(tmp_path, (50, 50))
    changes = FolderChanges(tmp_path)
    assert changes.seen()
    now[0] += 0.5
    (tmp_path / "file").touch()
    os.utime(tmp_path, (50, 50))  # the same date as before the file
    assert changes.seen()
    now[0] += 2.0
    assert changes.seen(), "it is read once more after the date has become old"
    assert not changes.seen()
    (tmp_path / "another").touch()
    assert changes.seen()
