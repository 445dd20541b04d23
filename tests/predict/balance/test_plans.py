"""Plans for unequal devices: shares as their speeds, gains as the ideal ones."""

import pytest

from tests.plan.graphs import Builder
from workbench.plan.errors import MachineError, PlanError
from workbench.plan.experiment import SGD, Experiment
from workbench.plan.machine import Device, Link, Machine
from workbench.plan.plan import Plan
from workbench.predict.balance import balanced

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


def experiment(world, batch_size=1200):
    builder = Builder((512,)).linear("a", 512).linear("b", 512).linear("c", 512).linear("d", 512)
    graph = builder.graph()
    return Experiment(
        plan=Plan.data_parallel(graph, world), batch_size=batch_size, optimizer=SGD(lr=0.1), steps=1
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


def test_what_cannot_be_is_refused():
    with pytest.raises(MachineError, match="2 devices, the plan 3 ranks"):
        balanced(experiment(3), machine((1, 2)))
    with pytest.raises(PlanError, match="no split 'columns'"):
        balanced(experiment(3), machine((1,)), split="columns")
    with pytest.raises(PlanError, match="do not fit"):
        balanced(experiment(3), machine((1,)), most=(1, 1, 1))
