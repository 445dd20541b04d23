"""Engines are used by one at a time."""

import pytest

from workbench.cluster.errors import ClusterError
from workbench.cluster.leases import Leases


def test_engines_are_taken_in_order_and_given_back():
    leases = Leases(4)
    one = leases.take(2, "a run")
    two = leases.take(1, "another")
    assert (one.places, two.places) == ((0, 1), (2,))
    assert leases.busy == {0: "a run", 1: "a run", 2: "another"}
    leases.give_back(one)
    assert leases.take(3, "a third").places == (0, 1, 3)


def test_too_few_free_engines_says_who_has_them():
    leases = Leases(3)
    leases.take(2, "the run of vgg11")
    with pytest.raises(ClusterError, match=r"2 engines are needed and 1 of 3 .* run of vgg11"):
        leases.take(2, "another")
