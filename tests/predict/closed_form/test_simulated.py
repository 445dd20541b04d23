"""The schedule simulator gives what the closed forms say, where their assumptions hold.

Replicated layers, equal ranks, one network; what it simulates besides is each step's status.
"""

import pytest

import workbench as wb
from tests.plan import graphs
from tests.predict.machines import device, link, machine
from workbench.predict.closed_form import ONCE, Compute, Network, TimingModel, direct

RANKS, ROWS = 4, 16
WIRE = link(latency_s=1e-4, bandwidth=1e9, reduction_s_per_byte=2e-10)
TOY = device(update_s_per_byte={"sgd": 1e-9}, load_s_per_byte=1e-10)
# Equal layers but the first, which is small, and needs no gradient of its input.
GRAPH = graphs.mlp(2, *[500] * 9)
LAYER_BYTES = 4 * 500 * 501


def predicted(ranks, sync, wire=WIRE):
    value = wb.Experiment(
        plan=wb.Plan.data_parallel(GRAPH, ranks),
        data="digits",
        optimizer=wb.SGD(lr=0.1),
        steps=1,
        batch_size=ranks * ROWS,
        sync=sync,
    )
    return wb.predict(value.plan, machine(TOY, within=wire), value)


def model(wire=WIRE):
    """Of one rank's own seconds, and the closed form of the exchange."""
    alone = predicted(1, ONCE).breakdown[0]
    before = alone["load"] + alone["forward"] + alone["loss"]
    compute = Compute(alone["update"], before, alone["backward"])
    return TimingModel(RANKS, 4 * GRAPH.parameters, compute, Network.of(wire))


def status_s(wire):
    """The loss, the request to stop and each rank's waiting, in double precision."""
    return Network.of(wire).seconds(direct(RANKS, 8 * (2 + RANKS)))


@pytest.mark.parametrize("algorithm", ["ring", "direct", "halving_doubling"])
@pytest.mark.parametrize("bandwidth", [1e8, 1e9, 1e10])
def test_one_call_after_backward(algorithm, bandwidth):
    wire = WIRE.model_copy(update={"bandwidth": bandwidth})
    sync = wb.Synchronous(algorithm=algorithm, bucket_bytes=ONCE.bucket_bytes)
    closed = model(wire).step_s(sync)
    assert predicted(RANKS, sync, wire).step_time == pytest.approx(closed + status_s(wire), 1e-4)


@pytest.mark.parametrize("bandwidth", [1e8, 1e9, 1e10])
def test_equal_calls_beside_backward(bandwidth):
    """Bound by the network, by compute, and in between."""
    wire = WIRE.model_copy(update={"bandwidth": bandwidth})
    sync = wb.Synchronous(algorithm="ring", bucket_bytes=LAYER_BYTES)
    closed = model(wire).step_s(sync)
    found = predicted(RANKS, sync, wire).step_time
    assert found == pytest.approx(closed + status_s(wire), rel=0.02)
    assert found < predicted(RANKS, ONCE, wire).step_time
