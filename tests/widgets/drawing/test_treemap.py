"""Boxes: to scale, in their box, and not on each other."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.widgets.drawing.treemap import Box, squarified

SIZES = st.lists(st.integers(1, 10**9), min_size=1, max_size=40).map(
    lambda sizes: sorted(sizes, reverse=True)
)


@settings(max_examples=60, derandomize=True, database=None)
@given(sizes=SIZES, width=st.integers(10, 900), height=st.integers(10, 900))
def test_areas_are_to_scale_and_fill_the_box(sizes, width, height):
    boxes = squarified(sizes, Box(3, 5, width, height))
    for size, box in zip(sizes, boxes, strict=True):
        assert box.area == pytest.approx(size / sum(sizes) * width * height, rel=1e-6)
        assert box.x >= 3 - 1e-6
        assert box.y >= 5 - 1e-6
        assert box.x + box.width <= 3 + width + 1e-6
        assert box.y + box.height <= 5 + height + 1e-6
    for index, one in enumerate(boxes):
        for other in boxes[:index]:
            across = min(one.x + one.width, other.x + other.width) - max(one.x, other.x)
            down = min(one.y + one.height, other.y + other.height) - max(one.y, other.y)
            assert min(across, down) < 1e-6


def test_the_example_of_the_paper():
    """Its figure 4: seven sizes in 6 x 4."""
    boxes = squarified([6, 6, 4, 3, 2, 2, 1], Box(0, 0, 6, 4))
    assert boxes[0] == Box(0, 0, 3, 2)
    assert boxes[1] == Box(0, 2, 3, 2)
    assert (boxes[2].height, boxes[3].height) == (pytest.approx(7 / 3), pytest.approx(7 / 3))


def test_nothing_to_draw():
    assert squarified([], Box(0, 0, 5, 5)) == []
    assert squarified([3.0], Box(0, 0, 0, 5))[0].area == 0
