"""Two lanes, what is under way beside another, and who waits for whom; computed by hand."""

import numpy as np
import pytest

from workbench.predict.time.events import (
    AwaitCollective,
    BlockingCollective,
    Call,
    Grouping,
    Script,
    StartedCollective,
)
from workbench.predict.time.streams import Overlap, Streams, advanced

TOGETHER = Grouping([0, 0])


def times(*values):
    return np.array(values, dtype=np.float64)


def call(seconds, groups=TOGETHER, **fields):
    each = np.broadcast_to(np.asarray(seconds, dtype=float), (2,))
    return Call("all_reduce", "w", "step", groups, each, np.zeros(2, dtype=np.int64), **fields)


def test_a_group_waits_for_its_last_member():
    lanes, script = Streams(2, 1.0), Script()
    script.work("forward", "a", times(1, 3))
    script.meet(call(2))
    script.work("forward", "b", times(1, 1))
    step = lanes.step(script.events())
    first, met, last = step.happened
    assert first.end.tolist() == [1, 3]
    assert met.begin.tolist() == [3, 3]
    assert met.end.tolist() == [5, 5]
    assert step.ended.tolist() == [6, 6]
    assert last.arrive.tolist() == [5, 5]


def test_apart_nobody_waits():
    lanes, script = Streams(2, 1.0), Script()
    script.work("forward", "a", times(1, 3))
    script.meet(call(2, groups=Grouping([0, 1])))
    assert lanes.step(script.events()).ended.tolist() == [3, 5]


def test_what_is_started_goes_on_beside():
    lanes, script = Streams(2, 1.0), Script()
    script.start(call(4), 1)
    script.work("backward", "a", times(1, 6))
    script.join(1, "gradients")
    assert lanes.step(script.events()).ended.tolist() == [4, 6]


def test_sums_come_one_after_another():
    lanes, script = Streams(2, 1.0), Script()
    script.start(call(4), 1)
    script.start(call(1), 2)
    script.join(1, "gradients")
    script.join(2, "gradients")
    assert lanes.step(script.events()).ended.tolist() == [5, 5]


@pytest.mark.parametrize(
    ("busy", "slowdown", "end"),
    [
        (0, 1, 6),  # nothing is felt
        (1, 1, 10),  # the sum's four seconds, and then six of work
        (0.5, 1, 8),  # two seconds of work in the first four
        (0, 2, 8),
        (0.5, 2, 9),  # one
    ],
)
def test_what_goes_on_beside_is_felt(busy, slowdown, end):
    lanes, script = Streams(2, slowdown), Script()
    script.start(call(4, busy=busy), 1)
    script.work("backward", "a", times(6, 6))
    assert lanes.step(script.events()).ended.tolist() == [end, end]


def test_work_passes_several_in_turn():
    beside = [Overlap(times(1, 0), times(2, 1), 0.0), Overlap(times(3, 5), times(5, 6), 0.5)]
    ended = advanced(times(0, 0), times(3, 4), beside)
    # One second, a pause, another one, and a third at half speed; a pause and four.
    assert ended.tolist() == [5, 5]
    cumulative = np.array([[1.0, 0.0], [3.0, 4.0]])
    assert advanced(times(0, 0), cumulative, beside).tolist() == [[1, 0], [5, 5]]


def test_whoever_takes_no_part_goes_on():
    lanes, script = Streams(2, 1.0), Script()
    takes = np.array([True, False])
    script.start(call((4, 0), takes=takes, busy=1), 1)
    script.meet(call((1, 0), takes=takes))
    script.work("backward", "a", times(1, 1))
    script.join(1, "gradients")
    assert lanes.step(script.events()).ended.tolist() == [6, 1]


def test_what_a_step_leaves_over_the_next_one_finds():
    """Where ranks never meet, they drift apart; sums of the step before are waited for."""
    lanes = Streams(2, 1.0)
    script = Script()
    script.join(1, "gradients", late=1)
    script.work("backward", "a", times(2, 2))
    script.start(call(5), 1)
    steady = lanes.steady(script.events())
    assert steady.seconds.tolist() == [7, 7]
    kinds = [type(happened.event) for happened in steady.happened]
    assert kinds[0] is AwaitCollective
    assert kinds[-1] is StartedCollective
    assert BlockingCollective not in kinds
