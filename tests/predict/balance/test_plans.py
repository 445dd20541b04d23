"""Plans for unequal devices: shares as their speeds, gains as the ideal ones."""

from collections import OrderedDict

import pytest
from torch import nn

from tests.plan.graphs import Builder
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import SGD, Experiment
from workbench.plan.io.errors import MachineError, PlanError
from workbench.plan.machine.device import Sample
from workbench.plan.machine.machine import Device, Link, Machine
from workbench.plan.machine.work import work_of
from workbench.plan.plans.plan import Plan
from workbench.predict.balance import balanced
from workbench.predict.prediction import predict

IDEAL = {  # sec. 1.4: over the even split, and over the fastest alone
    (2, 1, 1): (1.33, 2.00),
    (4, 2, 1): (2.33, 1.75),
    (70, 25, 5): (6.67, 1.43),
}


def machine(speeds):
    """Devices that differ in speed alone, without overheads."""
    devices = tuple(
        Device(
            name=f"device {rank}",
            kind="cpu",
            memory_bytes=2**30,
            bandwidth=1e15,
            flops={"fp32": speed * 1e9},
        )
        for rank, speed in enumerate(speeds)
    )
    return Machine(
        name="unequal", devices=devices, within=Link(name="memory", latency_s=0, bandwidth=1e12)
    )


def by_shape(*devices):
    """Devices by (operations per second, bytes of memory per second)."""
    return Machine(
        name="unequal by shape",
        devices=tuple(
            Device(
                name=f"device {rank}",
                kind="cpu",
                memory_bytes=2**30,
                bandwidth=bandwidth,
                flops={"fp32": flops},
            )
            for rank, (flops, bandwidth) in enumerate(devices)
        ),
        within=Link(name="memory", latency_s=0, bandwidth=1e12),
    )


def images(world, batch_size=64):
    """A net with few channels, then with many."""
    net = nn.Sequential(
        OrderedDict(
            small0=nn.Conv2d(3, 32, 3, padding=1),
            small1=nn.Conv2d(32, 32, 3, padding=1),
            large0=nn.Conv2d(32, 256, 3, padding=1),
            large1=nn.Conv2d(256, 256, 3, padding=1),
            last=nn.Conv2d(256, 8, 3, padding=1),
        )
    )
    return Experiment(
        plan=Plan.data_parallel(trace(net, input_shape=(3, 8, 8), num_classes=2), world),
        data="digits",
        batch_size=batch_size,
        optimizer=SGD(lr=0.1, momentum=0.9),
        steps=1,
    )


def experiment(world, batch_size=1200):
    builder = Builder((512,)).linear("a", 512).linear("b", 512).linear("c", 512).linear("d", 512)
    graph = builder.graph()
    return Experiment(
        plan=Plan.data_parallel(graph, world),
        data="digits",
        batch_size=batch_size,
        optimizer=SGD(lr=0.1),
        steps=1,
    )


@pytest.mark.parametrize("speeds", IDEAL)
@pytest.mark.parametrize("split", ["rows", "filters"])
def test_gains_are_the_ideal_ones(speeds, split):
    found = balanced(experiment(3), machine(speeds), split=split)
    over_equal, over_alone = IDEAL[speeds]
    off = 0.1 if split == "filters" else 0.01  # 64ths of the filters are coarse
    assert found.gain_over_equal == pytest.approx(over_equal, rel=off)
    assert found.gain_over_fastest_alone == pytest.approx(over_alone, rel=off)
    shares = [size / sum(found.partition.sizes) for size in found.partition.sizes]
    assert shares == pytest.approx([s / sum(speeds) for s in speeds], abs=0.02)
    assert found.plan.row_shares is not None
    if split == "filters":
        assert found.plan.layers["a"].scheme == "shard_out"


def test_equal_devices_get_equal_shares():
    found = balanced(experiment(4), machine((1,)))
    assert found.partition.sizes == (300,) * 4
    assert found.plan.row_shares is None
    assert found.gain_over_equal == pytest.approx(1.0)


def test_memory_bounds_and_links_count():
    most = balanced(experiment(3), machine((2, 1, 1)), most=(100, None, None))
    assert most.partition.sizes[0] == 100
    costly = balanced(experiment(3), machine((9, 1, 1)), overheads_s=(0.0, 1e6, 1e6))
    assert costly.partition.sizes == (1200, 0, 0)


def linked(speeds, bandwidth, memory=1e15):
    """Devices that differ in arithmetic and memory alike, and a link."""
    base = machine(speeds)
    devices = tuple(
        own.replace(bandwidth=memory * speed / max(speeds))
        for own, speed in zip(base.devices, speeds, strict=True)
    )
    return base.replace(
        devices=devices, within=Link(name="memory", latency_s=1e-4, bandwidth=bandwidth)
    )


@pytest.mark.parametrize("split", ["rows", "filters"])
def test_devices_that_cost_more_than_they_help_are_left_out(split):
    """What a plan over all ranks exchanges, and what a slow one does besides, is counted."""
    value = images(3, batch_size=32)
    every = balanced(value, linked((4, 4, 1), 1e12), split=split)
    assert every.plan.world_size == 3
    assert not any("left out" in note for note in every.notes)
    slow = linked((70, 25, 5), 1e12, memory=2e9)
    some = balanced(value, slow, split=split, per_layer=split == "filters", grain=1)
    assert some.plan.world_size == 2
    costly = linked((70, 25, 5), 1e6)
    alone = balanced(value, costly, split=split)
    assert alone.plan.world_size == 1
    assert "ranks 1 to 2 are left out" in alone.notes[0]
    assert alone.gain_over_fastest_alone == pytest.approx(1.0)
    assert alone.alone_s == pytest.approx(balanced(value, costly, least=1).alone_s)
    for found in (some, alone):
        n = found.plan.world_size
        own = slow.replace(devices=slow.devices[:n])
        assert predict(found.plan, own, value).step_time > 0
    assert balanced(value, costly, split=split, least=1).plan.world_size == 3
    assert balanced(value, linked((1, 1, 1), 1e6), split=split).plan.world_size == 3


def test_what_all_do_alike_is_part_of_a_device_s_time():
    """A slow device that pools and activates all rows gets fewer filters than its speed's share."""
    pair = [nn.Conv2d(64, 64, 3, padding=1) for _ in range(4)]
    net = nn.Sequential(nn.Conv2d(3, 64, 1), pair[0], nn.ReLU(), nn.AvgPool2d(2), *pair[1:])
    plan = Plan.data_parallel(trace(net, input_shape=(3, 16, 16), num_classes=2), 2)
    value = images(2).replace(plan=plan)
    free, bound = (
        balanced(value, linked((3, 1), 1e12, memory), split="filters", least=1)
        for memory in (1e15, 1e9)
    )
    assert bound.partition.sizes[1] < free.partition.sizes[1]
    assert bound.partition.imbalance < 0.1


def test_what_cannot_be_is_refused():
    with pytest.raises(MachineError, match="2 devices, the plan 3 ranks"):
        balanced(experiment(3), machine((1, 2)))
    with pytest.raises(PlanError, match="no split 'columns'"):
        balanced(experiment(3), machine((1,)), split="columns")
    with pytest.raises(PlanError, match="do not fit"):
        balanced(experiment(3), machine((1,)), most=(1, 1, 1))


def test_layers_have_shares_of_their_own():
    """The first device has the arithmetic, the second the memory: layers differ in what counts."""
    machine = by_shape((8e9, 8e7), (2e9, 1e12))
    one = balanced(images(2), machine, split="filters", grain=1)
    each = balanced(images(2), machine, split="filters", per_layer=True, grain=1)
    assert set(each.by_layer) == {"small0", "large0"}
    small, large = (each.plan.layers[name].shares for name in ("small0", "large0"))
    assert small[0] / sum(small) < large[0] / sum(large) - 0.1
    assert each.plan.layers["large1"].shares == large
    assert each.end_s < one.end_s
    assert each.equal_s == pytest.approx(one.equal_s, rel=0.2)  # ranks meet after each pair
    assert each.alone_s == one.alone_s


def test_a_fast_device_with_little_memory_computes_more_and_stores_less():
    net = nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(3, 64, 3, padding=1),
            flat=nn.Flatten(),
            fc=nn.Linear(64 * 8 * 8, 1024),
            relu=nn.ReLU(),
            out=nn.Linear(1024, 8),
        )
    )
    plan = Plan.hybrid(trace(net, input_shape=(3, 8, 8)), 2)
    assert plan.layers["fc"].group_size == 2
    value = Experiment(
        plan=plan, data="digits", batch_size=32, optimizer=SGD(lr=0.1, momentum=0.9), steps=1
    )
    free = balanced(value, machine((3, 1)), per_layer=True)
    needs = [rank.peak_bytes for rank in predict(free.plan, None, value).memory.ranks]
    limits = (int(needs[0] * 0.75), "2GiB")
    found = balanced(value, machine((3, 1)), per_layer=True, memory_limit=limits)
    rows, shares = found.plan.rows_of(32), found.plan.layers["fc"].shares
    assert rows == free.plan.rows_of(32)
    assert rows[0] > rows[1]
    assert shares[0] < free.plan.layers["fc"].shares[0]
    needs = [rank.peak_bytes for rank in predict(found.plan, None, value).memory.ranks]
    assert needs[0] <= limits[0]
    with pytest.raises(PlanError, match="memory allows 0"):
        balanced(value, machine((3, 1)), per_layer=True, memory_limit="1MiB")
    with pytest.raises(PlanError, match="1 entries for 2 ranks"):
        balanced(value, machine((3, 1)), memory_limit=("1GiB",))


def test_groups_of_several_sizes_get_shares_of_their_own():
    plan = images(4).plan.with_layer("small0", scheme="shard_out", group_size=2)
    plan = plan.with_layer("large0", scheme="shard_out", group_size=4)
    value = images(4).replace(plan=plan)
    found = balanced(value, machine((2, 1, 2, 1)), per_layer=True, grain=1)
    assert {name: len(part.sizes) for name, part in found.by_layer.items()} == {
        "small0": 2,
        "large0": 4,
    }
    assert found.plan.layers["small0"].group_size == 2
    first, second = found.plan.layers["small0"].shares
    assert first > second
    assert balanced(value, machine((2, 1, 2, 1))).end_s >= found.end_s
    with pytest.raises(PlanError, match="several"):
        balanced(value, machine((1,)), per_layer=True, memory_limit="1GiB")


def test_too_few_filters_for_every_rank_are_refused_or_left_out():
    few = images(40)
    with pytest.raises(PlanError, match=r"'small0' has 32 filters for 40 ranks.* at most 32 ranks"):
        balanced(few, machine((1,)), split="filters", least=1)
    found = balanced(few, machine((1,)), split="filters", per_layer=True)
    assert 0 in found.by_layer["small0"].sizes
    assert any("rank 39 has none of small0" in note for note in found.notes)
    costly = balanced(images(3), machine((9, 1, 1)), split="filters", overheads_s=(0.0, 1e6, 1e6))
    assert costly.notes == ("rank 1 is left out", "rank 2 is left out")


def unsteady(error):
    """A machine of which the second device's samples have such an error."""
    value = images(2)
    devices = []
    for rank, speed in enumerate((2e9, 1e9)):
        device = by_shape((speed, 1e15)).devices[0]
        samples = []
        for layer in value.plan.graph.layers:
            work = work_of(value.plan, layer, rank, (32, 32), "fp32")
            estimate = device.seconds(work)
            own = error if rank else 0.02
            samples.append(Sample.of(work, estimate.forward_s, estimate.backward_s, own))
        devices.append(device.replace(samples=tuple(samples)))
    return by_shape((1, 1), (1, 1)).replace(devices=tuple(devices))


@pytest.mark.slow
def test_a_device_that_does_not_converge_is_reported_and_its_last_good_model_kept():
    steady = balanced(images(2), unsteady(0.05))
    assert steady.notes == ()
    (note,) = balanced(images(2), unsteady(0.6)).notes
    assert "rank 1" in note
    assert "did not converge: +- 60%" in note
    assert "as they are" in note
    odd = unsteady(0.6)
    slower = odd.devices[1].replace(
        samples=tuple(
            s.model_copy(update={"forward_s": 9 * s.forward_s}) for s in odd.devices[1].samples
        )
    )
    odd = odd.replace(devices=(odd.devices[0], slower))
    kept = balanced(images(2), odd, last_good=unsteady(0.05))
    assert kept.partition == steady.partition
    assert "its last good times are used" in repr(kept)
    assert balanced(images(2), odd).partition != steady.partition
