"""Gradients on one rank are clipped as torch's own functions do it."""

import pytest
import torch

from workbench.comm.groups.group import Group
from workbench.comm.messages.recorder import Recorder
from workbench.train.step.gradients import Clipping


def clipped(gradients, *, norm=None, value=None, holders=None):
    """What is left of gradients that are given as lists."""
    there = {name: torch.tensor(each, dtype=torch.float64) for name, each in gradients.items()}
    held = dict.fromkeys(there, 1) | (holders or {})
    Clipping(norm, value, Group("everyone", (0,), 0, Recorder())).clip(there, held)
    return {name: each.tolist() for name, each in there.items()}


def test_without_limits_nothing_changes():
    assert clipped({"a": [300.0, -4.0]}) == {"a": [300.0, -4.0]}


def test_every_element_is_limited_on_both_sides():
    assert clipped({"a": [3.0, -0.5], "b": [-2.0]}, value=1.0) == {"a": [1.0, -0.5], "b": [-1.0]}


def test_the_norm_is_that_of_all_gradients():
    """3 and 4 have the norm 5."""
    found = clipped({"a": [3.0], "b": [0.0, 4.0]}, norm=1.0)
    assert found["a"] == pytest.approx([0.6], rel=1e-6)
    assert found["b"] == pytest.approx([0.0, 0.8], rel=1e-6)
    assert found["a"][0] < 0.6  # by torch's 1e-6
    assert found["a"][0] == pytest.approx(0.6 * 5 / (5 + 1e-6), rel=1e-12)


def test_a_smaller_norm_stays():
    assert clipped({"a": [3.0], "b": [4.0]}, norm=5.1) == {"a": [3.0], "b": [4.0]}


def test_what_several_ranks_hold_counts_once():
    """Of 6 ** 2, a quarter; with 4 ** 2 that makes 5 ** 2."""
    found = clipped({"a": [6.0], "b": [4.0]}, norm=1.0, holders={"a": 4})
    assert found["a"] == pytest.approx([1.2], rel=1e-6)
    assert found["b"] == pytest.approx([0.8], rel=1e-6)


def test_elements_are_limited_before_the_norm():
    found = clipped({"a": [30.0], "b": [-40.0]}, norm=1.0, value=1.0)
    assert found["a"] == pytest.approx([2**-0.5], rel=1e-6)
    assert found["b"] == pytest.approx([-(2**-0.5)], rel=1e-6)


def test_a_rank_without_gradients_takes_part():
    assert clipped({}, norm=1.0) == {}


def test_more_elements_than_are_made_wide_at_once():
    gradient = {"a": torch.ones(2**18 + 7)}
    Clipping(1.0, None, Group("everyone", (0,), 0, Recorder())).clip(gradient, {"a": 1})
    assert gradient["a"].double().square().sum().item() == pytest.approx(1.0, rel=1e-5)
