"""The models for the values of `Experiment.sync`, and where each is the fastest."""

import subprocess
import sys

import pytest

import workbench as wb
from workbench.plan.io.errors import ExperimentError, MachineError
from workbench.predict.closed_form import (
    ONCE,
    Coding,
    Compute,
    Network,
    TimingModel,
    fastest,
    where_fastest,
)

WHOLE = 2**40
MODEL = TimingModel(
    4,
    61.1e6 * 4,
    Compute(update_s=0.03, forward_s=0.08, backward_s=0.17),
    Network(10e9 / 8, latency_s=50e-6, reduction_s_per_byte=1e-10),
)
SYSTEMS = {
    "PS-Sync": wb.ParameterServer(bucket_bytes=WHOLE),
    "D-Sync": ONCE,
    "Pipe-SGD": wb.Pipelined(algorithm="ring"),
    "Pipe-SGD int8": wb.Pipelined(algorithm="ring", codec="int8"),
}


def test_the_paper_s_headline_is_against_a_parameter_server():
    """With an assumed 0.28 s of compute: some 5.4 times PS-Sync, some 2.1 times D-Sync."""
    seconds = {name: MODEL.step_s(sync) for name, sync in SYSTEMS.items()}
    assert seconds["Pipe-SGD int8"] == pytest.approx(0.28)
    assert seconds["PS-Sync"] / 0.28 == pytest.approx(5.45, abs=0.01)
    assert seconds["D-Sync"] / 0.28 == pytest.approx(2.11, abs=0.01)


def test_buckets_overlap_with_the_backward_pass():
    buckets = MODEL.step_s(wb.Synchronous(algorithm="ring", bucket_bytes=8 << 20))
    assert MODEL.compute.seconds < buckets < MODEL.step_s(ONCE)
    assert MODEL.communication_s(wb.Synchronous()) > MODEL.communication_s(ONCE)


@pytest.mark.parametrize("width", [2, 3, 4])
def test_no_width_is_faster_than_two(width):
    assert MODEL.step_s(wb.Pipelined(width=width)) == MODEL.step_s(wb.Pipelined())


def test_width_one_is_synchronous():
    value = wb.Pipelined(width=1, algorithm="ring", bucket_bytes=WHOLE)
    assert MODEL.step_s(value) == MODEL.step_s(ONCE)
    assert MODEL.total_s(value, 10) == pytest.approx(10 * MODEL.step_s(ONCE))


def test_a_run_warms_up_fills_and_drains():
    step, exchange = MODEL.step_s(SYSTEMS["Pipe-SGD"]), MODEL.communication_s()
    assert MODEL.total_s(SYSTEMS["Pipe-SGD"], 10) == pytest.approx(9 * step + 0.28 + exchange)
    warm = wb.Pipelined(algorithm="ring", warmup=4, bucket_bytes=WHOLE)
    total = 4 * MODEL.step_s(ONCE) + 5 * step + 0.28 + exchange
    assert MODEL.total_s(warm, 10) == pytest.approx(total)
    assert MODEL.total_s(warm, 3) == pytest.approx(3 * MODEL.step_s(ONCE))


def test_coding_is_part_of_the_exchange():
    coded = MODEL.at(coding={"int8": Coding(encode_s_per_byte=1e-9)})
    sync = SYSTEMS["Pipe-SGD int8"]
    assert coded.coding_s(sync) == pytest.approx(0.2444)
    assert coded.communication_s(sync) == pytest.approx(MODEL.communication_s(sync) + 0.2444)
    assert coded.coding_s(ONCE) == MODEL.coding_s(sync) == 0


def test_local_sgd_communicates_now_and_then():
    every = MODEL.communication_s(wb.LocalSGD(every=1))
    assert MODEL.communication_s(wb.LocalSGD(every=5)) == pytest.approx(every / 5)
    assert MODEL.step_s(wb.LocalSGD(every=5)) == pytest.approx(0.28 + every / 5)


def test_two_levels():
    model = MODEL.at(workers=8, ranks_per_host=4, within=Network(1e10))
    sync = wb.Synchronous(algorithm="hierarchical")
    flat = MODEL.at(workers=8).communication_s(wb.Synchronous(algorithm="ring"))
    assert model.communication_s(sync) < flat
    with pytest.raises(ExperimentError, match="'hierarchical' has a closed form"):
        MODEL.communication_s(sync)


@pytest.mark.parametrize("r", [0.25, 1, 4])
def test_the_bandwidth_for_a_ratio(r):
    assert MODEL.at(bandwidth=MODEL.bandwidth_for(r)).r() == pytest.approx(r)


def test_a_ratio_that_no_bandwidth_gives():
    with pytest.raises(MachineError, match="all but the transfer takes"):
        MODEL.bandwidth_for(0.01)


def test_where_each_is_the_fastest():
    ranges = where_fastest(MODEL, dict(reversed(SYSTEMS.items())), 1e6, 1e11)
    assert [one.name for one in ranges] == ["Pipe-SGD int8"]
    # Without a codec nothing is lost: it is preferred where it is as fast.
    ranges = where_fastest(MODEL, SYSTEMS, 1e6, 1e11)
    assert [one.name for one in ranges] == ["Pipe-SGD int8", "Pipe-SGD"]
    assert (ranges[0].low, ranges[1].high) == (1e6, 1e11)
    assert ranges[0].high == ranges[1].low == pytest.approx(MODEL.bandwidth_for(1))
    assert fastest(MODEL.at(bandwidth=1e11), SYSTEMS) == "Pipe-SGD"


def test_where_a_codec_stops_to_pay():
    """It costs more than what it saves on a fast network."""
    model = MODEL.at(coding={"int8": Coding(encode_s_per_byte=2e-9)})
    plain, coded = SYSTEMS["Pipe-SGD"], SYSTEMS["Pipe-SGD int8"]
    slow, fast = where_fastest(model, {"plain": plain, "coded": coded}, 1e7, 1e11)
    assert (slow.name, fast.name) == ("coded", "plain")
    there = model.at(bandwidth=slow.high)
    assert there.step_s(plain) == pytest.approx(there.step_s(coded))


@pytest.mark.parametrize(
    "fields",
    [{"workers": 0}, {"gradient_bytes": 0}, {"ranks_per_host": 2}, {"bandwidth": -1}],
)
def test_refused(fields):
    with pytest.raises(MachineError):
        MODEL.at(**fields)


@pytest.mark.slow
def test_needs_no_torch():
    code = "import sys, workbench as wb; wb.TimingModel; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
