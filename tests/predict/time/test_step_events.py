"""A step in time: by hand where it is small, by what must hold where it is drawn."""

import json
import pickle
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.layers import nets
from tests.layers.drawn import plans
from tests.plan import graphs
from tests.predict.machines import FAST, device, link, machine
from workbench.plan.experiment.metrics import KINDS, LANES
from workbench.plan.io.errors import ExperimentError, MachineError, PlanError
from workbench.plan.plans.plan import Plan
from workbench.predict.time.simulation import PARTS, simulated
from workbench.program.step import program_of

PROFILE = settings(max_examples=40, derandomize=True, database=None)


def experiment(plan, **fields):
    given = dict(data="digits", optimizer=wb.SGD(lr=0.1), steps=1, batch_size=8)
    return wb.Experiment(plan=plan, **given | fields)


def predicted(plan, on=None, **fields):
    return wb.predict(plan, on or machine(), experiment(plan, **fields))


ONE = graphs.Builder((1000,)).linear("fc", 500).graph()  # 1 Mflop a row forward, 1 backward


def test_two_ranks_with_unequal_rows():
    """3 rows in 2 + 1: 2 ms and 1 ms forward, as much backward (no input needs a gradient).

    The gradient, 2,002,000 bytes, is summed when both are there, at 4 ms: each receives as many
    bytes, in 2.002 ms. Status: 3 + 2 numbers of 8 bytes, 40 ns.
    """
    prediction = predicted(Plan.data_parallel(ONE, 2), batch_size=3)
    assert prediction.step_time == pytest.approx(4e-3 + 2.002e-3 + 40e-9, rel=1e-12)
    slow, fast = prediction.breakdown
    assert slow["wait"] == pytest.approx(2.002e-3)
    assert fast["wait"] == pytest.approx(2.002e-3 + 2e-3)
    assert slow["forward"] == pytest.approx(2e-3)
    assert fast["communication"] == pytest.approx(40e-9)
    assert prediction.efficiency == pytest.approx(3e-3 / prediction.step_time)
    assert prediction.samples_per_s == pytest.approx(3 / prediction.step_time)
    spans = [span for span in prediction.timeline.spans(1) if span.lane == "communication"]
    assert [(span.what, span.label) for span in spans] == [
        ("wait", "gradients"),
        ("collective", "gradients"),
    ]
    assert spans[1].start_s == pytest.approx(4e-3)
    assert spans[1].bytes == 2_002_000


def test_a_layer_that_is_cut():
    """4 rows on 2 ranks: half the filters of all rows, 2 ms each way.

    A rank receives 2 rows of 4,000 bytes; 2 labels of 8; of the cut loss one maximum of 4 bytes
    for each of 4 rows, and the sums of two numbers a row; and the status.
    """
    prediction = predicted(Plan.hybrid(ONE, 2), batch_size=4)
    received = 2 * 4000 + 2 * 8 + 4 * 4 + 2 * 4 * 4 + 5 * 8
    assert prediction.step_time == pytest.approx(4e-3 + received * 1e-9, rel=1e-12)


def test_more_of_a_step():
    """Loading, updating, and what every step costs besides; with the overhead of operations."""
    toy = device(load_s_per_byte=1e-9, update_s_per_byte={"sgd": 2e-9}, step_s=1e-4, call_s=1e-5)
    parts = predicted(Plan.data_parallel(ONE, 1), machine(toy), batch_size=2).breakdown[0]
    assert parts["load"] == pytest.approx(8000e-9)
    assert parts["update"] == pytest.approx(2_002_000 * 2e-9)
    assert parts["step"] == pytest.approx(1e-4)
    assert parts["forward"] == pytest.approx(2e-3 + 1e-5)
    assert parts["communication"] == parts["wait"] == 0
    timed = predicted(Plan.data_parallel(ONE, 1), machine(toy.replace(step_s=0.0)), batch_size=2)
    assert timed.breakdown[0]["loss"] == pytest.approx(3e-5)


def test_gradients_travel_beside_backward():
    graph = graphs.mlp(1000, 500, 500)
    plan = Plan.data_parallel(graph, 2)
    sync = wb.Synchronous(bucket_bytes=1)
    prediction = predicted(plan, sync=sync, batch_size=20)
    alone = predicted(plan, machine(within=link(busy=1)), sync=sync, batch_size=20)
    spans = prediction.timeline.spans(0)
    sent = [s for s in spans if s.lane == "communication"]
    back = [s for s in spans if s.what == "backward" and s.label == "fc0"]
    assert sent[0].start_s <= back[0].start_s
    assert len(sent) == 4
    overlapped = 1_002_000e-9  # of fc1's weight and bias
    assert alone.step_time - prediction.step_time == pytest.approx(overlapped, rel=1e-6)


def test_slower_beside_a_collective():
    graph = graphs.mlp(1000, 500, 500)
    slow = machine(slowdown=2)
    sync = wb.Synchronous(bucket_bytes=1)
    plan = Plan.data_parallel(graph, 2)
    more = [predicted(plan, on, sync=sync, batch_size=20).step_time for on in (machine(), slow)]
    assert more[1] > more[0]


def test_recomputed_layers_run_twice():
    graph = graphs.mlp(1000, 500, 500, 10)
    plan = Plan.data_parallel(graph, 1)
    once, twice = (predicted(p, batch_size=8) for p in (plan, plan.with_recompute("fc1")))
    forward = 8 * 2 * 500 * 500 / 1e9
    assert twice.step_time - once.step_time == pytest.approx(forward)
    tracked = predicted(plan.with_recompute("fc1"), machine(device(recomputed_s=2.0)), batch_size=8)
    assert tracked.step_time - twice.step_time == pytest.approx(2.0)


def test_local_sgd_averages_now_and_then():
    plan = Plan.data_parallel(ONE, 2)
    often, rarely = (
        predicted(plan, sync=wb.LocalSGD(every=every), batch_size=4) for every in (1, 10)
    )
    never = 4e-3 + 40e-9
    averaging = often.step_time - never
    assert averaging == pytest.approx(2_002_000e-9)
    assert rarely.step_time - never == pytest.approx(averaging / 10)
    assert sum(rarely.breakdown[0].values()) == pytest.approx(rarely.step_time)


def test_optimizers_in_parts():
    toy = machine(device(update_s_per_byte={"sgd": 1e-8}), within=FAST)
    plan = Plan.data_parallel(ONE, 4)
    whole, parts = (
        predicted(plan, toy, shard_optimizer=on).breakdown[0]["update"] for on in (False, True)
    )
    assert parts == pytest.approx(whole / 4)
    wired = predicted(plan, machine(), shard_optimizer=True)
    handed = [s for s in wired.timeline.spans(0) if s.op == "all_gather"]
    assert [s.label for s in handed] == ["parameters"]
    assert sum(s.bytes for s in handed) == pytest.approx(2_002_000 * 3 / 4, rel=1e-3)


def test_updates_fused_into_the_all_reduce():
    """Half of a direct all-reduce each way; it takes as long as the largest segment's owner."""
    direct = dict(sync=wb.Synchronous(algorithm="direct"))
    plan, toy = Plan.data_parallel(ONE, 4), machine(device(update_s_per_byte={"sgd": 1e-8}))
    whole = exchanged(predicted(plan, toy, **direct))
    fused = exchanged(predicted(plan, toy, shard_optimizer=True, **direct))
    assert fused["all_reduce"] == (0, 0)
    for op in ("reduce_scatter", "all_gather"):
        assert fused[op] == pytest.approx([part / 2 for part in whole["all_reduce"]], rel=1e-3)
    run = predicted(plan, toy, shard_optimizer=(2, 1, 1, 0), **direct)
    unequal = exchanged(run)
    assert unequal["reduce_scatter"][0] == pytest.approx(2 * fused["reduce_scatter"][0])
    assert unequal["reduce_scatter"][1] == pytest.approx(2_002_000 * 3 / 2, rel=1e-3)
    assert unequal["all_gather"][1] == pytest.approx(2_002_000 / 2, rel=1e-3)
    assert run.breakdown[3]["update"] == 0


def exchanged(prediction):
    """Seconds and bytes of the first rank's exchanges of gradients and parameters, by operation."""
    spans = [s for s in prediction.timeline.spans(0) if s.label in ("gradients", "parameters")]
    return {
        op: (
            sum(s.seconds for s in spans if s.op == op),
            sum(s.bytes for s in spans if s.op == op),
        )
        for op in ("all_reduce", "reduce_scatter", "all_gather")
    }


@pytest.mark.parametrize("scheme", ["B", "B/K"])
def test_rounds(scheme):
    """The same work; the boundary is gathered in parts, and ahead where ranks share no memory."""
    graph = graphs.mlp(400, 200, 1000, 500)
    plan = Plan.hybrid(graph, 2)
    whole = predicted(plan, machine(within=FAST))
    rounds = predicted(plan.with_rounds(scheme), machine(within=FAST))
    assert rounds.step_time == pytest.approx(whole.step_time)
    wired = machine(device(kind="cuda"))
    ahead = predicted(plan.with_rounds(scheme), wired).timeline.spans(0)
    gathers = [s for s in ahead if s.op == "all_gather" and s.lane == "communication"]
    assert len(gathers) == 2


@st.composite
def cases(draw):
    net = draw(st.sampled_from(nets.NETS))
    plan, _ = draw(plans(net))
    plan = plan.with_batch_norm(draw(st.sampled_from(["local", "synchronized"])))
    sync = draw(
        st.sampled_from([wb.Synchronous(bucket_bytes=600), wb.LocalSGD(every=3), wb.Synchronous()])
    )
    run = experiment(
        plan, batch_size=draw(st.integers(4, 9)), accumulate=draw(st.integers(1, 2)), sync=sync
    )
    wire = link(
        latency_s=draw(st.sampled_from([0.0, 1e-6])),
        bandwidth=draw(st.sampled_from([1e6, 1e9])),
        busy=draw(st.sampled_from([0.0, 0.4, 1.0])),
    )
    toy = device(
        kind=draw(st.sampled_from(["cpu", "cuda"])), call_s=1e-7, bandwidth=1e9, flops={"fp32": 1e8}
    )
    return run, machine(toy, within=wire, slowdown=draw(st.sampled_from([1.0, 1.5])))


@PROFILE
@given(case=cases())
def test_what_must_hold_of_any_step(case):
    run, on = case
    prediction = wb.predict(run.plan, on, run)
    schedule = prediction.timeline
    assert prediction.step_time >= schedule.work.max() * (1 - 1e-12)
    assert 0 < prediction.efficiency <= 1 + 1e-12
    for rank in range(run.plan.world_size):
        spans = schedule.spans(rank)
        assert sum(schedule.breakdown(rank).values()) == pytest.approx(prediction.step_time)
        for lane in LANES:
            own = [span for span in spans if span.lane == lane]
            for before, after in pairwise(own):
                assert before.end_s <= after.start_s + 1e-12
        assert all(span.seconds >= 0 and span.what in KINDS for span in spans)


@PROFILE
@given(case=cases())
def test_members_of_a_collective_end_together(case):
    run, on = case
    for happened in simulated(run, on, program_of(run)).schedule.step.happened:
        call = getattr(happened.event, "call", None)
        if call is not None and call.takes is None:
            assert (happened.end == call.groups.latest(happened.end)).all()


@pytest.mark.slow
@PROFILE
@given(case=cases())
def test_only_links_make_a_step_longer_than_its_work(case):
    run, on = case
    free = wb.predict(run.plan, on.replace(within=FAST, slowdown=1), run)
    wired = wb.predict(run.plan, on, run)
    half = on.within.replace(bandwidth=2 * on.within.bandwidth)
    faster = wb.predict(run.plan, on.replace(within=half), run)
    assert free.step_time <= faster.step_time * (1 + 1e-12)
    assert faster.step_time <= wired.step_time * (1 + 1e-12)


def test_nothing_but_work_where_links_take_no_time():
    plan = Plan.hybrid(graphs.vgg(), 4, 2)
    prediction = predicted(plan, machine(within=FAST))
    assert prediction.step_time == pytest.approx(prediction.timeline.work.max())


def test_a_trace_has_every_span(tmp_path):
    prediction = predicted(Plan.hybrid(graphs.vgg(), 4, 2))
    prediction.save_trace(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    drawn = [event for event in events if event["ph"] == "X"]
    spans = [span for rank in range(4) for span in prediction.timeline.spans(rank)]
    assert len(drawn) == len(spans)
    for event, span in zip(drawn, spans, strict=True):
        assert (event["pid"], event["ts"] / 1e6) == (span.rank, pytest.approx(span.start_s))
        assert span.label in event["name"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == [f"rank {rank}" for rank in range(4)]
    prediction.save_trace(tmp_path / "one.json", ranks=[2])
    events = json.loads((tmp_path / "one.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {2}


def test_reads_well():
    prediction = predicted(Plan.hybrid(graphs.vgg(), 4, 2), wb.Machine.preset("h100-nvlink"))
    text, html = str(prediction), prediction._repr_html_()
    assert "ms per step ±" in repr(prediction)
    for word in ("backward", "wait", "All-reduces: gradients by", "Estimated, for the machine"):
        assert word in text
        assert word in html
    assert html.count("<svg") == html.count("</svg>") == 1
    assert "<script" not in html
    assert html.count("<table>") == html.count("</table>") == 3
    again = pickle.loads(pickle.dumps(prediction))
    assert again == prediction
    assert again.step_time == prediction.step_time


def test_names_are_escaped():
    graph = graphs.Builder((4,)).linear("<b>", 4).graph()
    assert "<b>:" not in predicted(Plan.data_parallel(graph, 2))._repr_html_()
    assert "&lt;b&gt;" in predicted(Plan.data_parallel(graph, 2))._repr_html_()


def test_time_needs_a_machine():
    plan = Plan.data_parallel(ONE, 2)
    prediction = wb.predict(plan, None, experiment(plan))
    with pytest.raises(MachineError, match=r"time needs a machine: predict\(plan, machine"):
        _ = prediction.step_time
    with pytest.raises(MachineError, match="another link or device needs"):
        prediction.at(link="h100-nvlink")
    assert prediction.at(world_size=4).memory.peak_bytes > 0


def test_machines_of_other_worlds():
    two = machine(device(), device(flops={"fp32": 2e9}))
    plan = Plan.data_parallel(ONE, 4)
    with pytest.raises(MachineError, match="2 devices, one for each of 2 ranks, and the plan is f"):
        predicted(plan, two)
    fits = predicted(Plan.data_parallel(ONE, 2), two)
    assert fits.breakdown[0]["forward"] == pytest.approx(2 * fits.breakdown[1]["forward"])
    with pytest.raises(MachineError, match="2 devices"):
        fits.at(world_size=4)
    with pytest.raises(MachineError, match="predict needs a Machine or None, got 'h100'"):
        wb.predict(plan, "h100", experiment(plan))
    assert fits.at(world_size=4, device="h100-nvlink").step_time > 0


def test_batches_and_worlds_that_cannot_be():
    prediction = predicted(Plan.hybrid(ONE, 4, 2))
    with pytest.raises(PlanError, match="'fc': group_size 2 does not divide world_size 3"):
        prediction.at(world_size=3)
    for wrong in (0, -1, 2.0, True):
        with pytest.raises(ExperimentError, match="world_size must be a positive integer"):
            prediction.at(world_size=wrong)
    with pytest.raises(ExperimentError, match="at most 65,536 ranks"):
        prediction.at(world_size=65_538)
    with pytest.raises(ExperimentError, match="batch_size"):
        prediction.at(batch_size=0)
    with pytest.raises(MachineError, match="no machine 'h100-nvlnk'"):
        prediction.at(link="h100-nvlnk")
    with pytest.raises(MachineError, match="device must be a Device"):
        prediction.at(device=3)
    with pytest.raises(IndexError, match="no rank 4: there are 0 to 3"):
        prediction.timeline.spans(4)


def test_parts_are_all_there():
    assert set(PARTS) - {"communication"} <= set(KINDS)
