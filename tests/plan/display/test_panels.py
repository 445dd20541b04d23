import math
import re
from xml.etree import ElementTree

import pytest

from workbench.plan.display.panels import (
    Axis,
    Bar,
    Curve,
    bar_panel,
    document,
    line_panel,
    ticks,
)


@pytest.mark.parametrize(
    ("low", "high", "count", "expected"),
    [
        (0, 2.3, 4, [0, 0.5, 1, 1.5, 2]),
        (0, 100, 4, [0, 20, 40, 60, 80, 100]),
        (1, 80, 6, [10, 20, 30, 40, 50, 60, 70, 80]),
        (3, 3, 4, [3]),
    ],
)
def test_ticks_are_round(low, high, count, expected):
    assert ticks(low, high, count) == pytest.approx(expected)


def test_a_gap_interrupts_a_curve():
    ys = [1.0, 2.0, math.nan, 1.0, 2.0]
    panel = line_panel("t", [Curve("loss", range(5), ys, "#000")], Axis("loss"))
    (path,) = re.findall(r'd="(M[^"]*)" fill="none"', panel.body)
    assert path.count("M") == 2


def test_dots_are_joined_over_gaps():
    ys = [0.1, math.nan, 0.9]
    panel = line_panel("t", [Curve("a", range(3), ys, "#000", dots=True)], Axis("a", top=1.0))
    (path,) = re.findall(r'd="(M[^"]*)" fill="none"', panel.body)
    assert path.count("M") == 1
    assert panel.body.count("<circle") == 2


def test_bars_share_one_scale_and_the_rest_is_counted():
    bars = [Bar(f"rank {i}", (1.0, i), "") for i in range(12)]
    panel = bar_panel("t", bars, [("#111", "one", ""), ("#222", "two", "")], most=4, width=300)
    widths = [float(w) for w in re.findall(r'width="([\d.]+)" height="15" fill="#222"', panel.body)]
    assert widths == pytest.approx([0, 100 / 12, 200 / 12, 300 / 12], abs=0.06)
    assert "and 8 more ranks" in panel.body


def test_text_cannot_break_out():
    panel = line_panel("<script>", [], Axis("a & b"))
    ElementTree.fromstring(document([panel]))
