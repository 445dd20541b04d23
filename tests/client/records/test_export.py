"""A run's weights leave for other tools, and a run begins with weights of others."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.testing import assert_close

import workbench as wb
from workbench.store.errors import ClusterError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.checkpoint")


def same(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert_close(found[name], tensor, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["run", "folder", "checkpoint"])
def test_a_run_s_weights_as_safetensors(past, tmp_path, source):
    run = past.finished
    of = {"run": run, "folder": run.directory, "checkpoint": str(run.checkpoint)}[source]
    folder = wb.export_checkpoint(of, tmp_path / "out")
    same(load_file(folder / "model.safetensors"), run.state_dict())
    same(wb.read_weights(folder), run.state_dict())


def test_as_a_checkpoint_of_torch(past, tmp_path):
    expected = past.finished.state_dict()
    folder = wb.export_checkpoint(past.finished, tmp_path / "out", format="dcp")
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    same(found, expected)


def test_what_is_no_run(tmp_path):
    with pytest.raises(ClusterError, match="is neither a run's folder nor a checkpoint's"):
        wb.export_checkpoint(tmp_path, tmp_path / "out")


@pytest.mark.slow
def test_a_run_begins_with_weights_of_others(tmp_path):
    """At a rate of next to nothing, what it ends with is what it began with."""
    torch.manual_seed(3)
    theirs = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
    torch.manual_seed(4)
    own = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
    dcp.save(theirs.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    plan = wb.Plan.hybrid(wb.trace(own, input_shape=(1, 8, 8)), world_size=2)
    still = wb.Experiment(
        plan=plan, data="digits", batch_size=8, optimizer=wb.SGD(1e-30), steps=1, precision="fp32"
    )
    with wb.Cluster(2, directory=tmp_path / "runs", timeout=60.0) as cluster:
        with pytest.raises(wb.CheckpointError, match="weights are not those of Sequential"):
            cluster.train(still, weights={"0.weight": torch.zeros(1)})
        begun = cluster.train(still, weights=tmp_path / "dcp").wait(120.0)
        same(begun.state_dict(), theirs.state_dict())
        wb.export_checkpoint(begun, tmp_path / "hf", most_bytes=1000)
        again = cluster.train(still, weights=tmp_path / "hf").wait(120.0)
        same(again.state_dict(), theirs.state_dict())
        with pytest.raises(ClusterError, match="give resume or weights, not both"):
            cluster.train(still, weights=tmp_path / "hf", resume=begun)
