"""Weights to and from others: what torch's and safetensors' own loaders make of them."""

import json
import os
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing import assert_close

from workbench.model import CheckpointError, WeightsFile, initialize, trace
from workbench.model.weights.exchange import read_weights, write_weights

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.checkpoint")


class Tied(nn.Module):
    """An embedding that is also the head, a buffer, and a buffer that no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("scale", torch.full((6,), 2.0), persistent=False)

    def forward(self, x):
        return self.last(self.norm(torch.relu(self.first(x)))) * self.scale


@pytest.fixture
def state():
    torch.manual_seed(0)
    return Tied().state_dict()


def same(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert_close(found[name], tensor, rtol=0, atol=0)


def test_one_file_as_hugging_face_has_it(state, tmp_path):
    folder = write_weights(state, tmp_path / "out", "safetensors")
    assert os.listdir(folder) == ["model.safetensors"]
    same(load_file(folder / "model.safetensors"), state)
    same(read_weights(folder), state)
    same(read_weights(folder / "model.safetensors"), state)


def test_several_files_and_their_index(state, tmp_path):
    folder = write_weights(state, tmp_path / "out", "safetensors", most_bytes=160)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    whole = {}
    for file in files:
        part = load_file(folder / file)
        assert set(part) == {name for name, f in index["weight_map"].items() if f == file}
        assert len(part) == 1 or sum(tensor.nbytes for tensor in part.values()) <= 160
        whole |= part
    same(whole, state)
    same(read_weights(folder), state)


def test_torch_loads_what_is_written(state, tmp_path):
    folder = write_weights(state, tmp_path / "out", "dcp")
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    same(found, state)
    same(read_weights(folder), state)


def test_what_torch_writes_is_read(state, tmp_path):
    """Nested, beside an optimizer's state and numbers, which are left where they are."""
    whole = {"model": state, "step": 5, "optimizer": {"lr": 0.1, "momentum": torch.ones(3)}}
    dcp.save(whole, checkpoint_id=tmp_path / "in", no_dist=True)
    same(read_weights(tmp_path / "in", prefix="model."), state)
    assert set(read_weights(tmp_path / "in")) > {"optimizer.momentum", "model.norm.weight"}
    with pytest.raises(CheckpointError, match=r"no tensor whose name begins with 'net\.'"):
        read_weights(tmp_path / "in", prefix="net.")


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_metadata_execute_nothing(state, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write_weights(state, tmp_path / "out", "dcp")
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"has a \w+\.mkdir in the place of a Metadata"):
        read_weights(folder)
    assert not (tmp_path / "executed").exists()
    pickle.loads((folder / ".metadata").read_bytes())  # as torch does: the fault is a real one
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize("content", [b"", b"damaged", pickle.dumps({"a": 1})])
def test_damaged_metadata(state, tmp_path, content):
    folder = write_weights(state, tmp_path / "out", "dcp")
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: "):
        read_weights(folder)


def test_a_missing_file_of_dcp(state, tmp_path):
    folder = write_weights(state, tmp_path / "out", "dcp")
    for path in folder.glob("*.distcp"):
        path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_weights(folder)


def test_what_is_refused(state, tmp_path):
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"pickles .* can execute code"):
        read_weights(tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        read_weights(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"holds neither one \.safetensors file"):
        read_weights(tmp_path)
    with pytest.raises(CheckpointError, match="no format 'pickle'"):
        write_weights(state, tmp_path / "out", "pickle")
    write_weights(state, tmp_path / "out", "safetensors", most_bytes=160)
    with pytest.raises(CheckpointError, match="is there already"):
        write_weights(state, tmp_path / "out", "safetensors")
    index = tmp_path / "out" / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    told["weight_map"]["first.weight"] = "../x.safetensors"
    index.write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match="no file beside it"):
        read_weights(tmp_path / "out")
    told["weight_map"]["first.weight"] = told["weight_map"]["norm.bias"]
    index.write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match="which the index says it has"):
        read_weights(tmp_path / "out")


def test_nothing_is_left_where_writing_fails(state, tmp_path, monkeypatch):
    def full(*_):
        raise OSError("no space")

    monkeypatch.setattr("workbench.model.weights.exchange.write_tensors", full)
    with pytest.raises(CheckpointError, match="no space"):
        write_weights(state, tmp_path / "out", "safetensors")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_a_model_begins_with_what_is_given(state, tmp_path, format):
    torch.manual_seed(1)
    module = Tied()
    graph = trace(module, input_shape=(6,))
    folder = write_weights(state, tmp_path / "out", format)
    given = read_weights(folder)
    reader = WeightsFile(initialize(graph, 0, tmp_path, module=module, given=given))
    for layer in graph.layers:
        for weight in layer.weights:
            expected = state[weight.name] if weight.persistent else module.scale
            assert_close(reader.read(weight.name), expected, rtol=0, atol=0)


def test_half_precision_and_tied_names(state, tmp_path):
    """As Hugging Face writes them: bf16, and a tied weight once, whichever name it has."""
    module = Tied()
    graph = trace(module, input_shape=(6,))
    half = {n: t.bfloat16() if t.is_floating_point() else t for n, t in state.items()}
    del half["first.weight"]
    save_file(half, tmp_path / "x.safetensors")
    given = read_weights(tmp_path / "x.safetensors")
    reader = WeightsFile(initialize(graph, 0, tmp_path, module=module, given=given))
    (name,) = {n for n in ("first.weight", "last.weight") if n in reader.names}
    assert_close(reader.read(name), half["last.weight"].float(), rtol=0, atol=0)


def test_another_model_s_weights_are_refused(state, tmp_path):
    module = Tied()
    graph = trace(module, input_shape=(6,))
    wrong = dict(state)
    del wrong["norm.bias"]
    wrong["norm.weight"] = torch.zeros(7)
    wrong["more"] = torch.zeros(2)
    said = (
        r"not those of Tied: .*'norm.weight' has shape \(7,\), the model's has \(6,\); "
        r"no tensor 'norm.bias'.*; the model has no 'more'"
    )
    with pytest.raises(CheckpointError, match=said):
        initialize(graph, 0, tmp_path, module=module, given=wrong)
    shutil.rmtree(tmp_path)
