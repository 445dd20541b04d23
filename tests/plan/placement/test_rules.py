"""Layouts before and after a layer that has no scheme of its own."""

import pytest

from tests.plan.graphs import Builder
from workbench.plan.placement.placement import ROWS, Layout, Partial, Replicate, Shard, volume
from workbench.plan.placement.rules import after, before

CUT = Layout(2, Shard(1, (3, 1)))


@pytest.fixture(scope="module")
def graph():
    """Four channels of 2 x 3 elements, flattened."""
    built = Builder((4, 2, 3)).same("relu", "elementwise").add("flat", "flatten", (24,))
    return built.linear("fc", 5).graph()


def test_flat_features_are_cut_between_channels(graph):
    flat = Layout(2, Shard(1, (18, 6)))
    assert after(graph["flat"], CUT) == flat
    assert before(graph["flat"], flat) == CUT
    assert before(graph["flat"], Layout(2, Shard(1, (17, 7)))) == ROWS  # within a channel


def test_layers_that_keep_a_layout_had_it_before(graph):
    assert before(graph["relu"], CUT) == CUT
    assert before(graph["relu"], Layout(2, Replicate())) == Layout(2, Replicate())
    assert before(graph["relu"], Layout(2, Partial())) == ROWS
    assert before(graph["fc"], CUT) == ROWS


def test_a_way_over_rows_costs_both_conversions():
    """From groups of two to groups of four: rows are scattered first, and gathered then."""
    two, four, shape = Layout(2, Partial()), Layout(4, Replicate()), (6,)
    parts = volume(two, ROWS, shape), volume(ROWS, four, shape)
    assert parts == (6.0, 18.0)
    assert volume(two, four, shape) == sum(parts)
