"""From what ranks wrote to timelines, comparisons and machines."""

import dataclasses
import json
from itertools import pairwise

import pytest
from torch import nn

import workbench as wb
from tests.predict.machines import FAST
from workbench.client.calibration.recalibrating import recalibrated
from workbench.client.run import comparing
from workbench.client.run.comparing import timeline_of
from workbench.plan.experiment.metrics import Span
from workbench.plan.io.errors import MachineError
from workbench.plan.machine.work import work_of
from workbench.predict.time.simulation import PARTS
from workbench.store.errors import ClusterError
from workbench.train.run.requests import CarriedOut, LearningRate, RunRequests
from workbench.train.trace.trace import Called, Computed, RankTrace, Sample, write

NET = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
GRAPH = wb.trace(NET, input_shape=(1, 8, 8))
PLAN = wb.Plan.hybrid(GRAPH, world_size=2)
EXPERIMENT = wb.Experiment(
    plan=PLAN, data="digits", batch_size=64, optimizer=wb.SGD(lr=0.1), steps=13, trace_every=3
)
PRESET = wb.Machine.preset("cpu-10gbe").replace(ranks_per_host=None)  # as the engines are here
LONG_S = 120.0


def call(number, during, *, beside=False, blocked=(), helped=(), layer="b", received=8):
    what = ("all_reduce", "gradients", "step") if beside else ("all_gather", layer, "forward")
    return Called("shard(0,1)", number, *what, received, during, beside, tuple(blocked), helped)


def sample(rank, since_s, stretches, calls, seconds=10.0, step=5):
    trace = RankTrace(seconds, tuple(stretches), tuple(calls))
    return Sample(step, rank, ((32, 32),), since_s, trace)


def test_a_collective_waits_until_the_last_rank_has_come():
    """Rank 1 began a second later than rank 0, and came to the gather three seconds later."""
    forward = Computed("forward", "b", (0.0, 8.0))
    early = sample(0, 0.5, [forward], [call(1, (2.0, 7.0), blocked=[(2.0, 7.0)])])
    late = sample(1, 1.5, [forward], [call(1, (4.0, 6.0), blocked=[(4.0, 6.0)])])
    line = timeline_of([early, late])
    gather = ("all_gather", "forward", 8)
    assert line.spans(0) == (
        Span(0, "compute", "forward", "b", 0.0, 2.0),
        Span(0, "compute", "wait", "b", 2.0, 3.0),
        Span(0, "compute", "collective", "b", 5.0, 2.0, *gather),
        Span(0, "compute", "forward", "b", 7.0, 1.0),
    )
    assert line.spans(1) == (
        Span(1, "compute", "forward", "b", 1.0, 4.0),
        Span(1, "compute", "collective", "b", 5.0, 2.0, *gather),
        Span(1, "compute", "forward", "b", 7.0, 2.0),
    )
    assert line.seconds == 10.0
    parts = {"forward": 3.0, "wait": 3.0, "communication": 2.0, "step": 2.0}
    assert line.breakdown(0) == {part: parts.get(part, 0.0) for part in PARTS}


def test_collectives_beside_the_computation_follow_each_other():
    """The second began before the first was over; both are waited for at the end."""
    backward = Computed("backward", "b", (0.0, 4.0))
    calls = [
        call(1, (1.0, 6.0), beside=True, blocked=[(5.0, 6.0)], helped=((1.0, 1.5),)),
        call(2, (2.0, 8.0), beside=True, blocked=[(6.0, 8.0)], helped=((2.0, 2.5),)),
    ]
    line = timeline_of([sample(rank, 0.0, [backward], calls) for rank in range(2)])
    everything = ("all_reduce", "step", 8)
    assert line.spans(0) == (
        Span(0, "compute", "backward", "b", 0.0, 4.0),
        Span(0, "communication", "collective", "gradients", 1.0, 5.0, *everything),
        Span(0, "compute", "wait", "gradients", 5.0, 1.0),
        Span(0, "compute", "wait", "gradients", 6.0, 2.0),
        Span(0, "communication", "collective", "gradients", 6.0, 2.0, *everything),
    )


def passes(seconds):
    """A step of EXPERIMENT on one rank, every pass so long."""
    names = [layer.name for layer in GRAPH.layers]
    every = [("forward", name) for name in names] + [("backward", name) for name in names]
    return [
        Computed(what, name, (index * seconds, (index + 1) * seconds))
        for index, (what, name) in enumerate(every)
    ]


def test_a_machine_takes_the_median_of_a_run():
    steps = [
        [sample(rank, 0.0, passes(seconds), []) for rank in range(2)]
        for seconds in (0.25, 0.5, 8.0)
    ]
    machine = recalibrated(PRESET, EXPERIMENT, steps)
    for layer in GRAPH.layers:
        work = work_of(PLAN, layer, 1, (32, 32), "fp32")
        found = machine.device(1).seconds(work)
        assert (found.forward_s, found.backward_s, found.source) == (0.5, 0.5, "measured")
    again = recalibrated(machine, EXPERIMENT, [steps[0]])
    assert len(again.devices[0].samples) == len(machine.devices[0].samples)
    assert {sample.forward_s for sample in again.devices[0].samples} == {0.25}


@pytest.mark.parametrize("lasted", [(0.75, 0.75), (0.75, 1.0)])
def test_a_step_that_was_traced_is_predicted_as_it_was(lasted):
    """But for what it waited; ranks that are not equally fast have devices of their own."""
    count = len(set(lasted))
    machine = PRESET.replace(devices=PRESET.devices * count, within=FAST)
    step = []
    for rank, seconds in enumerate(lasted):
        pass_s = seconds / 15
        work = [one for one in passes(pass_s) if (one.what, one.label) != ("backward", "0")]
        load = Computed("load", "input", (1.0, 1.0 + pass_s / 2))
        update = Computed("update", "sgd", (2.0, 2.0 + pass_s / 4))
        waited = call(1, (3.0, 3.25), blocked=[(3.0, 3.25)])
        step.append(sample(rank, 0.0, [*work, load, update], [waited], 0.25 + seconds))
    found = recalibrated(machine, EXPERIMENT, [step])
    prediction = wb.predict(PLAN, found, EXPERIMENT)
    assert prediction.step_time == pytest.approx(max(lasted), rel=1e-3)
    for parts, own in zip(prediction.breakdown, lasted, strict=True):
        assert sum(parts.values()) - parts["wait"] == pytest.approx(own, rel=1e-3)


def test_devices_that_differ_keep_their_own_times():
    machine = PRESET.replace(devices=PRESET.devices * 2)
    step = [sample(rank, 0.0, passes(0.25 * (1 + rank)), []) for rank in range(2)]
    found = recalibrated(machine, EXPERIMENT, [step])
    for rank, device in enumerate(found.devices):
        assert {sample.forward_s for sample in device.samples} == {0.25 * (1 + rank)}
    with pytest.raises(ClusterError, match="devices for 3 ranks, and the run had 2"):
        recalibrated(PRESET.replace(devices=PRESET.devices * 3), EXPERIMENT, [step])


def row(step, rank, seconds, peak):
    parts = {"compute_s": seconds, "communication_s": 0.0, "wait_s": 0.0}
    return {"step": step, "rank": rank, "peak_bytes": peak, **parts}


def test_a_measurement_leaves_out_the_first_steps_and_those_that_were_traced(tmp_path):
    for rank in range(2):
        write(tmp_path, sample(rank, 0.0, passes(0.5), []))
    seconds = {0: 9.0, 1: 9.0, 2: 7.0, 3: 1.0, 4: 2.0, 5: 8.0, 6: 3.0}
    rows = [row(step, rank, s + rank, 100 + step) for step, s in seconds.items() for rank in (0, 1)]
    found = comparing.measurement_of(tmp_path, EXPERIMENT, rows)
    assert found.step_s == (2.0, 3.0)
    assert found.peak_bytes == (104, 104)
    assert [line.step for line in found.timelines] == [5]
    local = EXPERIMENT.replace(sync=wb.LocalSGD(every=3))
    assert comparing.measurement_of(tmp_path, local, rows).step_s == pytest.approx((4.2, 5.2))


def test_a_measurement_begins_where_the_run_went_on_under_its_plan(tmp_path):
    """Steps under another plan took another time, and other memory."""
    requests = RunRequests(tmp_path)
    for value, step in ((PLAN, 4), (LearningRate(0.01), 8), (wb.Plan.data_parallel(GRAPH, 2), 0)):
        number = requests.submit(value)
        if step:  # the last one is not carried out yet
            requests.carry_out(number, CarriedOut(step))
    for step in (2, 7):
        for rank in range(2):
            write(tmp_path, sample(rank, 0.0, passes(0.5), [], step=step))
    rows = [row(step, rank, 9.0 - step, 100 + step) for step in range(9) for rank in (0, 1)]
    found = comparing.measurement_of(tmp_path, EXPERIMENT.replace(trace_every=0), rows)
    assert [line.step for line in found.timelines] == [7]
    assert found.step_s == (2.0, 2.0)  # the median of steps 6, 7 and 8
    assert found.peak_bytes == (107, 107)


def test_steps_that_were_traced_under_another_plan_are_no_measure(tmp_path):
    requests = RunRequests(tmp_path)
    requests.carry_out(requests.submit(PLAN), CarriedOut(6))
    for rank in range(2):
        write(tmp_path, sample(rank, 0.0, passes(0.5), [], step=5))
    with pytest.raises(ClusterError, match="no step has been traced since step 6"):
        comparing.whole_samples(tmp_path, EXPERIMENT)


def test_an_epoch_s_short_batch_is_no_measure(tmp_path):
    for rank in range(2):
        short = dataclasses.replace(sample(rank, 0.0, passes(0.5), []), rows=((3, 2),))
        write(tmp_path, short)
    with pytest.raises(ClusterError, match="none has a whole batch of 64 samples"):
        comparing.whole_samples(tmp_path, EXPERIMENT)


@pytest.fixture(scope="module")
def run(cluster):
    return cluster.train(EXPERIMENT, module=NET).wait(LONG_S)


def test_a_run_shows_where_its_steps_went(run, tmp_path):
    line = run.timeline()
    assert line.step == 11
    assert run.timeline(2).step == 2
    assert repr(line).startswith("<Timeline of step 11: ")
    html = line._repr_html_()
    assert "<svg" in html
    assert "script" not in html
    for rank in range(2):
        spans = line.spans(rank)
        assert {span.label for span in spans if span.what == "forward"} == {"0", "1", "2", "3"}
        assert sum(line.breakdown(rank).values()) == pytest.approx(line.lasted[rank])
        for lane in ("compute", "communication"):
            own = [span for span in spans if span.lane == lane and span.seconds > 0]
            for before, after in pairwise(own):
                assert before.end_s <= after.start_s + 1e-9
    line.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len([event for event in events if event["ph"] == "X"]) == sum(map(len, line.of_rank))


def test_the_work_of_a_step_of_a_run_is_predicted_as_it_was(run):
    """On devices that were measured in that very step, whatever it waited for the other rank."""
    machine = PRESET.replace(devices=PRESET.devices * 2)
    for samples in comparing.whole_samples(run.directory, EXPERIMENT):
        parts = wb.predict(PLAN, recalibrated(machine, EXPERIMENT, [samples]), EXPERIMENT).breakdown
        for own, traced in zip(parts, samples, strict=True):
            held_s = sum(end - begin for begin, end in traced.trace.held_up)
            work_s = sum(own.values()) - own["wait"] - own["communication"]
            assert work_s == pytest.approx(traced.trace.seconds - held_s, rel=0.02)


def test_a_run_is_held_against_a_prediction(run):
    prediction = wb.predict(PLAN, PRESET, EXPERIMENT.replace(steps=1000))
    found = run.compare(prediction)
    for one in found.ranks:
        assert one.received_bytes.error == 0.0
        assert abs(one.peak_bytes.error) < 0.05
        assert one.step_s.measured > 0
    named = {(part.what, part.label) for part in found.parts}
    assert {(what, layer) for what in ("forward", "backward") for layer in "123"} <= named
    gaps = [abs(pair.difference) for pair in found.parts.values()]
    assert gaps == sorted(gaps, reverse=True)
    predicted = {part for part, pair in found.parts.items() if part.op and pair.predicted}
    assert {part for part in found.parts if part.op} == predicted
    assert "Predicted above measured" in found._repr_html_()
    assert "furthest off first" in found._repr_html_()
    assert str(found).startswith(repr(found))


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (EXPERIMENT.replace(batch_size=32), "batch_size 32, and the run had 64"),
        (
            EXPERIMENT.replace(plan=wb.Plan.data_parallel(GRAPH, 2)),
            "layer '1' has None, and in the run it had .*shard_out",
        ),
        (
            EXPERIMENT.replace(plan=wb.Plan.data_parallel(GRAPH, 4)),
            "a plan for 4 ranks, and the run had 2",
        ),
    ],
)
def test_a_prediction_of_something_else_is_refused(run, other, difference):
    with pytest.raises(wb.ExperimentError, match=f"for another experiment: {difference}"):
        run.compare(wb.predict(other.plan, PRESET, other))


def test_what_is_missing_is_said(run, cluster):
    with pytest.raises(MachineError, match="time needs a machine"):
        run.compare(wb.predict(PLAN, None, EXPERIMENT))
    with pytest.raises(ClusterError, match=r"step 4 was not traced, .*there are 2, 5, 8, 11"):
        run.timeline(4)
    untraced = cluster.train(EXPERIMENT.replace(steps=1, trace_every=0), module=NET).wait(LONG_S)
    with pytest.raises(ClusterError, match=r"trace_every is 0; .*replace\(trace_every=5\)"):
        untraced.compare(wb.predict(PLAN, PRESET, EXPERIMENT))


def test_a_run_recalibrates_the_machine_that_it_ran_on(run):
    machine = run.calibrated(PRESET)
    prediction = wb.predict(PLAN, machine, EXPERIMENT)
    assert prediction.estimated == ()
    before = run.compare(wb.predict(PLAN, PRESET, EXPERIMENT)).parts
    for part, pair in run.compare(prediction).parts.items():
        if part.what == "forward":
            assert abs(pair.difference) <= max(abs(before[part].difference), 1e-4)
