"""Tensors that some ranks keep longer than others."""

import numpy as np

from workbench.predict.memory.timeline import MemoryTimeline

SIZE, ON_FIRST = np.array([100, 100]), np.array([True, False])


def peaks(*, early):
    """The peaks of two ranks, if the first one keeps a tensor beyond its end."""
    timeline = MemoryTimeline(2)
    whole = timeline.make(SIZE, "activations", "x")
    if early:  # as a segment does that is recomputed
        timeline.drop(timeline.hold_on(whole, ON_FIRST))
    parts = [timeline.hold_on(whole, ON_FIRST) for _ in range(2)]
    timeline.drop(whole)
    timeline.drop(parts[0])
    timeline.drop(timeline.make(SIZE // 10, "activations", "y"))
    timeline.drop(parts[1])
    timeline.drop(timeline.make(SIZE + 5, "activations", "z"))
    return [peak.total for peak in timeline.peaks()]


def test_a_part_takes_the_tensor_s_place_on_its_ranks():
    assert peaks(early=False) == [110, 105]


def test_a_part_that_was_dropped_while_the_tensor_was_alive_is_made_anew():
    assert peaks(early=True) == [110, 105]
