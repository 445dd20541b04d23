"""Meetings wait for the last of ranks that are never equally fast."""

import numpy as np
import pytest

from tests.predict.time.test_streams import call, times
from workbench.predict.time.events import Grouping, Script
from workbench.predict.time.streams import StragglerModel, Streams, largest

APART, TOGETHER = Grouping([0, 1]), Grouping([0, 0])
LATE = 0.589  # of two normal values the larger, by Blom's formula


@pytest.mark.parametrize(("count", "expected"), [(2, 0.5642), (4, 1.0294), (64, 2.3438)])
def test_the_largest_of_several_normal_values(count, expected):
    assert float(largest(np.array(float(count)))) == pytest.approx(expected, rel=0.05)
    assert float(largest(np.array(1.0))) == 0.0


def ended(topologies, stragglers, groups=TOGETHER, work=(6.0, 6.0)):
    """When two ranks are done that meet so often, in equal distances, for nothing."""
    script = Script()
    for _ in range(topologies):
        script.work("forward", "a", times(*work) / topologies)
        script.meet(call(0, groups=groups))
    return Streams(2, 1.0, stragglers).step(script.events()).ended


def test_who_is_slow_for_a_step_is_waited_for_once():
    for topologies in (1, 2, 6):
        late = ended(topologies, StragglerModel(2, unevenness=0.1))
        assert late == pytest.approx(6 + LATE * 0.6, rel=1e-3)


def test_many_meetings_wait_for_many():
    for topologies in (1, 4):
        late = ended(topologies, StragglerModel(2, jitter_s=0.01))
        assert late == pytest.approx(6 + LATE * 0.1 * np.sqrt(6 * topologies), rel=1e-3)


def test_who_is_alone_or_expected_much_later_is_not_overtaken():
    assert ended(1, StragglerModel(2, 0.1), APART).tolist() == [6, 6]
    assert ended(1, StragglerModel(2, 0.1), work=(1.0, 6.0)).tolist() == [6, 6]


def test_a_sum_beside_the_work_ends_for_all_at_once():
    """It waits for the last rank, and then so does nobody else."""
    script, lanes = Script(), Streams(2, 1.0, StragglerModel(2, 0.1))
    script.work("backward", "a", times(6, 6))
    script.start(call(1), 1)
    script.join(1, "gradients")
    script.meet(call(0))
    assert lanes.step(script.events()).ended == pytest.approx(7 + LATE * 0.6, rel=1e-3)


def test_a_sum_that_was_over_early_leaves_the_waiting_to_the_next_meeting():
    script, lanes = Script(), Streams(2, 1.0, StragglerModel(2, 0.1))
    script.start(call(1), 1)
    script.work("backward", "a", times(6, 6))
    script.join(1, "gradients")
    script.meet(call(0))
    assert lanes.step(script.events()).ended == pytest.approx(6 + LATE * 0.6, rel=1e-3)


def test_few_ranks_stand_for_a_large_world():
    many = Grouping([0, 0], count=65_536)
    late = ended(1, StragglerModel(2, 0.1), many)
    assert late == pytest.approx(6 + 0.6 * 4.4, rel=0.05)
