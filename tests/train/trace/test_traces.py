"""Runs that trace some of their steps: what they leave, and the memory that rows tell of."""

import json

import pytest

from tests.predict.running import peak_of_a_step
from tests.train.small import GRAPH
from workbench.plan.experiment.experiment import SGD, Experiment
from workbench.plan.plans.plan import Plan
from workbench.train.trace import trace as traces
from workbench.train.trace.trace import Called, Computed, RankTrace

EXPERIMENT = Experiment(
    plan=Plan.hybrid(GRAPH, 2),
    data="digits",  # whose images are no tensors of torch's own memory
    batch_size=16,
    optimizer=SGD(lr=0.05, momentum=0.9),
    steps=7,
)
ROWS = ((8, 8),)


@pytest.fixture
def run(whole_run, weights):
    return lambda **fields: whole_run(EXPERIMENT.replace(**fields), weights)[:2]


def test_sampled_steps_are_left_in_the_directory(run):
    directory, _ = run(trace_every=3)
    assert traces.traced_steps(directory, 2) == [2, 5]
    for rank, sample in enumerate(traces.read(directory, 5, 2)):
        assert (sample.step, sample.rank) == (5, rank)
        assert sample.rows == ((8, 8),)
        assert sample.since_s > 0
        assert [s.what for s in sample.trace.stretches][:: len(sample.trace.stretches) - 1] == [
            "load",
            "update",
        ]
        assert "status" in {call.layer for call in sample.trace.calls}


@pytest.mark.slow
def test_rows_know_the_peak_of_every_step(run, on_ranks, weights):
    """Staging and what is summed in shared memory included, the step before left out."""
    expected = on_ranks.seated(2, peak_of_a_step, EXPERIMENT, weights)
    for every in (0, 1):
        _, ranks = run(trace_every=every)
        for rows, peak in zip(ranks, expected, strict=True):
            assert {row["peak_bytes"] for row in rows[2:-1]} == {peak}


def trace(seconds=1.0):
    stretch = Computed("forward", "fc1", (0.25, 0.5))
    interval = ((0.25, 0.375),)
    what = "all_gather", "fc1", "forward"
    call = Called("shard(0,1)", 3, *what, 64, (0.25, 0.5), False, interval, ())
    return RankTrace(seconds, (stretch,), (call,))


def test_the_last_few_steps_are_kept(tmp_path):
    for step in range(0, 100, 10):
        for rank in range(2):
            if (step, rank) != (90, 1):  # rank 1 is still at it
                traces.write(tmp_path, traces.Sample(step, rank, ROWS, 0.5, trace(float(step))))
    kept = traces.traced_steps(tmp_path, 2)
    assert kept == [20, 30, 40, 50, 60, 70, 80]
    sample = traces.read(tmp_path, 80, 2)[1]
    assert sample == traces.Sample(80, 1, ROWS, 0.5, trace(80.0))


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_text("{")])
def test_a_damaged_trace_is_named(tmp_path, damage):
    traces.write(tmp_path, traces.Sample(3, 0, ROWS, 0.5, trace()))
    (path,) = (tmp_path / "traces").glob("*.json")
    assert json.loads(path.read_text())["step"] == 3
    damage(path)
    with pytest.raises(ValueError, match=r"step-00000003\.rank-0\.json is no trace of rank 0"):
        traces.read(tmp_path, 3, 1)


def test_what_cannot_be_written_does_no_harm(tmp_path):
    traces.write(tmp_path / "gone" / "away", traces.Sample(3, 0, ROWS, 0.5, trace()))
    assert traces.traced_steps(tmp_path, 1) == []
