"""What a run's folder says of what it ran with."""

import json
import os
import sys

import pytest
import torch

import workbench as wb
from workbench.client.calibration import cache
from workbench.client.records.environment import Environment, machine_of
from workbench.store.errors import ClusterError

LONG_S = 60.0


def test_every_run_says_what_it_ran_with(train, cluster, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "secret-1234")
    run = train("train").wait(LONG_S)
    found = run.environment
    text = (run.directory / "environment.json").read_text()
    assert json.loads(text)["seed"] == run.experiment.seed
    assert "secret-1234" not in text
    assert torch.__version__.startswith(found.versions["torch"])  # which may name its CUDA, too
    assert found.versions["workbench"] == wb.__version__
    assert found.devices == cluster.devices
    assert {each.name for each in found.hosts} == {each.host for each in cluster.devices}
    assert found.hosts[0].processor == cache.processor()
    assert (found.backend, found.directory) == ("gloo", os.getcwd())
    assert found.submitted_by == " ".join(sys.orig_argv)
    times = found.times
    assert times.submitted <= times.started <= times.ended
    assert "threads per engine" in str(found)
    assert found.versions["numpy"] in found._repr_html_()


def test_a_run_that_waits_was_only_submitted(train):
    first, second = train("slowly", steps=1000), train("train")
    times = second.environment.times
    assert (times.started, times.ended) == (None, None)
    second.stop()
    assert second.wait(LONG_S).state == "stopped"
    assert second.environment.times.ended is not None
    first.stop()
    first.wait(LONG_S)


def test_a_calibrated_machine_is_kept_with_the_run(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "place", lambda name: tmp_path / f"{name}.toml")
    graph = wb.trace(torch.nn.Linear(8, 10), input_shape=(8,))
    plan = wb.Plan.data_parallel(graph, 2)
    experiment = wb.Experiment(plan=plan, batch_size=8, data="synthetic", optimizer="sgd", steps=1)
    found = Environment.of(cluster, experiment)
    assert found.module == "Linear(in_features=8, out_features=10, bias=True)"
    assert found.sources == ()
    assert dict(found.to_frame().to_numpy().tolist())["seed"] == "0"
    found.save(tmp_path / "x.csv")
    assert "\nseed,0\n" in (tmp_path / "x.csv").read_text()
    found.write(tmp_path)
    assert machine_of(tmp_path) is None
    machine = wb.Machine.preset("h100-nvlink")
    cache.keep(found.machine, machine)
    found.write(tmp_path)  # the run goes on, perhaps elsewhere
    assert machine_of(tmp_path) == machine
    assert Environment.load(tmp_path) == found
    assert (tmp_path / "environment-1.json").exists()


def test_a_damaged_file_is_named(tmp_path):
    assert Environment.load(tmp_path) is None
    (tmp_path / "environment.json").write_text("{")
    with pytest.raises(ClusterError, match=r"environment\.json cannot be read"):
        Environment.load(tmp_path)
