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


@pytest.mark.parametrize(
    ("given", "limits", "left"),
    [
        ({"a": [300.0, -4.0]}, {}, {"a": [300.0, -4.0]}),
        ({"a": [3.0, -0.5], "b": [-2.0]}, dict(value=1.0), {"a": [1.0, -0.5], "b": [-1.0]}),
        # 3 and 4 have the norm 5, to which torch adds 1e-6; a smaller one stays.
        ({"a": [3.0], "b": [0.0, 4.0]}, dict(norm=1.0), {"a": [3 / 5.000001], "b": [0, 0.8]}),
        ({"a": [3.0], "b": [4.0]}, dict(norm=5.1), {"a": [3.0], "b": [4.0]}),
        # What several ranks hold counts once: of 6 ** 2 a quarter, with 4 ** 2 that is 5 ** 2.
        ({"a": [6.0], "b": [4.0]}, dict(norm=1.0, holders={"a": 4}), {"a": [1.2], "b": [0.8]}),
        # Elements are limited before the norm.
        ({"a": [30.0], "b": [-40.0]}, dict(norm=1, value=1), {"a": [2**-0.5], "b": [-(2**-0.5)]}),
        ({}, dict(norm=1.0), {}),
    ],
)
def test_what_is_left_of_gradients(given, limits, left):
    found = clipped(given, **limits)
    assert found.keys() == left.keys()
    for name, expected in left.items():
        assert found[name] == pytest.approx(expected, rel=1e-6)


def test_torchs_own_1e_6_is_added_to_the_norm():
    assert clipped({"a": [3.0, 4.0]}, norm=1.0)["a"][0] == pytest.approx(3 / 5.000001, rel=1e-12)


def test_more_elements_than_are_made_wide_at_once():
    gradient = {"a": torch.ones(2**18 + 7)}
    Clipping(1.0, None, Group("everyone", (0,), 0, Recorder())).clip(gradient, {"a": 1})
    assert gradient["a"].double().square().sum().item() == pytest.approx(1.0, rel=1e-5)
