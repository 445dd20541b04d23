"""Other worlds: ranks that stand for others, and curves over world sizes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.plan import graphs
from tests.predict.machines import device, link, machine
from workbench.plan.experiment.experiment import ParameterServer, Pipelined
from workbench.plan.io.errors import ExperimentError
from workbench.plan.plans.plan import Plan
from workbench.predict.memory import step
from workbench.predict.memory.memory import memory_of
from workbench.predict.time.simulation import simulated
from workbench.program.step import program_of

PROFILE = settings(max_examples=40, derandomize=True, database=None)
GRAPH = graphs.vgg()
STRATEGIES = [
    dict(sync=wb.Synchronous(bucket_bytes=2000)),
    dict(sync=wb.Synchronous(bucket_bytes=2000, codec="int8"), shard_optimizer=True),
    dict(sync=wb.Synchronous(bucket_bytes=2000, algorithm="direct"), shard_optimizer=True),
    dict(sync=wb.LocalSGD(every=2)),
    dict(sync=Pipelined(width=2)),
    dict(sync=ParameterServer(server=1)),
]


def experiment(plan, **fields):
    given = dict(data="digits", optimizer=wb.SGD(lr=0.1), steps=1, batch_size=64)
    return wb.Experiment(plan=plan, **given | fields)


@st.composite
def worlds(draw):
    """Groups of two sizes, unequal shares, hosts that groups fit on or not, unequal rows."""
    world = draw(st.sampled_from([2, 4, 6, 8, 12, 16]))
    sizes = [k for k in (1, 2, 3, 4) if world % k == 0]
    plan = Plan.data_parallel(GRAPH, world)
    for name in ("conv", "fc1", "fc2"):
        k = draw(st.sampled_from(sizes))
        if k > 1:
            shares = draw(st.sampled_from([None, tuple(range(1, k + 1))]))
            plan = plan.with_layer(name, scheme="shard_out", group_size=k, shares=shares)
    accumulate = draw(st.integers(1, 3))
    run = experiment(
        plan,
        batch_size=draw(st.integers(accumulate, 40)),
        accumulate=accumulate,
        **draw(st.sampled_from(STRATEGIES)),
    )
    per_host = draw(st.sampled_from([None, 2, 3, 4]))
    kind = draw(st.sampled_from(["cpu", "cuda"]))
    across = None if per_host is None else link(bandwidth=1e7, latency_s=1e-5, busy=0.5)
    return run, machine(device(kind=kind), across=across, ranks_per_host=per_host)


@pytest.mark.slow
@PROFILE
@given(case=worlds())
def test_those_who_stand_for_others_do_as_they_do(case):
    run, on = case
    few, all_ = simulated(run, on).schedule, simulated(run, on, program_of(run)).schedule
    assert len(few.alike.ranks) <= len(all_.alike.ranks) == run.plan.world_size
    assert few.seconds == all_.seconds
    for rank in range(run.plan.world_size):
        assert few.spans(rank) == all_.spans(rank)
        assert few.breakdown(rank) == all_.breakdown(rank)


def test_equal_ranks_have_equal_spans():
    plan = Plan.hybrid(GRAPH, 8, 2)
    schedule = wb.predict(plan, machine(), experiment(plan)).timeline

    def told(rank):
        return [(s.what, s.label, s.start_s, s.seconds) for s in schedule.spans(rank)]

    assert told(0) == told(2) == told(6)


def test_the_same_world_is_the_same():
    plan = Plan.hybrid(GRAPH, 4, 2)
    prediction = wb.predict(plan, machine(), experiment(plan))
    assert prediction.at(world_size=4) == prediction
    assert prediction.at(world_size=4).step_time == prediction.step_time
    assert prediction.at().experiment == prediction.experiment


@pytest.mark.parametrize("name", ["h100-infiniband", "cpu-10gbe"])
def test_very_many_ranks(name):
    plan = Plan.hybrid(GRAPH, 8, 4)
    on = wb.Machine.preset(name)
    there = wb.predict(plan, on, experiment(plan)).at(world_size=65_536, batch_size=2**20)
    assert there.step_time > 0
    assert there.timeline.spans(65_535)[-1].rank == 65_535
    assert len(there.breakdown) == 65_536
    assert there.simulation.algorithms["gradients"] != ("direct",)


def test_other_links_devices_and_batches():
    plan = Plan.data_parallel(GRAPH, 4)
    here = wb.predict(plan, machine(), experiment(plan))
    assert here.at(link=link(bandwidth=1e6)).step_time > here.step_time
    assert here.at(device=device(flops={"fp32": 1e8})).step_time > here.step_time
    assert here.at(batch_size=128).step_time > here.step_time
    assert here.at(device="h100-nvlink").machine.devices == wb.Machine.preset("h100-nvlink").devices
    hosts = machine(across=link(), ranks_per_host=2)
    there = wb.predict(plan, hosts, experiment(plan)).at(link="h100-infiniband")
    assert there.machine.across.name == wb.Machine.preset("h100-infiniband").across.name
    assert there.machine.within == hosts.within


def test_curves():
    plan = Plan.data_parallel(GRAPH, 2)
    here = wb.predict(plan, machine(within=link(bandwidth=1e6)), experiment(plan))
    strong, weak = here.strong_scaling([2, 4, 16, 64]), here.weak_scaling([2, 4, 16])
    assert [p.batch_size for p in strong.points] == [64] * 4
    assert [p.batch_size for p in weak.points] == [64, 128, 512]
    assert strong.points[0].step_time == here.step_time
    works = [point.work_s for point in strong.points]
    assert works == sorted(works, reverse=True)
    dominates = strong.communication_dominates_at
    assert dominates == here.communication_dominates_at or dominates in (2, 4, 16, 64)
    for curve in (strong, weak):
        assert "scaling over 2 to" in repr(curve)
        assert "speed-up" in str(curve)
        assert curve._repr_html_().count("<tr>") == len(curve.points) + 1
    for wrong in ([], [4, 2], [2, 2]):
        with pytest.raises(ExperimentError, match="world sizes must ascend"):
            here.weak_scaling(wrong)


def test_where_communication_dominates():
    """Of one linear layer: 1 Mflop a row each way against a fixed gradient."""
    one = graphs.Builder((1000,)).linear("fc", 500).graph()
    plan = Plan.data_parallel(one, 2)
    here = wb.predict(plan, machine(), experiment(plan, batch_size=64))
    # Work: 64 rows of 2 ms over n ranks; the sum takes 2 (n-1)/n of 2.002 ms.
    assert here.communication_dominates_at == 64
    fast = here.at(link=link(bandwidth=1e12))
    assert fast.communication_dominates_at is None or fast.communication_dominates_at > 64


def test_memory_of_many_is_that_of_those_who_stand_for_them(monkeypatch):
    """But for an element of each bucket's sum, which does not divide by so many."""
    plan = Plan.hybrid(GRAPH, 72, 4)
    run = experiment(plan, batch_size=100, accumulate=2)
    few = memory_of(program_of(run)).ranks
    assert [one.rank for one in few[70:]] == [70, 71]
    monkeypatch.setattr(step, "MANY_RANKS", 72)
    for one, other in zip(few, memory_of(program_of(run)).ranks, strict=True):
        assert one.rank == other.rank
        assert one.moment == other.moment
        assert 0 <= one.peak_bytes - other.peak_bytes <= 4 * 4


@pytest.mark.parametrize(
    "fields",
    [
        dict(shard_optimizer=True, optimizer=wb.Adam()),
        dict(
            sync=wb.Synchronous(algorithm="direct"),
            shard_optimizer=(2.0, 1.0, 0.0, 1.0) * 10 + (1.0,) * 32,
            optimizer=wb.Adam(),
        ),
        dict(sync=wb.ParameterServer(server=40)),
        dict(sync=wb.Synchronous(algorithm="ring")),
        dict(sync=wb.Synchronous(codec="int8")),
        dict(sync=wb.Pipelined(width=2)),
        dict(sync=wb.LocalSGD(every=3)),
    ],
)
def test_so_it_is_however_they_exchange(monkeypatch, fields):
    plan = Plan.hybrid(GRAPH, 72, 4)
    run = experiment(plan, batch_size=100, **fields)
    few = memory_of(program_of(run)).ranks
    monkeypatch.setattr(step, "MANY_RANKS", 71)
    for one, other in zip(few, memory_of(program_of(run)).ranks, strict=True):
        assert one.peak_bytes == pytest.approx(other.peak_bytes, abs=2000)
