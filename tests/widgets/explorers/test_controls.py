"""Sliders and choices: their places, and the values that these mean."""

import pytest

from workbench.widgets.explorers.controls import Choice, Slider, decades, powers_of_two
from workbench.widgets.explorers.reading import brief_seconds, count, rate, shortened

SLIDER = Slider("bandwidth", "bandwidth", (1.0, 10.0, 100.0), str)


def test_a_slider_is_at_the_place_that_is_nearest_by_ratio():
    assert [SLIDER.spec(value)["at"] for value in (1.0, 4.0, 30.0, 40.0, 5000.0)] == [0, 1, 1, 2, 2]
    assert SLIDER.spec(4.0)["text"] == "4.0"  # of the value, not of the place
    assert Slider("width", "width", range(1, 9), str).spec(3)["at"] == 2
    assert SLIDER.value(2) == 100.0


@pytest.mark.parametrize("place", [-1, 3, 1.5, "1", True, None])
def test_no_other_places(place):
    with pytest.raises(ValueError, match="bandwidth has places 0 to 2"):
        SLIDER.value(place)


def test_choices_are_told_by_how_they_read():
    choice = Choice("codec", "codec", {"none": None, "coarse": "int8"})
    assert choice.spec(None)["at"] == "none"
    assert choice.spec("fp16")["options"] == ["none", "coarse", "fp16"]
    assert choice.value("coarse") == "int8"
    with pytest.raises(ValueError, match="codec is one of none, coarse; got 'int8'"):
        choice.value("int8")


def test_values_to_move_to():
    assert decades(1.0, 100.0, 2) == (1.0, 3.16, 10.0, 31.6, 100.0)
    assert powers_of_two(3, 30) == (3, 6, 12, 24)


def test_numbers_as_people_read_them():
    assert [rate(value) for value in (125.0, 1.25e8, 1.25e9, 3.6e11)] == [
        "1 kbit/s", "1 Gbit/s", "10 Gbit/s", "2.88 Tbit/s",
    ]  # fmt: skip
    assert [brief_seconds(s) for s in (0.0, 4e-9, 2e-5, 0.1, 3600.0)] == [
        "0", "4 ns", "20 us", "100 ms", "3,600 s",
    ]  # fmt: skip
    assert (count(4096), count(65536), count(12)) == ("4,096", "64k", "12")
    assert shortened("x" * 200, 20) == "x" * 10 + "…" + "x" * 9
