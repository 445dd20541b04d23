"""Links of emulated hosts, as values."""

import pytest

from workbench.hosts.emulated.network import ShapedLink
from workbench.plan.io.units import bandwidth_of


@pytest.mark.parametrize(
    ("given", "bits"),
    [
        ("1gbit", 1e9),
        ("100mbit", 1e8),
        ("2.5 Gbit", 2.5e9),
        (" 64KBIT ", 64e3),
        ("1000bit", 1e3),
        ("1tbit", 1e12),
        (5e6, 40e6),
        (2_000_000, 16e6),
    ],
)
def test_bandwidths_are_bytes_per_second_or_written_as_tc_does(given, bits):
    assert bandwidth_of(given) == bits / 8
    assert ShapedLink.of(given, None, 0.05).bandwidth == bits / 8


@pytest.mark.parametrize("given", ["fast", "", "1", "1 gb", "1gbps", "-1gbit", "1e3gbit", "mbit"])
def test_another_unit_is_refused(given):
    with pytest.raises(ValueError, match=r"one of bit, kbit, mbit, gbit, tbit .*, got '"):
        bandwidth_of(given)


@pytest.mark.parametrize("given", ["0gbit", "999bit", 124, 0, -1e9, float("inf"), float("nan")])
def test_a_bandwidth_that_no_link_has(given):
    with pytest.raises(ValueError, match=r"at least 125 bytes/s \(1 kbit/s\)"):
        ShapedLink.of(given, None, 0.05)


@pytest.mark.parametrize(
    ("bandwidth", "burst_bytes"), [("1gbit", 125_000), ("10gbit", 1_250_000), ("1mbit", 16_384)]
)
def test_a_burst_is_a_millisecond_s_and_some_packets_at_least(bandwidth, burst_bytes):
    assert ShapedLink.of(bandwidth, None, 0.05).burst_bytes == burst_bytes


def test_a_bucket_that_is_smaller_than_a_packet_is_refused():
    assert ShapedLink.of("1gbit", 2048, 0.05).burst_bytes == 2048
    with pytest.raises(ValueError, match="at least 2048 bytes, got 1500"):
        ShapedLink.of("1gbit", 1500, 0.05)


@pytest.mark.parametrize("limit_s", [0, -0.1, float("inf"), float("nan")])
def test_a_queue_limit_is_a_positive_time(limit_s):
    with pytest.raises(ValueError, match="a positive number of seconds"):
        ShapedLink.of("1gbit", None, limit_s)


@pytest.mark.parametrize(("bits", "text"), [(1e9, "1gbit"), (2.5e6, "2.5mbit"), (1e3, "1kbit")])
def test_a_link_reads_as_it_is_written(bits, text):
    link = ShapedLink.of(bits / 8, None, 0.05)
    assert str(link) == text
    assert bandwidth_of(str(link)) == bits / 8
