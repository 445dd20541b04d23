"""The limits of stability: known ones, and what a simulated quadratic does."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.widgets.explorers.stability import growth, limit


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
