"""Machines as values: how long layers and collectives take on them, text, refusals."""

import pickle
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.plan.graphs import vgg
from tests.plan.machines import CURVED, LINK, device, machine, sample, work
from workbench.plan.io.errors import MachineError
from workbench.plan.machine.device import Curve, Device
from workbench.plan.machine.machine import Machine
from workbench.plan.machine.work import works_of
from workbench.plan.plans.plan import Plan

SECONDS = st.floats(1e-6, 1.0)
ROWS = st.lists(st.integers(1, 500), min_size=1, max_size=5, unique=True).map(sorted)


@st.composite
def measured(draw):
    """A device with one layer shape at several numbers of rows, and these."""
    rows = draw(ROWS)
    seconds = draw(st.lists(st.tuples(SECONDS, SECONDS), min_size=len(rows), max_size=len(rows)))
    samples = [sample(work(n), *pair) for n, pair in zip(rows, seconds, strict=True)]
    return device(*samples), rows


@settings(max_examples=50)
@given(measured(), st.lists(st.integers(0, 2000), min_size=2, max_size=6).map(sorted))
def test_seconds_of_a_layer_never_fall_with_rows(known, rows):
    found = [known[0].seconds(work(n)) for n in rows]
    for less, more in pairwise(found):
        assert more.forward_s >= less.forward_s * (1 - 1e-9)
        assert more.backward_s >= less.backward_s * (1 - 1e-9)
    assert all(one.forward_s > 0 and one.backward_s > 0 for one in found)


@pytest.mark.slow
@settings(max_examples=50)
@given(ROWS, st.lists(SECONDS, min_size=5, max_size=5).map(sorted))
def test_interpolation_passes_through_what_was_measured(rows, seconds):
    samples = [sample(work(n), t, 2 * t) for n, t in zip(rows, seconds, strict=False)]
    known = device(*samples)
    for one in samples:
        found = known.seconds(work(one.rows))
        assert (found.forward_s, found.backward_s) == (one.forward_s, one.backward_s)
        assert (found.source, found.error) == ("measured", one.error)


def test_between_and_beyond_measured_rows_time_lies_on_lines():
    known = device(sample(work(10), 0.010, 0.02), sample(work(20), 0.018, 0.04))
    between, beyond, below = (known.seconds(work(n)) for n in (15, 40, 5))
    assert between.forward_s == pytest.approx(0.014)
    assert beyond.forward_s == pytest.approx(0.034)
    assert below.forward_s == pytest.approx(0.006)
    assert {one.source for one in (between, beyond, below)} == {"interpolated"}
    assert 0.02 < between.error < below.error < known.seconds(work(80)).error


def test_one_sample_is_scaled_from_what_no_rows_cost():
    known = device(sample(work(10, weight_bytes=1e6), 1e-3, 2e-3), call_s=1e-5)
    least = 1e-5 + 1e6 / 1e10
    half = known.seconds(work(5, weight_bytes=1e6))
    assert half.forward_s == pytest.approx((least + 1e-3) / 2)
    assert known.seconds(work(0, weight_bytes=1e6)).forward_s == pytest.approx(least)


def test_other_shapes_are_estimated_from_their_kind():
    """Times that are a sum of a call, operations and bytes are found again, with a small error."""

    def shape(n: int):
        return work(8, key=f"linear Linear {n} > {n}", flops=2e6 * n * n, bytes=1e5 * n)

    def took(one) -> float:
        return 1e-5 + one.flops / 5e10 + one.bytes / 2e10

    samples = [sample(shape(n), took(shape(n)), 2 * took(shape(n))) for n in (1, 2, 4, 8, 16)]
    found = device(*samples).seconds(shape(5))
    assert found.source == "estimated"
    assert found.forward_s == pytest.approx(took(shape(5)), rel=0.02)
    assert found.backward_s == pytest.approx(2 * took(shape(5)), rel=0.02)
    assert 0.02 <= found.error < 0.1


def test_scattered_samples_say_so():
    samples = [
        sample(work(8, key=f"linear Linear {n} > 9", flops=1e6 * n), 1e-3 * n * factor, 1e-3)
        for n, factor in ((1, 1.0), (3, 4.0), (9, 0.3), (30, 2.0))
    ]
    assert device(*samples).seconds(work(8, key="linear Linear 5 > 9")).error > 0.5


def test_operations_of_a_kind_are_told_apart():
    slow = [sample(work(n, key=f"pool MaxPool2d {n}"), 1e-3 * n, 1e-3) for n in (1, 2, 3)]
    fast = [sample(work(n, key=f"pool AvgPool2d {n}"), 1e-5 * n, 1e-5) for n in (1, 2, 3)]
    known = device(*slow, *fast)
    forward = [
        known.seconds(work(2, key=f"pool {op} 9")).forward_s for op in ("MaxPool2d", "AvgPool2d")
    ]
    assert forward[0] > 50 * forward[1]


def test_without_any_sample_the_roofline_holds():
    one = work(8, flops=1e9, bytes=1e6)
    bare = device(sample(work(key="conv2d Conv2d 1 > 1"), 1.0, 1.0))
    found = bare.seconds(one)
    assert found.forward_s == pytest.approx(1e-6 + 1e9 / 1e11)
    assert found.backward_s == pytest.approx(2 * found.forward_s)
    assert bare.seconds(work(8, flops=0.0, weight_bytes=0.0, bytes=1e9)).backward_s < 0.11
    assert (found.source, found.error) == ("estimated", 1.0)


def test_samples_count_in_their_own_precision_only():
    known = device(sample(work(8), 1.0, 1.0), flops={"fp32": 1e11, "bf16": 4e11})
    assert known.seconds(work(8, precision="bf16")).source == "estimated"
    assert known.seconds(work(8, precision="bf16")).forward_s < 0.1


def test_lookups_are_kept():
    known, one = device(sample(work(8), 1.0, 1.0)), work(9)
    assert known.seconds(one) is known.seconds(work(9))
    assert pickle.loads(pickle.dumps(known)) == known


def test_a_collective_takes_what_was_measured_or_what_the_model_says():
    assert LINK.seconds("all_reduce", 4, 1e6, 6, 5e5) == pytest.approx(6e-4 + 1e-3 + 5e-5)
    assert CURVED.seconds("all_reduce", 4, 1e3, 6, 0) == 1e-4
    assert CURVED.seconds("all_reduce", 4, 1e6, 6, 0) == 1e-3
    half = CURVED.seconds("all_reduce", 4, (1e3 + 1e6) / 2, 6, 0)
    assert half == pytest.approx((1e-4 + 1e-3) / 2)
    assert CURVED.seconds("all_reduce", 4, 1e9, 6, 0) == pytest.approx(1e-3 + 9e-4 * 999 / 0.999)
    assert CURVED.seconds("all_reduce", 4, 0, 6, 0) > 0
    assert CURVED.seconds("all_gather", 4, 1e6, 3, 0) == LINK.seconds("all_gather", 4, 1e6, 3, 0)


def test_ranks_of_several_hosts_talk_across():
    wire = LINK.replace(name="wire")
    two = machine(across=wire, ranks_per_host=4)
    assert two.link([0, 1, 2, 3]).name == two.link([5, 7]).name == "link"
    assert two.link([3, 4]).name == two.link(range(8)).name == "wire"
    assert machine().link(range(64)).name == "link"


def test_one_device_is_that_of_all_ranks_and_several_are_each_rank_s_own():
    assert machine(device()).device(1000) == device()
    three = machine(*(device(name=str(rank)) for rank in range(3)))
    assert three.device(2).name == "2"
    with pytest.raises(MachineError, match="devices of ranks 0 to 2, none of rank 3"):
        three.device(3)


@settings(max_examples=25)
@given(measured(), st.booleans(), st.sampled_from(Machine.presets()))
def test_toml_gives_a_machine_back(known, curved, name):
    one = machine(known[0], device(), within=CURVED if curved else LINK, slowdown=1.25)
    for each in (one, Machine.preset(name)):
        assert Machine.from_toml(each.to_toml()) == each
        assert Machine.from_toml(each.to_toml()).fingerprint == each.fingerprint


def test_a_machine_is_saved_and_loaded(tmp_path):
    machine().save(tmp_path / "machine.toml")
    assert wb.Machine.load(tmp_path / "machine.toml") == machine()
    assert machine().replace(name="other").fingerprint != machine().fingerprint


@pytest.mark.parametrize("name", Machine.presets())
def test_presets_time_a_model_and_say_where_they_come_from(name):
    known = Machine.preset(name)
    plan = Plan.hybrid(vgg(), 4)
    assert "data sheet" in known.device(0).source
    assert known.within.source
    assert known.device(0).update_s_per_byte.keys() == {"sgd", "adam", "adamw"}
    for precision in ("fp32", "bf16", "fp16", "fp64"):
        for layer in plan.graph.layers:
            for one in works_of(plan, layer, [8] * 4, precision):
                found = known.device(0).seconds(one)
                assert 0 < found.forward_s <= found.backward_s < 1
                assert found.source == "estimated"
    assert name in repr(known)
    assert known.device(0).name in known._repr_html_()


def test_a_faster_device_is_faster():
    one = work(64, flops=1e12, bytes=1e9)
    h100, t4, cpu = (Machine.preset(n).device(0) for n in ("h100-nvlink", "t4-pcie", "cpu-10gbe"))
    assert h100.seconds(one).forward_s < t4.seconds(one).forward_s
    assert t4.seconds(one).forward_s > 5 * h100.seconds(one).forward_s
    assert h100.seconds(one).forward_s < cpu.seconds(one).forward_s


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Machine.preset("h100-nvlik"), "did you mean 'h100-nvlink'"),
        (lambda: Machine.from_toml("[machine"), "not TOML"),
        (lambda: Machine.from_toml("name = 1"), "no table 'name'"),
        (lambda: Machine.from_toml(""), r"no \[machine\] table"),
        (lambda: Machine.from_toml(machine().to_toml() + "[other]\n"), "no table 'other'"),
        (lambda: machine(ranks_per_host=4), "which need a link `across`"),
        (lambda: machine(slowdown=0.5), "slowdown: .*greater than or equal to 1"),
        (lambda: machine(speed=2), "speed: there is no such field"),
        (lambda: Machine(name="none", devices=(), within=LINK), "devices: .*at least 1 item"),
        (lambda: device(bandwidth=0), "bandwidth: .*greater than 0"),
        (lambda: device(flops={}), "flops: .*at least 1 item"),
        (lambda: device(flops={"fp32": 0}), "flops.fp32: .*greater than 0"),
        (lambda: LINK.replace(busy=1.5), "busy: .*less than or equal to 1"),
        (
            lambda: Curve(op="all_gather", ranks=2, points=((9, 1.0), (9, 2.0))),
            "ascending order of bytes",
        ),
        (lambda: sample(work(), -1.0, 1.0), "forward_s: .*greater than or equal to 0"),
    ],
)
def test_what_cannot_be_is_refused(make, says):
    with pytest.raises(MachineError, match=says):
        make()


def test_devices_are_values():
    assert device() == Device(**device().model_dump())
    assert len({machine(), machine()}) == 1
