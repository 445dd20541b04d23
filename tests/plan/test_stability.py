"""The limits of stability: known ones, and what a simulated quadratic does."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.experiment.test_experiment import FIELDS
from workbench.plan.experiment.experiment import (
    SGD,
    AdamW,
    Experiment,
    LocalSGD,
    ParameterGroup,
    Pipelined,
    Synchronous,
)
from workbench.plan.experiment.stability import Curvature, advice, growth, largest_lr, limit

STEEP = Curvature(value=10.0, change=0.01, step=0, batches=2)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7])
def test_without_momentum(width):
    assert limit(width) == pytest.approx(2 * math.sin(math.pi / (4 * (width - 1) + 2)), rel=1e-9)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
def test_with_momentum(momentum):
    assert limit(1, momentum) == pytest.approx(2 * (1 + momentum), rel=1e-6)
    assert limit(2, momentum) == pytest.approx(1 - momentum, rel=1e-6)
    assert limit(1, momentum, nesterov=True) == pytest.approx(
        2 * (1 + momentum) / (1 + 2 * momentum), rel=1e-6
    )


def distance(x, width, momentum, nesterov, steps):
    """How far from the minimum of x w^2 / 2 the steps of torch.optim.SGD have come, from 1."""
    places, speed = [1.0] * width, 0.0
    for _ in range(steps):
        gradient = x * places[-width]
        speed = momentum * speed + gradient
        places.append(places[-1] - (gradient + momentum * speed if nesterov else speed))
        del places[0]
        if abs(places[-1]) > 1e4:
            break
    return max(map(abs, places))


@pytest.mark.parametrize("width", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(
    ("momentum", "nesterov"), [(0.0, False), (0.5, False), (0.9, False), (0.5, True), (0.9, True)]
)
def test_a_quadratic_converges_below_and_diverges_above(width, momentum, nesterov):
    most = limit(width, momentum, nesterov)
    assert distance(0.99 * most, width, momentum, nesterov, 20_000) < 1e-3
    assert distance(1.01 * most, width, momentum, nesterov, 20_000) > 1e3


@given(st.integers(1, 6), st.floats(0, 0.95), st.floats(0.01, 0.99), st.floats(1.01, 3))
def test_there_is_one_limit(width, momentum, below, above):
    most = limit(width, momentum)
    assert growth(below * most, width, momentum) < 1 < growth(above * most, width, momentum)


def test_what_is_refused():
    for wrong in (dict(width=0), dict(momentum=1.0)):
        with pytest.raises(ValueError, match="width must be 1 or more and momentum in"):
            limit(**wrong)


def test_advice():
    run = Experiment(**FIELDS).replace(optimizer=SGD(lr=0.02, momentum=0.9))
    late = run.replace(sync=Pipelined(width=2))
    assert largest_lr(run, STEEP) == pytest.approx(0.38)
    assert largest_lr(late, STEEP) == pytest.approx(0.01)
    said = advice(late, STEEP)
    assert "curvature 10 (±1%) after 0 steps" in said
    assert "stable only below lr 0.01 (synchronous ones below 0.38)" in said
    assert advice(late.replace(optimizer=SGD(lr=0.009, momentum=0.9)), STEEP) == ""
    assert advice(run, STEEP) == ""
    assert advice(late.replace(sync=Pipelined(width=2, warmup=10)), STEEP) == ""


def test_steps_that_are_late_by_none_are_not_advised_against():
    """A rate that is too large for synchronous steps too is another matter."""
    run = Experiment(**FIELDS).replace(optimizer=SGD(lr=1.0))
    assert largest_lr(run, STEEP) == pytest.approx(0.2)
    assert advice(run.replace(sync=Pipelined(width=1)), STEEP) == ""
    assert advice(run.replace(sync=Pipelined(width=2)), STEEP).startswith("likely to diverge")


def test_nothing_is_claimed_where_nothing_is_known():
    run = Experiment(**FIELDS).replace(sync=Pipelined())
    flat = Curvature(value=-1.0, change=0.0, step=0, batches=1)
    assert largest_lr(run, flat) is None
    assert largest_lr(run.replace(sync=LocalSGD()), STEEP) is None
    assert largest_lr(run.replace(optimizer=AdamW()), STEEP) is None
    assert advice(run.replace(optimizer=AdamW()), STEEP) == ""
    assert largest_lr(run, STEEP) is not None
    for more in (
        dict(groups=[ParameterGroup("*.bias", weight_decay=0.0)]),
        dict(dampening=0.5),
        dict(maximize=True),
    ):
        other = run.replace(sync=Synchronous(), optimizer=SGD(lr=0.1, momentum=0.5, **more))
        assert largest_lr(other, STEEP) is None
    decayed = run.replace(sync=Synchronous(), optimizer=SGD(lr=0.1, weight_decay=10.0))
    assert largest_lr(decayed, STEEP) == pytest.approx(0.1)
