"""Instructions as values: what holds of each unless it is said, and how often it is executed."""

import pytest

from workbench.program.buckets import Buckets
from workbench.program.instructions import (
    Adjust,
    Agree,
    Average,
    Backward,
    Clip,
    Convert,
    Correct,
    HandOut,
    Pass,
    Reduce,
    Update,
    Wait,
    ZeroGrad,
    turn_of,
)
from workbench.program.rows import Rows

NAMES, ROWS = ("a", "b"), Rows((2, 1))
ON = Pass(0, None, ROWS, (), ())
BUCKETS = Buckets(((),), ROWS.own)


@pytest.mark.parametrize(
    "one",
    [
        Reduce(None, (0,), "holders", "auto", None, (0,)),
        Wait((1,)),
        Adjust(NAMES),
        Clip(NAMES, 1.0, None, "holders"),
        Update(NAMES, "holders"),
        HandOut(BUCKETS, "owners", False),
        ZeroGrad(NAMES),
        Agree(),
    ],
    ids=lambda one: one.word,
)
def test_each_is_executed_in_every_step_unless_it_is_said(one):
    assert getattr(one, "every", 1) == 1
    assert turn_of(one) == 1


@pytest.mark.parametrize(
    "one",
    [
        Wait((1,), every=3),
        Update(NAMES, "holders", 3),
        Average(BUCKETS, 3),
        Correct(NAMES, 3),
    ],
    ids=lambda one: one.word,
)
def test_some_are_executed_every_few_steps(one):
    assert turn_of(one) == 3


def test_gradients_that_add_up_are_forgotten_in_other_steps_than_the_one_that_uses_them():
    assert turn_of(ZeroGrad(NAMES, 3)) == 1


def test_sums_are_of_this_step_unless_it_is_said():
    assert Wait((1,)).late == 0


def test_a_conversion_is_forward_of_one_gradient_that_nobody_has_begun():
    one = Convert(None, ON)
    assert (one.direction, one.prefetch, one.gradients) == ("forward", None, 1)


def test_gradients_of_a_layer_are_new_and_come_from_one_reader():
    one = Backward(None, ON, adds=False, gradients=1)
    assert (one.adds, one.gradients) == (False, 1)


def test_gradients_of_a_pass_come_from_the_loss():
    assert ON.from_loss
    assert [str(Pass(1, which, ROWS, (), ())) for which in (None, 0, 2)] == [
        "micro-batch 1",
        "micro-batch 1, round 0",
        "micro-batch 1, round 2",
    ]
