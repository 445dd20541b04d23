"""One process measures what kernels take, without engines."""

import pytest
import torch
from torch import nn

import workbench as wb
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import SGD, Experiment, Synthetic
from workbench.plan.plans.plan import Plan
from workbench.predict.prediction import predict

GRAPH = trace(
    nn.Sequential(nn.Conv2d(3, 128, 3), nn.Conv2d(128, 128, 3), nn.Flatten(), nn.Linear(2048, 10)),
    input_shape=(3, 8, 8),
)


@pytest.mark.slow
def test_memory_is_predicted_without_a_band_for_what_was_measured():
    before = torch.get_num_threads()
    plan = Plan.hybrid(GRAPH, 2)
    machine = wb.Machine.local(plan, rows=4)
    assert torch.get_num_threads() == before
    run = Experiment(
        plan=plan,
        data=Synthetic(samples=16),
        batch_size=8,
        optimizer=SGD(lr=0.1),
        steps=1,
    )
    known, guessed = predict(run, machine), predict(run)
    assert known.memory.unmeasured == ()
    assert guessed.memory.unmeasured == ("0", "1")
    assert ".." in repr(guessed)
    assert ".." not in repr(known)
    assert "is not measured" in str(guessed)
    assert known.step_time > 0
    frame = guessed.to_frame()
    assert (frame["least_peak_bytes"] < frame["most_peak_bytes"]).all()


@pytest.mark.slow
def test_a_graph_is_measured_whole():
    (device,) = wb.Machine.local(GRAPH, rows=(1, 2)).devices
    assert len(device.workspaces) == 2
    assert [rows for rows, *_ in device.workspaces[0].points] == [1, 2]


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(TypeError, match="takes graphs and plans, got str"):
        wb.Machine.local("vgg11")
    with pytest.raises(ValueError, match="rows must be"):
        wb.Machine.local(GRAPH, rows=0)
