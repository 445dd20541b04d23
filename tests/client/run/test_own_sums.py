"""An algorithm and a codec from a cell: trained, resumed, recorded as predicted, and checked."""

import pytest
import torch
from torch import nn

import workbench as wb
from workbench.client.checks.sums import checks_on
from workbench.comm.algorithms.algorithm import Algorithm
from workbench.comm.codecs.coders import Coder
from workbench.comm.messages.flat import MessageRound
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import SGD, Experiment, Pipelined, Synchronous, Synthetic
from workbench.plan.plans.plan import Plan
from workbench.predict.prediction import predict


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))


def of_a_cell():
    """Classes of nowhere: no rank could import them."""

    class ToFirst(Algorithm):
        def rounds(self, flat, members, me):
            room, first = torch.empty_like(flat), members[0]
            for sender in range(1, len(members)):
                if me == sender:
                    yield MessageRound(sends=((first, flat),))
                elif me == 0:
                    yield MessageRound((), ((members[sender], room),), len(flat))
                    flat += room
            if me:
                yield MessageRound(receives=((first, flat),))
            else:
                yield MessageRound(tuple((member, flat) for member in members[1:]))

    class Signs(Coder):
        error_feedback = True

        def encoded_bytes(self, length):
            return 4 + length

        def encode(self, x, wire):
            wire[:4].view(torch.float32).copy_(x.abs().mean())
            wire[4:].view(torch.int8).copy_(x.sign())

        def decode(self, wire, out):
            out.copy_(wire[4:].view(torch.int8) * wire[:4].view(torch.float32))

    return ToFirst(), Signs()


SYNCS = {
    "algorithm": lambda algorithm, codec: Synchronous(algorithm=algorithm, bucket_bytes=200),
    "codec": lambda algorithm, codec: Synchronous(codec=codec, bucket_bytes=200),
    "late": lambda algorithm, codec: Pipelined(width=2, codec=codec, algorithm="ring"),
}


def experiment(sync, **fields):
    graph = trace(net(), input_shape=(6,))
    given = dict(
        data=Synthetic(samples=24, classes=3), optimizer=SGD(0.1), steps=6, batch_size=8, sync=sync
    )
    return Experiment(plan=Plan.data_parallel(graph, 2), **given | fields)


@pytest.mark.slow
@pytest.mark.parametrize("which", SYNCS)
def test_it_trains_as_predicted_and_goes_on_where_it_was(cluster, which):
    run = experiment(SYNCS[which](*of_a_cell()))
    whole = cluster.train(run).wait()
    predicted = predict(run).traffic
    for rank, outcome in enumerate(whole.outcomes):
        (said,) = [row[4:] for row in predicted.rows(rank) if row[2] == "gradients"]
        (found,) = [row[4:7] for row in outcome.traffic if row[2] == "gradients"]
        assert found == tuple(run.steps * each for each in said)
    half = cluster.train(run.replace(steps=3)).wait()
    resumed = cluster.train(run, resume=half).wait()
    assert resumed.experiment == run
    mine, theirs = resumed.state_dict(), whole.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    again = wb.Run.load(whole.directory)
    assert again.experiment.to_toml() == whole.experiment.to_toml()


@pytest.mark.slow
def test_real_sums_are_those_of_the_prediction(cluster):
    algorithm, codec = of_a_cell()
    found = [
        *checks_on(cluster, algorithm=algorithm),
        *checks_on(cluster, codec=codec),
        *checks_on(cluster, codec=codec, algorithm="direct"),
    ]
    assert [check.ok for check in found] == [True] * 7, found
    assert found[0].what == "ToFirst: recorded traffic is the predicted one"
    assert found[3].what == "ring, Signs: recorded traffic is the predicted one"


def test_a_sum_that_ranks_do_otherwise_than_alone_is_found(cluster):
    """Dry, its ranks have no values; with values it sends more, and sums wrong."""

    class Heavy(type(of_a_cell()[0])):
        def rounds(self, flat, members, me):
            if flat.device.type != "meta" and len(flat) > 1:
                other, room = members[1 - me], torch.empty_like(flat)
                yield MessageRound(((other, flat),), ((other, room),))
                flat[0] += me
            yield from super().rounds(flat, members, me)

    recorded, bits, right = checks_on(cluster, algorithm=Heavy())
    assert not recorded.ok
    assert "1003 elements: rank 0 received 2 messages of" in recorded.said
    assert bits.ok
    assert not right.ok
