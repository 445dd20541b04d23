"""The closed forms against figures by hand, and against what the algorithms move."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.plan.collective.codec import Codec
from workbench.plan.io.errors import ExperimentError
from workbench.predict.closed_form import FLAT, Coding, Network, Terms, hierarchical, ring
from workbench.predict.traffic import collective_costs

PROFILE = settings(max_examples=60, derandomize=True, database=None)
TEN_GIGABIT = Network(10e9 / 8, latency_s=50e-6, reduction_s_per_byte=1e-10)
ALEXNET = 61.1e6 * 4  # bytes


@pytest.mark.parametrize(
    ("name", "nbytes", "milliseconds"),
    [
        ("parameter_server", ALEXNET, 1247),
        ("ring", ALEXNET, 312),
        ("ring", ALEXNET / 2, 156),  # as gradients of 16 bits
        ("ring", ALEXNET / 4, 78),
        ("recursive_doubling", ALEXNET, 440),
    ],
)
def test_alexnet_on_four_workers(name, nbytes, milliseconds):
    seconds = TEN_GIGABIT.seconds(FLAT[name](4, nbytes, None))
    assert 1e3 * seconds == pytest.approx(milliseconds, abs=0.6)


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        ("ring", None),
        ("direct", None),
        ("halving_doubling", None),
        ("ring", Codec(name="int8", chunk=16)),
        ("direct", Codec(name="fp16")),
    ],
)
@PROFILE
@given(ranks=st.integers(1, 16), segment=st.integers(1, 50))
def test_they_move_what_the_formulas_of_traffic_say(name, codec, ranks, segment):
    """Where the length divides, the busiest rank receives these bytes in these rounds."""
    length = ranks * 2 ** (ranks.bit_length() - 1) * segment
    coded = () if codec is None else (codec,)
    costs = collective_costs.FLAT[name](length, 4, ranks, *coded)
    terms = FLAT[name](ranks, 4 * length, codec)
    assert terms.received == pytest.approx(costs.bytes.max())
    assert terms.rounds == costs.rounds.max()


@PROFILE
@given(hosts=st.integers(1, 5), per_host=st.integers(1, 5), segment=st.integers(1, 20))
def test_two_levels_too(hosts, per_host, segment):
    length = hosts * per_host * segment
    costs = collective_costs.hierarchical(length, 4, (per_host,) * hosts)
    within, across = hierarchical(hosts * per_host, per_host, 4 * length)
    assert within.received == pytest.approx(costs.within.bytes.max())
    assert across.received == pytest.approx(costs.across.bytes[:per_host].sum())
    assert across.rounds == costs.across.rounds.max()


def test_hosts_are_full():
    with pytest.raises(ExperimentError, match="5 workers do not fill hosts of 2"):
        hierarchical(5, 2, 100)


def test_a_codec_shrinks_what_travels_and_nothing_else():
    plain, coded = ring(4, 4096, None), ring(4, 4096, Codec(name="int8", chunk=256))
    assert coded.received == pytest.approx(plain.received * (256 + 4) / (4 * 256))
    assert (coded.added, coded.rounds, coded.calls) == (plain.added, plain.rounds, plain.calls)
    # Every byte once; its own sum, and what six others sent.
    assert (coded.encoded, coded.decoded, coded.pieces) == (4096, 7 * 1024, 4 + 7)


def test_coding_costs_per_byte_and_per_piece():
    coding = Coding(encode_s_per_byte=2e-9, decode_s_per_byte=1e-9, piece_s=1e-3)
    terms = ring(2, 1e6, Codec(name="fp16"))
    assert coding.seconds(terms) == pytest.approx(2e-3 + 1.5e-3 + 5e-3)


def test_many_calls_pay_latency_and_synchronisation_as_often():
    """Layer-wise overlap: 2L(p-1) α + 2(p-1)/p nβ + (p-1)/p nγ + L S."""
    assert ring(4, 800).in_calls(10) == Terms(rounds=60, received=1200, added=600, calls=10)


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("codec", [None, Codec(name="int8")])
def test_one_worker_exchanges_nothing(name, codec):
    assert FLAT[name](1, 1000, codec) == Terms()


def test_a_server_s_link_carries_everybody_s_gradient():
    assert FLAT["parameter_server"](5, 100, None) == Terms(2, 800, 400, 1)
    coded = FLAT["parameter_server"](5, 4000, Codec(name="fp16"))
    assert coded == Terms(2, 16000, 16000, 1, encoded=8000, decoded=20000, pieces=7)


def test_recursive_doubling_moves_everything_every_time():
    assert FLAT["recursive_doubling"](8, 100, None) == Terms(3, 300, 300, 1)
    with pytest.raises(ExperimentError, match=r"needs 2, 4, 8, \.\.\. workers, got 6"):
        FLAT["recursive_doubling"](6, 100, None)
