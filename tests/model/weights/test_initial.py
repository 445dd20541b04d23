"""Initial weights: one file, the same for the same seed, whoever writes it."""

import os
import threading

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.model.tracing.test_modules import Block
from workbench.model import CheckpointError, ModelError, WeightsFile, build, initialize, trace
from workbench.plan.placement.placement import Shard


@pytest.fixture(scope="module")
def graph():
    return trace("squeezenet1_1")


@pytest.fixture(scope="module")
def norms():
    return trace("shufflenet_v2_x0_5")


@pytest.mark.slow
def test_holds_the_state_dict_of_the_seed(norms, tmp_path):
    reader = WeightsFile(initialize(norms, 5, tmp_path))
    torch.manual_seed(5)
    state = build(norms.source).state_dict()
    assert set(reader.names) == set(state)
    for name, tensor in state.items():
        assert_close(reader.read(name), tensor, rtol=0, atol=0)


def test_slices_are_those_of_the_whole(graph, tmp_path):
    reader = WeightsFile(initialize(graph, 0, tmp_path))
    whole = reader.read("classifier.1.weight")
    shard = Shard(0, (3, 0, 7))
    pieces = [reader.read("classifier.1.weight", shard, rank) for rank in range(3)]
    assert_close(torch.cat(pieces), whole, rtol=0, atol=0)


def test_the_same_seed_gives_the_same_bytes(graph, tmp_path):
    first = initialize(graph, 1, tmp_path / "a")
    second = initialize(graph, 1, tmp_path / "b")
    other = initialize(graph, 2, tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()
    assert other.read_bytes() != second.read_bytes()
    assert first.name == second.name != other.name


def test_the_name_holds_model_and_seed(graph, tmp_path):
    path = initialize(graph, 1, tmp_path)
    assert path == tmp_path / f"squeezenet1_1-{graph.fingerprint}-seed1.safetensors"


def test_the_generator_is_left_as_it_was(graph, tmp_path):
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    initialize(graph, 1, tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_an_intact_file_is_used_again(graph, tmp_path):
    path = initialize(graph, 1, tmp_path)
    before = path.stat()
    assert initialize(graph, 1, tmp_path) == path
    assert path.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("damage", [lambda raw: raw[:-1], lambda raw: b"", lambda raw: b"x" * 99])
def test_a_damaged_file_is_written_anew(graph, tmp_path, damage):
    path = initialize(graph, 1, tmp_path)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert initialize(graph, 1, tmp_path) == path
    assert path.read_bytes() == whole


def test_two_callers_at_once(graph, tmp_path):
    paths = []

    def call():
        paths.append(initialize(graph, 1, tmp_path))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 2
    assert os.listdir(tmp_path) == [paths[0].name]
    WeightsFile(paths[0]).read("classifier.1.weight")


def test_a_user_s_module_keeps_its_values(tmp_path):
    module = Block().double()
    graph = trace(module, input_shape=(3, 8, 8))
    reader = WeightsFile(initialize(graph, 0, tmp_path, module=module))
    assert reader.read("scale").item() == 2  # a buffer that is not in the state_dict
    for name, tensor in module.state_dict().items():
        assert_close(reader.read(name), tensor.float(), rtol=0, atol=0)


def test_a_user_s_module_with_other_values_is_another_file(tmp_path):
    module = nn.Linear(3, 2)
    graph = trace(module, input_shape=(3,))
    first = initialize(graph, 0, tmp_path, module=module)
    assert initialize(graph, 0, tmp_path, module=module) == first
    with torch.no_grad():
        module.weight.add_(1)
    second = initialize(graph, 0, tmp_path, module=module)
    assert second != first
    assert_close(WeightsFile(second).read("weight"), module.weight.detach())


def test_tied_weights_are_written_once(tmp_path):
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    graph = trace(module, input_shape=(3,))
    reader = WeightsFile(initialize(graph, 0, tmp_path, module=module))
    assert set(reader.names) == {"0.weight", "0.bias", "1.bias"}


def test_a_user_s_module_is_needed(tmp_path):
    graph = trace(nn.Linear(3, 2), input_shape=(3,))
    with pytest.raises(ModelError, match="its values are in the module"):
        initialize(graph, 0, tmp_path)
    assert os.listdir(tmp_path) == []


def test_another_module_is_refused(tmp_path):
    graph = trace(nn.Linear(3, 2), input_shape=(3,))
    with pytest.raises(ModelError, match=r"'weight' of shape \(2, 3\) is expected, it has shape"):
        initialize(graph, 0, tmp_path, module=nn.Linear(4, 2))
    with pytest.raises(ModelError, match="it has no such tensor"):
        initialize(graph, 0, tmp_path, module=nn.ReLU())


def test_a_folder_that_cannot_be_written_to(graph, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="could not be written"):
        initialize(graph, 0, tmp_path / "file")


@pytest.mark.parametrize("frozen", [False, True])
def test_a_module_that_trains_something_else_than_when_it_was_traced_is_refused(frozen, tmp_path):
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    module[0].weight.requires_grad_(not frozen)
    graph = trace(module, input_shape=(4,))
    initialize(graph, 0, tmp_path, module=module)
    module[0].weight.requires_grad_(frozen)
    with pytest.raises(
        ModelError, match=rf"requires_grad of '0\.weight' is {frozen}.*trace it again"
    ):
        initialize(graph, 0, tmp_path, module=module)
