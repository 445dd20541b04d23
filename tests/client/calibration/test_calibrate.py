"""From what ranks measured to a machine; and on engines, from a graph to one, once."""

import dataclasses

import numpy as np
import pytest

from tests.client.interrupts import interrupt_inside
from tests.plan.graphs import vgg
from tests.train.small import net
from workbench.client.calibration import cache
from workbench.client.calibration.calibrate import (
    Calibration,
    CalibrationSpec,
    links_of,
    plans_of,
    rows_of,
    slowdown_of,
)
from workbench.client.calibration.devices import (
    behind,
    classes,
    devices_of,
    extended,
    missing,
    stretches_of,
    unequal,
)
from workbench.client.run.job import Job
from workbench.model.tracing.trace import trace
from workbench.plan.machine.device import INTO_NEW
from workbench.plan.machine.machine import Machine
from workbench.plan.plans.plan import Plan
from workbench.store.cluster_spec import EngineDevice as Place
from workbench.train.measure.device import DeviceMeasured
from workbench.train.measure.layers import LayersMeasured, works_on
from workbench.train.measure.links import LinksMeasured, OverlapCost, Timed, families

GRAPH = vgg()
SPEC = CalibrationSpec((4,), "fp32", None, None, 1.0)


def places(*hosts: str, threads: int = 1) -> list[Place]:
    return [Place("cpu", host, "cpu", (i,), threads, 2**33) for i, host in enumerate(hosts)]


def attained(*rates: float) -> list[DeviceMeasured]:
    return [
        DeviceMeasured(
            rate / 10,
            {"fp32": rate, "fp64": rate / 2},
            1e5 / rate,
            1e6 / rate,
            {"sgd": 10 / rate},
            {"int8": 100 / rate},
        )
        for rate in rates
    ]


def layers(plan: Plan, rank: int, rows: int, seconds: float) -> LayersMeasured:
    """As if every layer took the same."""
    count = len(works_on(plan, rank, rows, "fp32"))
    times = np.tile(np.float32([seconds, 2 * seconds, 0.01]), (count, 1))
    parts = np.full((5, 32), seconds, dtype=np.float32)
    return LayersMeasured(rows, times, 1e-3, 2e-3, 3e-3, 1000, 2000, 5, parts)


def linked(size: int, hosts: tuple[str, ...], alpha=(1e-5, 1e-3)) -> list[LinksMeasured]:
    """What ranks find where links follow the model: fast within a host, slow across."""
    found = []
    for rank in range(size):
        timed, overlap_costs = [], {}
        for ranks in (r for family in families(size) for r in family if rank in r):
            k, spans = len(ranks), len({hosts[r] for r in ranks}) > 1
            latency, rate = alpha[spans], (1e9, 1e7)[spans]
            overlap_costs[ranks] = OverlapCost(0.1 if spans else 0.9, 1.2 if spans else 1.0)
            for n in (1e4, 1e6):
                got, rounds = int(2 * n * (k - 1) / k), 2
                added = int(n * (k - 1) / k)
                seconds = rounds * latency + got / rate + added * 1e-10
                timed.append(Timed("all_reduce", ranks, seconds, got, rounds, added))
                timed.append(Timed(INTO_NEW, ranks, 9 * seconds, got, rounds, added))
                timed.append(Timed("all_gather", ranks, latency + added / rate, added, 1, 0))
        found.append(LinksMeasured(tuple(timed), overlap_costs))
    return found


def test_a_graph_stands_for_its_usual_plans():
    plans = plans_of([GRAPH], 4)
    assert plans == (
        Plan.data_parallel(GRAPH, 4),
        Plan.hybrid(GRAPH, 4, 4),
        Plan.hybrid(GRAPH, 4, 2),
    )
    assert plans_of([GRAPH, plans[1]], 4) == plans


def test_plans_are_measured_without_rounds_and_recomputation():
    plan = Plan.hybrid(GRAPH, 2)
    assert plans_of([plan.with_rounds("B").with_recompute("relu")], 4) == (plan,)


def test_rows_are_positive_numbers():
    assert rows_of(8) == (8,)
    assert rows_of([32, 8, 8]) == (8, 32)
    for wrong in (0, (), (4, -1), (2.5,), (True,)):
        with pytest.raises(ValueError, match="rows must be one or more positive integers"):
            rows_of(wrong)


def test_a_link_s_figures_are_found_again():
    within, across = links_of(linked(4, ("a",) * 4), ["a"] * 4)
    assert across is None
    assert within.latency_s == pytest.approx(1e-5, rel=1e-3)
    assert within.bandwidth == pytest.approx(1e9, rel=1e-3)
    assert within.reduction_s_per_byte == pytest.approx(1e-10, rel=1e-2)
    assert within.busy == pytest.approx(0.9)
    assert {(curve.op, curve.ranks) for curve in within.curves} == {
        (op, k) for op in ("all_reduce", INTO_NEW, "all_gather") for k in (2, 4)
    }
    assert within.seconds("all_reduce", 4, 1.5e6, 2, 0) == pytest.approx(2e-5 + 1.575e-3, rel=1e-3)


def test_unequal_pieces_of_one_size_are_one_point():
    ranks = (0, 1)
    found = [
        LinksMeasured(
            tuple(Timed("all_to_all", ranks, 1e-3 * n, got + rank, 1, 0) for n, got in sizes),
            {ranks: OverlapCost(0.5, 1.0)},
        )
        for rank, sizes in enumerate([((1, 100), (2, 200)), ((3, 100), (4, 200))])
    ]
    within, _ = links_of(found, ["a", "a"])
    assert np.allclose(within.curves[0].points, ((100.5, 2e-3), (200.5, 3e-3)))


def test_links_across_hosts_are_apart():
    hosts = ("a", "a", "b", "b")
    within, across = links_of(linked(4, hosts), hosts)
    assert across is not None
    assert within.bandwidth == pytest.approx(1e9, rel=1e-3)
    assert across.bandwidth == pytest.approx(1e7, rel=1e-3)
    assert {curve.ranks for curve in within.curves} == {2}
    assert {curve.ranks for curve in across.curves} == {2, 4}
    assert across.busy == pytest.approx(0.1)
    assert slowdown_of(linked(4, hosts)) == pytest.approx((1.0 + 1.2 + 1.2) / 3)
    assert slowdown_of([LinksMeasured((), {})]) == 1.0


def test_equal_devices_are_one_and_unequal_ones_are_each_rank_s_own():
    assert len(devices_of(attained(1e11, 1.03e11), places("a", "a"))) == 1
    assert len(devices_of(attained(1e11, 3e10), places("a", "a"))) == 2
    small, large = places("a", "a")
    uneven = [small, dataclasses.replace(large, memory_bytes=2**34)]
    assert len(devices_of(attained(1e11, 1e11), uneven)) == 2
    one = devices_of(attained(1e11, 1.04e11), places("a", "a"))[0]
    assert one.flops["fp32"] == pytest.approx(1.02e11)
    assert one.coding_s_per_byte == {"int8": pytest.approx(1e-9, rel=0.03)}
    assert one.memory_bytes == 2**32  # of what the host has, each rank has half
    assert devices_of(attained(1e11, 1e11), places("a", "b"))[0].memory_bytes == 2**33
    fast, also, slow, slower = devices_of(
        attained(1.01e11, 0.99e11, 5e10, 5.1e10), places("a", "a", "b", "b")
    )
    assert fast == also != slow == slower
    assert slow.flops["fp32"] == pytest.approx(5.05e10)


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.06])
def test_devices_are_told_apart_by_more_than_chance(noise):
    """A fifth shows in spite of noise, whatever the shape; what chance brings about does not."""
    random, columns = np.random.default_rng(0), 24
    shapes = 10 ** random.uniform(-5, -2, columns)

    def table(*speeds):
        chance = np.exp(noise * random.standard_normal((len(speeds), columns)))
        return shapes * chance / np.array(speeds)[:, None]

    for _ in range(20):
        assert classes([table(1, 1, 1, 1)] * 2) == (0, 0, 0, 0)
        assert classes([table(1.2, 1, 1.2, 1), table(1.2, 1, 1.2, 1)]) == (0, 1, 0, 1)
        assert classes([table(1, 4, 2), table(1, 4, 2)]) == (0, 1, 2)
        # A moment of other work shows in steps alone, an odd shape in shapes alone.
        assert classes([table(1, 1), table(2, 1)]) == (0, 0)
    assert classes([table(1, 2)[:, :2]]) == (0, 0)  # two things say nothing
    assert classes([table(1, 2), table(1, 2)[:, :2]]) == (0, 1)  # nor do they hide what others say
    wild = np.exp(random.standard_normal((2, columns)))
    assert classes([wild / np.array([[1], [1.2]])]) == (0, 0)
    assert classes([wild / np.array([[1], [4]])]) == (0, 1)  # not sure, but likely
    assert classes([table(1)]) == (0,)


@pytest.mark.parametrize("factor", [1, 2])
def test_what_was_measured_is_known_and_stays(factor):
    """Also where devices differ only by what their layers take."""
    devices = devices_of(attained(1e11, 1e11), places("a", "a"))
    plan = Plan.data_parallel(GRAPH, 2)
    experiment = SPEC.experiment(plan)
    assert missing(devices, experiment, (4, 8)) == [4, 8]
    found = [[layers(plan, rank, 4, 1e-3 * factor**rank)] for rank in (0, 1)]
    known = extended(devices, experiment, found)
    assert len(known) == factor
    assert missing(known, experiment, (4, 8)) == [8]
    assert known[0].step_s == pytest.approx(3e-3)
    assert known[0].load_s_per_byte == pytest.approx(1e-6)
    assert known[0].update_s_per_byte["sgd"] == pytest.approx(1e-6)
    for rank in (0, 1):
        for work in works_on(plan, rank, 4, "fp32"):
            estimate = known[rank % len(known)].seconds(work)
            assert estimate.forward_s == pytest.approx(1e-3 * factor**rank)
            assert estimate.source == "measured"
    again = extended(
        known, experiment, [[layers(plan, rank, n, 9.0) for n in (4, 8)] for rank in (0, 1)]
    )
    assert len(again) == factor  # told apart once, told apart for good
    old = {(s.key, s.rows): s for s in known[0].samples}
    assert all(s == old.get((s.key, s.rows), s) for s in again[0].samples)
    assert missing(again, experiment, (4, 8)) == []


def test_ranks_with_equal_devices_share_what_they_found():
    """Devices that their own figures told apart by chance are one, once layers say so."""
    plan, cut = Plan.data_parallel(GRAPH, 2), Plan.filters(GRAPH, 2, (3, 1))
    apart = devices_of(attained(1e11, 5e10), places("a", "a"))
    alike = [[layers(plan, rank, 4, 1e-3 * 1.02**rank)] for rank in (0, 1)]
    (one,) = extended(apart, SPEC.experiment(plan), alike)
    assert one.flops["fp32"] == pytest.approx(7.5e10)
    assert [s.forward_s for s in one.samples] == pytest.approx([1.01e-3] * len(one.samples))
    pieces = [[layers(cut, rank, 4, 1e-3)] for rank in (0, 1)]  # nothing that both have done
    more = extended((one,), SPEC.experiment(cut), pieces)
    assert len(more) == 1
    assert missing(more, SPEC.experiment(cut), (4,)) == []


def test_a_step_s_layers_take_what_its_other_parts_do_not():
    """Tracing takes as long for every layer; small ones keep half of their time at least."""
    plan = Plan.data_parallel(GRAPH, 2)
    experiment = SPEC.experiment(plan)
    seen = layers(plan, 0, 4, 1e-3)
    count = sum(map(len, works_on(plan, 0, 4, "fp32").values()))
    for besides, forward, step_s in (
        (-1.5e-3 * count, 0.5e-3, 0.0),
        (-30e-3 * count, 0.5e-3, 0.0),
        (2e-3, 1e-3, 2e-3),
    ):
        own = dataclasses.replace(seen, besides_s=besides)
        (device,) = extended(
            devices_of(attained(1e11, 1e11), places("a", "a")), experiment, [[own]]
        )
        assert [s.forward_s for s in device.samples] == pytest.approx(
            [forward] * len(device.samples)
        )
        assert device.step_s == step_s
    (later,) = extended((device,), experiment.replace(), [[dataclasses.replace(own, rows=8)]])
    assert all(s.forward_s == pytest.approx(1e-3) for s in later.samples if s.rows == 8)


def test_ranks_that_are_slow_by_turns_are_uneven():
    """Lags are found again; which rank is slow does not matter, and other plans do not count."""
    random = np.random.default_rng(0)
    lasting = 1 + 0.1 * random.standard_normal((4, 400, 1))
    anew = 0.02 * random.standard_normal((4, 400, 32))
    found = behind(0.05 * lasting + np.sqrt(0.05) * anew)
    machine = unequal(Machine.preset("cpu-10gbe"), found)
    assert machine.unevenness == pytest.approx(0.1, rel=0.15)
    assert machine.jitter_s == pytest.approx(0.02**2, rel=0.2)
    assert unequal(machine, []) == machine
    plan, cut = Plan.data_parallel(GRAPH, 2), Plan.filters(GRAPH, 2, (3, 1))
    seen = [[layers(plan, rank, 4, 1e-3 * (1 + rank))] for rank in (0, 1)]
    apart = stretches_of(SPEC.experiment(plan), seen, own_devices=False)
    assert unequal(machine, apart).unevenness > 0.3
    assert (
        max(one.squared for one in stretches_of(SPEC.experiment(plan), seen, own_devices=True))
        < 1e-12
    )
    assert stretches_of(SPEC.experiment(cut), seen, own_devices=False) == []


def test_a_damaged_file_is_measured_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = Machine.preset("cpu-10gbe")
    assert cache.kept("name") is None
    cache.keep("name", machine)
    assert cache.kept("name") == machine
    machines = cache.KeptMachines()
    assert machines.kept("name") == machine
    assert machines.kept("name") is machines.kept("name")
    assert machines.kept("another") is None
    cache.keep("name", other := Machine.preset("cpu-1gbe"))
    assert machines.kept("name") == other
    cache.place("name").write_text("devices = ")
    assert cache.kept("name") is None
    assert machines.kept("name") is None


def test_the_fingerprint_is_the_hardware_s():
    here = cache.fingerprint(places("a", "a"), None)
    assert here == cache.fingerprint(places("a", "a"), None)
    others = (
        cache.fingerprint(places("a"), None),
        cache.fingerprint(places("a", "a", threads=2), None),
        cache.fingerprint(places("a", "a"), "<Hosts(2, bandwidth='1gbit')>"),
    )
    assert len({here, *others}) == 4


def test_hosts_have_equally_many_ranks():
    with pytest.raises(ValueError, match="hosts have 1 and 2 ranks"):
        Calibration(None, places("a", "a", "b"), None, None)
    assert Calibration(None, places("a", "b"), None, None).ranks_per_host == 1


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.slow
def test_a_calibration_measures_each_shape_once(cluster, own_cache, capsys):
    module = net()
    graph = trace(module, input_shape=(3, 8, 8))
    bare = cluster.calibrate(within_s=1.0)
    assert bare.device(0).samples == ()
    machine = cluster.calibrate(graph, rows=4, within_s=1.0, module=module)
    assert machine.within == bare.within
    said = capsys.readouterr().out
    for told in ("calibrating 2 engines: devices (", " links (", " Sequential data parallel x 4"):
        assert told in said
    for plan in plans_of([graph], 2):
        for rank in (0, 1):
            for work in works_on(plan, rank, 4, "fp32"):
                found = machine.device(rank).seconds(work)
                assert found.source == "measured"
                assert found.forward_s > 0
    assert {(curve.op, curve.ranks) for curve in machine.within.curves} >= {("all_reduce", 2)}
    assert machine.across is None
    assert cluster.occupied == {}

    before = cluster.sent.messages
    assert cluster.calibrate(graph, rows=4, module=module) == machine
    assert cluster.sent.messages == before

    more = cluster.calibrate(graph, rows=(2, 4), within_s=1.0, module=module)
    assert "x 2 rows" in capsys.readouterr().out
    known = set(machine.device(0).samples)
    assert known < set(more.device(0).samples)
    assert {s.rows for s in set(more.device(0).samples) - known} >= {2}
    assert more.within == machine.within


@pytest.mark.slow
def test_an_interrupted_calibration_keeps_what_it_found(cluster, own_cache, monkeypatch):
    module = net()
    graph = trace(module, input_shape=(3, 8, 8))
    # Where it waits for engines no file is open, which nobody would close.
    interrupt_inside(Job.watch, Calibration._with)
    with pytest.raises(KeyboardInterrupt):
        cluster.calibrate(graph, rows=4, within_s=1.0, module=module)
    assert cluster.occupied == {}
    monkeypatch.setattr(Calibration, "_bare", None)  # devices and links are known
    machine = cluster.calibrate(Plan.data_parallel(graph, 2), rows=4, within_s=1.0, module=module)
    assert machine.device(0).samples


@pytest.mark.slow
def test_what_cannot_be_measured_is_refused(cluster):
    with pytest.raises(TypeError, match="calibrate takes graphs and plans, got str"):
        cluster.calibrate("vgg11")
    with pytest.raises(ValueError, match=r"plans for \[1, 2\] ranks"):
        cluster.calibrate(Plan.data_parallel(GRAPH, 1), Plan.data_parallel(GRAPH, 2))
    with pytest.raises(ValueError, match="within_s must be a positive number of seconds"):
        cluster.calibrate(GRAPH, within_s=0)
    with pytest.raises(ValueError, match="rows must be"):
        cluster.calibrate(GRAPH, rows=0)
