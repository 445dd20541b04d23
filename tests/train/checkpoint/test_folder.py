"""The folders of one run's checkpoints: written aside, named when whole, removed when old."""

import tomllib

import pytest

from tests.plan.graphs import mlp
from workbench.model.errors import CheckpointError
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.plans.plan import Plan
from workbench.train.checkpoint import checkpoint as folder

GRAPH = mlp(4, 3, 2)
EXPERIMENT = Experiment(
    plan=Plan.data_parallel(GRAPH, 2), data="synthetic", optimizer="sgd", steps=9
)


def whole(directory, *steps):
    """Checkpoints of these steps, as they are on the disk; their names."""
    for step in steps:
        folder.describe(folder.begin_folder(directory, step), step, EXPERIMENT)
        folder.publish(directory, step)
    return names(directory)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_checkpoint_is_written_aside(tmp_path):
    part = folder.begin_folder(tmp_path / "run", 7)
    assert part == folder.partial_path(tmp_path / "run", 7) == tmp_path / "run" / "step-000007.tmp"
    assert part.is_dir()


def test_beginning_removes_what_was_given_up_and_nothing_else(tmp_path):
    for name in ("step-000003.tmp", "step-000007.tmp", "step-000002.old", "step-000001", "mine"):
        (tmp_path / name / "inner").mkdir(parents=True)
    assert list(folder.begin_folder(tmp_path, 7).iterdir()) == []
    assert names(tmp_path) == ["mine", "step-000001", "step-000007.tmp"]


def test_publishing_gives_the_name(tmp_path):
    assert whole(tmp_path, 7) == ["step-000007"]
    assert (tmp_path / "step-000007" / "checkpoint.toml").is_file()


def test_publishing_replaces_a_checkpoint_of_the_same_step(tmp_path):
    whole(tmp_path, 7)
    (folder.begin_folder(tmp_path, 7) / "new").touch()
    folder.publish(tmp_path, 7)
    assert names(tmp_path) == ["step-000007"]
    assert names(tmp_path / "step-000007") == ["new"]


def test_a_checkpoint_says_what_it_is_of(tmp_path):
    whole(tmp_path, 7)
    meta = folder.read_meta(tmp_path / "step-000007")
    assert (meta.step, meta.model, meta.input_shape) == (7, "Toy", [4])
    assert meta.fingerprint == GRAPH.fingerprint
    assert meta.format == "workbench checkpoint 1"
    there = tomllib.loads((tmp_path / "step-000007" / "experiment.toml").read_text())
    assert there["experiment"]["steps"] == 9


@pytest.mark.parametrize(
    ("step", "keep", "best", "left"),
    [
        (5, 2, 0, [4, 5, 6]),
        (6, 2, 0, [5, 6]),
        (6, 1, 0, [6]),
        (6, 5, 0, [2, 3, 4, 5, 6]),
        (6, 9, 0, [2, 3, 4, 5, 6]),
        (6, 2, 3, [3, 5, 6]),
        (6, 2, 5, [5, 6]),
        (4, 1, 2, [2, 4, 5, 6]),
    ],
)
def test_the_newest_the_best_and_later_ones_are_kept(tmp_path, step, keep, best, left):
    for number in (2, 3, 4, 5, 6):
        path = tmp_path / f"step-{number:06d}"
        path.mkdir()
        (path / "checkpoint.toml").touch()
    folder.prune(tmp_path, step, keep, best)
    assert names(tmp_path) == [f"step-{number:06d}" for number in left]


def test_without_a_best_one_only_the_newest_stay(tmp_path):
    whole(tmp_path, 1, 2)
    folder.prune(tmp_path, 2, 1)
    assert names(tmp_path) == ["step-000002"]


def test_what_is_no_checkpoint_names_those_that_are_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"is no complete checkpoint$"):
        folder.read_meta(tmp_path / "step-000001")
    whole(tmp_path, 3)
    with pytest.raises(CheckpointError, match=r"no complete checkpoint; there are .*step-000003$"):
        folder.read_meta(tmp_path / "step-000001")


@pytest.mark.parametrize(
    "content",
    [
        b"[checkpoint",
        b"\xff\xfe",
        b"",
        b"[other]\nstep = 1",
        b'[checkpoint]\nstep = -1\nmodel = "Toy"\ninput_shape = [4]\nfingerprint = "a"',
        b'[checkpoint]\nstep = "1"\nmodel = "Toy"\ninput_shape = [4]\nfingerprint = "a"',
        b'[checkpoint]\nstep = 1\nmodel = "Toy"\ninput_shape = [4]\nfingerprint = "a"\nmore = 1',
        b'[checkpoint]\nformat = "workbench checkpoint 9"\nstep = 1\nmodel = "Toy"\n'
        b'input_shape = [4]\nfingerprint = "a"',
    ],
)
def test_a_damaged_description_is_refused(tmp_path, content):
    (tmp_path / "checkpoint.toml").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"checkpoint\.toml is damaged"):
        folder.read_meta(tmp_path)


def test_the_newest_is_known_by_its_number(tmp_path):
    """By their names, which have six digits or more, the millionth would be an early one."""
    whole(tmp_path, 999_999, 1_000_000)
    folder.prune(tmp_path, 1_000_000, 1)
    assert names(tmp_path) == ["step-1000000"]
