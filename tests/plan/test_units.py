"""Numbers as people read them."""

import pytest

from workbench.plan.io.units import (
    brief_seconds,
    count,
    digits,
    duration,
    milliseconds,
    rate,
    shortened,
    size,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (size(812), "812 B"),
        (size(1536), "1.50 KiB"),
        (size(133 * 2**20), "133 MiB"),
        (size(1000 * 2**20), "0.977 GiB"),
        (size(float("nan")), "–"),
        (milliseconds(0.00825), "8.25 ms"),
        (milliseconds(1.2), "1.20 s"),
        (duration(7.4), "0:07"),
        (duration(11109), "3:05:09"),
        (digits(0), "0"),
        (digits(1234567), "1,234,567"),
        (digits(-0.051), "-0.0510"),
        (digits(3.2e-7), "3.20e-07"),
    ],
)
def test_numbers_as_people_read_them(text, value):
    assert text == value


def test_marks_of_axes():
    assert [rate(value) for value in (125.0, 1.25e8, 1.25e9, 3.6e11)] == [
        "1 kbit/s", "1 Gbit/s", "10 Gbit/s", "2.88 Tbit/s",
    ]  # fmt: skip
    assert [brief_seconds(s) for s in (0.0, 4e-9, 2e-5, 0.1, 3600.0)] == [
        "0", "4 ns", "20 us", "100 ms", "3,600 s",
    ]  # fmt: skip
    assert (count(4096), count(65536), count(12)) == ("4,096", "64k", "12")
    assert shortened("x" * 200, 20) == "x" * 10 + "…" + "x" * 9
