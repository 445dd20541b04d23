"""What an algorithm of one's own exchanges is found once for each object and each size."""

import pytest

from workbench.plan.collective.algorithm import DryRun, Longest, algorithm_of, dry_run
from workbench.plan.collective.codec import Codec
from workbench.plan.extension.extension import Extension
from workbench.plan.extension.user_object import Own, OwnObjectError


class Counted(Extension):
    """Says how often it was run, and with what."""

    kind, takes_codec = "algorithms", True

    def __init__(self):
        self.runs = []

    def dry(self, elements, itemsize, ranks, encoded_bytes=None):
        self.runs.append((elements, itemsize, ranks, encoded_bytes and encoded_bytes(elements)))
        nothing = (0,) * ranks
        return DryRun(*(nothing,) * 4, (nothing,) * ranks, *(nothing,) * 4, Longest(0, 0, 0))


def test_an_object_runs_once_for_each_size():
    counted = Counted()
    own = Own.of(counted)
    assert dry_run(own, 10, 4, 2) is dry_run(own, 10, 4, 2) is dry_run(Own.of(counted), 10, 4, 2)
    assert counted.runs == [(10, 4, 2, None)]
    dry_run(own, 10, 4, 3)
    dry_run(own, 10, 8, 2)
    dry_run(own, 11, 4, 2)
    assert counted.runs[1:] == [(10, 4, 3, None), (10, 8, 2, None), (11, 4, 2, None)]


def test_each_object_runs_for_itself():
    first, second = Counted(), Counted()
    for each in (first, second):
        dry_run(Own.of(each), 10, 4, 2)
    assert first.runs == second.runs == [(10, 4, 2, None)]


def test_values_travel_through_a_codec():
    counted = Counted()
    dry_run(Own.of(counted), 2048, 4, 2, Codec(name="int8"))
    assert counted.runs == [(2048, 4, 2, 2048 + 2 * 4)]  # with a scale for every 1024


def test_something_else_is_no_algorithm():
    assert isinstance(algorithm_of(Own.of(Counted())), Counted)
    with pytest.raises(OwnObjectError, match="is none of the algorithms"):
        algorithm_of(Own.of(3))
