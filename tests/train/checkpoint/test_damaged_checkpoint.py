import os

import pytest

from tests.train.checkpoint import saving
from workbench.train.checkpoint.checkpoint import CheckpointError, load

GRAPH = saving.graph()


@pytest.fixture
def saved(tmp_path):
    return saving.alone(until=1).save(tmp_path)


def test_a_truncated_file(saved):
    file = saved / "rank-00000.safetensors"
    os.truncate(file, file.stat().st_size - 5)
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors .*truncated"):
        load(saved, GRAPH)


def test_a_file_that_is_something_else(saved):
    (saved / "rank-00000.safetensors").write_bytes(b"\x80\x04K\x01." * 100)
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors is no whole safetensors"):
        load(saved, GRAPH)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "index.toml"])
def test_a_missing_file(saved, name):
    (saved / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} does not exist"):
        load(saved, GRAPH)


def test_a_hole(saved):
    index = saved / "index.toml"
    text = index.read_text()
    part, length = text.split('[tensors."4.weight"]', 1)
    index.write_text(
        part + '[tensors."4.weight"]' + length.replace("length = 12", "length = 11", 1)
    )
    with pytest.raises(CheckpointError, match=r"'4\.weight' cover 11 of 12"):
        load(saved, GRAPH)


def test_a_checkpoint_of_another_model(saved):
    with pytest.raises(
        CheckpointError,
        match=r"another model: '4\.weight' has shape \(12, 80\), the model's has \(9, 80\);",
    ):
        load(saved, saving.graph(width=9))


def test_a_checkpoint_of_another_input_shape(saved):
    with pytest.raises(CheckpointError, match="Sequential for 3x4x4, not Sequential for 3x8x2 as"):
        load(saved, saving.graph(shape=(3, 8, 2)))
