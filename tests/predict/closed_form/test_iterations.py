"""What an iteration takes, against an event-by-event recurrence, and the paper's shapes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.plan.io.errors import MachineError
from workbench.predict.closed_form import (
    Compute,
    gain_bound,
    pipelined_s,
    pipelined_total_s,
    ratio_r,
    synchronous_s,
    unlimited_s,
)

PROFILE = settings(max_examples=80, derandomize=True, database=None)
SECONDS = st.floats(0.001, 10)
COMPUTE = Compute(update_s=1, forward_s=2, backward_s=5)


@pytest.mark.parametrize(
    ("r", "gain"), [(0.25, 1.25), (0.5, 1.5), (1, 2.0), (2, 1.5), (4, 1.25), (0, 1.0)]
)
def test_the_gain_bound(r, gain):
    assert gain_bound(r) == gain
    exchange = r * COMPUTE.seconds
    ratio = synchronous_s(COMPUTE, exchange) / pipelined_s(COMPUTE, exchange)
    assert (ratio, ratio_r(COMPUTE, exchange)) == (gain, r)


@PROFILE
@given(compute=SECONDS, exchange=SECONDS, iterations=st.integers(1, 12), width=st.integers(2, 4))
def test_a_pipeline_s_run_event_by_event(compute, exchange, iterations, width):
    """One compute unit, one network; an iteration needs the sum of `width` iterations before it."""
    computed, summed = [0.0], [0.0]
    for t in range(1, iterations + 1):
        needed = summed[t - width] if t >= width else 0.0
        computed.append(max(computed[-1], needed) + compute)
        summed.append(max(summed[-1], computed[-1]) + exchange)
    total = pipelined_total_s(Compute(0, 0, compute), exchange, iterations)
    assert total == pytest.approx(summed[-1])


@PROFILE
@given(backward=SECONDS, exchange=SECONDS, calls=st.integers(1, 20))
def test_overlapped_calls_event_by_event(backward, exchange, calls):
    """Equal parts of the gradient leave backward one after another, and queue for the network."""
    sent = 0.0
    for part in range(1, calls + 1):
        sent = max(sent, part * backward / calls) + exchange / calls
    compute = Compute(update_s=1, forward_s=2, backward_s=backward)
    assert synchronous_s(compute, exchange, calls) == pytest.approx(3 + sent)


def test_without_overlap_times_add_up():
    assert synchronous_s(COMPUTE, 4) == 12


def test_with_unlimited_resources_every_iteration_in_flight_helps():
    assert unlimited_s(COMPUTE, 4, width=3) == 4


@pytest.mark.parametrize("times", [(-1, 1, 1), (0, 0, 0)])
def test_times_are_positive(times):
    with pytest.raises(MachineError, match="times of an iteration are positive"):
        Compute(*times)
