"""The loss scale of a rank that is alone, step by step."""

import pytest
import torch

from workbench.comm.groups.group import Group
from workbench.comm.messages.recorder import Recorder
from workbench.plan.experiment.checks import LEAST_SCALE
from workbench.plan.experiment.experiment import LossScale
from workbench.train.step.gradients import LossScaling

FOLLOWS = LossScale(init_scale=8.0, growth_factor=4.0, backoff_factor=0.5, growth_interval=2)


def scaling(value):
    return LossScaling(value, Group("everyone", (0,), 0, Recorder()), torch.device("cpu"))


def unscaled(scale, *values):
    gradients = [torch.tensor([each, 8.0]) for each in values]
    return scale.unscale(gradients), [each.tolist() for each in gradients]


def test_a_loss_is_multiplied_and_gradients_are_divided():
    scale = scaling(8.0)
    assert scale.scaled(torch.tensor(3.0)).item() == 24.0
    assert unscaled(scale, 16.0, 4.0) == (True, [[2.0, 1.0], [0.5, 1.0]])


def test_a_number_stays_whatever_overflows():
    scale = scaling(8.0)
    assert [unscaled(scale, each)[0] for each in (float("inf"), 1.0, float("nan"))] == [
        False,
        True,
        False,
    ]
    assert (scale.scale, scale.steps, scale.skipped) == (8.0, 3, 2)
    assert scale.note.startswith("2 of 3 steps updated nothing")
    assert scale.note.endswith("it stays 8")


def test_a_scale_follows_the_gradients():
    scale, found = scaling(FOLLOWS), []
    for value in (1.0, 1.0, 1.0, float("inf"), 1.0, 1.0):
        unscaled(scale, value)
        found.append(scale.scale)
    assert found == [8.0, 32.0, 32.0, 16.0, 16.0, 64.0]
    assert (scale.steps, scale.skipped) == (6, 1)
    assert scale.note.endswith("it is 64 now")


def test_its_state_is_scale_and_count():
    scale = scaling(FOLLOWS)
    for _ in range(3):
        unscaled(scale, 1.0)
    assert (scale.state().tolist(), scale.state().dtype) == ([32.0, 1.0], torch.float64)
    again = scaling(FOLLOWS)
    again.load(scale.state())
    unscaled(again, 1.0)
    assert again.scale == 128.0
    assert (again.steps, again.skipped) == (1, 0)


def test_a_number_is_the_experiment_s_whatever_was_saved():
    scale = scaling(8.0)
    scale.load(torch.tensor([32.0, 1.0]))
    assert scale.state().tolist() == [8.0, 0.0]


@pytest.mark.parametrize(
    ("value", "saved", "spent"),
    [
        (FOLLOWS, LEAST_SCALE * 1.01, False),
        (FOLLOWS, LEAST_SCALE * 0.99, True),
        (LEAST_SCALE / 2, 1.0, False),
    ],
)
def test_only_a_scale_that_follows_can_be_spent(value, saved, spent):
    scale = scaling(value)
    scale.load(torch.tensor([saved, 0.0], dtype=torch.float64))
    assert scale.is_spent is spent
