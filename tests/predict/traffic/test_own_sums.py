"""What own algorithms and codecs are predicted to exchange, against what ranks record."""

import numpy as np
import pytest

from tests.layers import nets
from tests.layers.drawn import GRAPHS
from tests.own_sums import Half, Sign, Star, Tree
from tests.plan.graphs import mlp
from tests.predict.traffic.test_traffic import check, experiment
from workbench.plan import SGD, Experiment, Machine
from workbench.plan.experiment.experiment import Pipelined, Synchronous
from workbench.plan.plans.plan import Plan
from workbench.predict.closed_form import Compute, Network, TimingModel
from workbench.predict.prediction import predict
from workbench.program.step import program_of


@pytest.mark.parametrize(
    "sync",
    [
        Synchronous(algorithm=Tree(), bucket_bytes=600),
        Synchronous(algorithm=Star(), codec="int8", bucket_bytes=600),
        Synchronous(algorithm="ring", codec=Half(), bucket_bytes=600),
        Synchronous(algorithm=Star(), codec=Sign(), bucket_bytes=600),
        Pipelined(width=2, algorithm=Tree()),
        Pipelined(width=2, codec=Sign()),
    ],
    ids=["tree", "star, int8", "ring, half", "star, sign", "late tree", "late sign"],
)
@pytest.mark.parametrize("hosts", ["aaa", "aab"])
def test_recorded_is_predicted(on_ranks, sync, hosts):
    plan = Plan.data_parallel(GRAPHS[nets.Images], 3)
    check(on_ranks, experiment(plan, sync=sync), nets.Images, hosts)


def test_between_groups(on_ranks):
    plan = Plan.hybrid(GRAPHS[nets.Images], 4, 2)
    sync = Synchronous(algorithm=Tree(), codec=None, bucket_bytes=600)
    check(on_ranks, experiment(plan, sync=sync), nets.Images)


def predicted(sync, world=4, machine="h100-nvlink"):
    plan = Plan.data_parallel(mlp(64, 64), world)
    run = Experiment(
        plan=plan, data="digits", optimizer=SGD(0.1), steps=1, batch_size=64, sync=sync
    )
    return predict(plan, Machine.preset(machine), run)


def sums(prediction, rank=0):
    """(seconds, bytes) of the sum of all gradients on a rank's timeline."""
    spans = prediction.timeline.spans(rank)
    (found,) = [s for s in spans if (s.op, s.label) == ("all_reduce", "gradients")]
    return found.seconds, found.bytes


def test_time_is_that_of_the_longest_chain():
    """As a tree of 4 ranks, twice two levels, has: 4 messages of everything, and 2 additions."""
    link = Machine.preset("h100-nvlink").within
    found, plain = predicted(Synchronous(algorithm=Tree())), predicted(Synchronous())
    numel = found.experiment.plan.graph.parameters
    expected = link.exchanges(4, 4 * 4 * numel, 4, 2 * 4 * numel)
    assert sums(found) == (pytest.approx(expected), 2 * 4 * numel)
    assert sums(found, 1) == (pytest.approx(expected), 4 * numel)
    assert sums(plain)[0] < expected
    assert "gradients by Tree" in str(found)
    assert "Star with Sign" in str(predicted(Synchronous(algorithm=Star(), codec=Sign())))


def test_a_ring_of_one_s_own_takes_as_long_as_the_built_in_one():
    """Both go round with segments that are alike, by the built-in code."""

    from workbench.comm.algorithms.flat import Ring

    for codec in (None, "int8"):
        own, built_in = (
            predicted(Synchronous(algorithm=which, codec=codec)) for which in (Ring(), "ring")
        )
        assert sums(own)[0] == pytest.approx(sums(built_in)[0], rel=1e-2)
        assert own.traffic.most_received_bytes == built_in.traffic.most_received_bytes
        assert np.array_equal(own.memory.peak_bytes, built_in.memory.peak_bytes)


def test_a_large_world_is_predicted_by_its_representatives():
    large = predicted(Synchronous(algorithm=Tree())).at(world_size=64)
    numel = large.experiment.plan.graph.parameters
    rows = {row[1:3]: row for row in large.traffic.rows(0)}
    assert rows["all_reduce", "gradients"][5:] == (6, 6 * 4 * numel)
    for rank, levels in ((0, 6), (1, 1), (32, 6), (48, 5), (63, 1)):
        assert sums(large, rank)[1] == levels * 4 * numel


def test_the_step_s_text_names_them():
    plan = Plan.data_parallel(mlp(8, 8), 2)
    sync = Synchronous(algorithm=Star(), codec=Sign())
    run = Experiment(plan=plan, data="digits", optimizer=SGD(0.1), steps=1, batch_size=4, sync=sync)
    assert "Star, Sign" in str(program_of(run))


@pytest.mark.parametrize(("which", "like"), [(Tree(), None), (Star(), None)])
def test_the_closed_form_is_of_the_same_chain(which, like):
    network = Network(1e9, 1e-5, 1e-10)
    model = TimingModel(4, 4e6, Compute(0.0, 0.01, 0.02), network)
    sync = Synchronous(algorithm=which, bucket_bytes=2**30)
    longest = which.dry(10**6, 4, 4).longest
    expected = longest.rounds * 1e-5 + longest.bytes / 1e9 + 4 * longest.additions * 1e-10
    assert model.communication_s(sync) == pytest.approx(expected)
