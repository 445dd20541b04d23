"""What is assigned to a dashboard, predicted, and read of ranks and traces; without a browser."""

import math

import numpy as np
import pytest
import traitlets

import workbench as wb
from tests.plan.graphs import mlp
from tests.widgets.dashboard.fake import MIB, FakeRun, row, traced
from workbench.plan.experiment.metrics import Span
from workbench.predict.measured import Timeline
from workbench.widgets.dashboard import Dashboard
from workbench.widgets.dashboard import timeline as lanes
from workbench.widgets.dashboard.runs import KEPT
from workbench.widgets.dashboard.series import CATEGORIES, RankSeries
from workbench.widgets.dashboard.timeline import forecast_of

PLAN = wb.Plan.hybrid(mlp(16, 16, 8), 2)
EXPERIMENT = wb.Experiment(
    plan=PLAN, data="digits", batch_size=32, optimizer=wb.SGD(lr=0.1, momentum=0.9), steps=80
)
MACHINE = wb.Machine.preset("h100-nvlink")


def test_several_runs_and_the_one_in_detail(show, views):
    runs = {"one": FakeRun(world_size=2), "two": FakeRun(world_size=3)}
    dashboard = show(runs)
    seen = []
    dashboard.observe(lambda change: seen.append(change["new"]), "state")
    runs["two"].feed(0, 4)
    assert (dashboard.shown, len(dashboard.ranks)) == ("one", 2)
    dashboard.shown = "two"
    assert (dashboard.run, len(dashboard.ranks)) == (runs["two"], 3)
    content, parts = views.wait_for("shown", lambda index: index == 1)
    assert content["names"] == ["one", "two"]
    assert parts["points 1"].size == 4 * 5
    assert "running" in seen
    with pytest.raises(traitlets.TraitError, match="no run 'three'; there are"):
        dashboard.shown = "three"


def test_another_run_may_be_assigned(show, views):
    first, second = FakeRun(), FakeRun(world_size=2)
    dashboard = show(first)
    second.feed(0, 6)
    dashboard.run = second
    views.wait(done=7)
    assert first.callbacks == []
    assert len(dashboard.ranks) == 2
    dashboard.runs = [first, second]
    assert list(dashboard.runs) == ["job 7", "job 7 (2)"]


@pytest.mark.parametrize(("given", "error"), [(3, TypeError), ([], ValueError), (["x"], TypeError)])
def test_only_runs_are_shown(given, error):
    with pytest.raises(error, match="a dashboard shows"):
        Dashboard(given)


def test_memory_and_traffic_are_predicted_and_with_a_machine_time(show, views):
    dashboard = show(FakeRun(experiment=EXPERIMENT))
    assert dashboard.settle()
    expected = wb.predict(PLAN, MACHINE, EXPERIMENT)
    without, found = wb.predict(PLAN, None, EXPERIMENT), dashboard.forecast
    for rank in range(2):
        assert found.ranks[rank, :5].sum() == without.memory[rank].peak_bytes
        assert found.ranks[rank, 5] == expected.traffic.received_bytes(rank)
    assert found.samples_per_s is None
    assert "dashboard.machine = cluster.calibrate" in found.reason
    dashboard.machine = MACHINE
    views.wait_for("predicted", lambda lanes: lanes["seconds"] > 0)
    found = dashboard.forecast
    assert (found.samples_per_s, found.reason) == (expected.samples_per_s, "")
    for rank in range(2):
        assert found.ranks[rank, :5].sum() == expected.memory[rank].peak_bytes


def test_what_cannot_be_predicted_says_why(show, views):
    machine = wb.Machine.preset("h100-nvlink").model_copy(update={"devices": MACHINE.devices * 3})
    dashboard = show(FakeRun(experiment=EXPERIMENT), machine=machine)
    assert dashboard.settle()
    assert dashboard.forecast.reason.startswith("No prediction: ")


def test_measured_categories_add_up_to_the_peak():
    ranks = RankSeries(1)
    ranks.put(0, row(3, 0))
    (found,) = ranks.figures
    parts = [found.weight_bytes, found.gradient_bytes, found.optimizer_bytes]
    assert sum(parts) == found.now_bytes == 133 * MIB
    assert sum(parts) + found.activation_bytes + found.buffer_bytes == found.peak_bytes
    assert found.received_per_s == pytest.approx(found.received_bytes / found.step_s)


def test_figures_are_means_of_the_last_steps():
    ranks = RankSeries(1, recent=3)
    for step, seconds in enumerate((9.0, 1.0, math.nan, 3.0)):
        ranks.put(0, row(step, 0, compute_s=seconds))
    assert ranks.figures[0].compute_s == 2.0


def test_an_elastic_job_may_have_other_ranks(show, views):
    run = FakeRun(world_size=4)
    dashboard = show(run)
    run.feed(0, 4)
    views.wait(done=5)
    run.experiment.plan.world_size = 2
    run.push([row(step, rank) for step in (5, 6) for rank in range(2)])
    views.wait(done=7)
    assert len(dashboard.ranks) == 2
    assert dashboard.series["step"] == [0, 1, 2, 3, 4, 5, 6]


def test_events_are_bounded(show, views):
    run = FakeRun()
    dashboard = show(run)
    run.notes += [f"note {number}" for number in range(3 * KEPT)]
    run.feed(0, 1)
    assert len(dashboard.events) == KEPT
    assert dashboard.events[-1] == f"note {3 * KEPT - 1}"


def test_a_traced_step_is_read_once_it_is_there(show, views):
    run = FakeRun(world_size=12)
    run.experiment.trace_every = 10
    dashboard = show(run)
    run.feed(0, 8)
    views.wait(done=9)
    run.traced = traced(12)
    run.feed(9, 9)
    content, parts = views.wait_for("measured", lambda found: found["step"] == 9)
    spans = parts["measured"].reshape(-1, lanes.COLUMNS)
    assert content["measured"]["ranks"] == [0, 8]
    assert sorted(set(spans[:, 0])) == list(range(8))
    dashboard.first_rank = 8
    content, parts = views.wait_for("measured", lambda found: found["ranks"] == [8, 4])
    assert parts["measured"].size == 4 * 3 * lanes.COLUMNS


def test_of_too_many_spans_the_longest_stay(monkeypatch):
    monkeypatch.setattr(lanes, "MOST_SPANS", 3)
    spans = tuple(Span(0, "compute", "forward", f"l{i}", float(i), 1.0 + i) for i in range(5))
    found = lanes.timeline_of(Timeline(4, (spans,), (20.0,)))
    assert found.spans[:, 5].tolist() == [3.0, 4.0, 5.0]
    assert found.left_out == 2


def test_categories_of_predictions_are_those_of_measurements():
    found = forecast_of(EXPERIMENT, None)
    assert found.ranks.shape == (2, len(CATEGORIES) + 1)
    assert (np.asarray(found.ranks)[:, :4] > 0).all()
