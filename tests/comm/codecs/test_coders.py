"""Each codec by itself: what its bytes are, how far off they may be, what it refuses."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.comm.codecs.coded import NAMES, encoded, laplace, round_trip
from workbench.comm.messages.errors import CodecError
from workbench.plan.collective.codec import Codec

PROFILE = settings(max_examples=40, derandomize=True, database=None)
DTYPES = (torch.float32, torch.float64)
SIZES = st.tuples(st.integers(0, 70), st.sampled_from([2, 8, 64]), st.sampled_from(DTYPES))


def samples(length, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed + length)
    return (10 * torch.randn(length, generator=generator, dtype=torch.float64)).to(dtype)


def scaled(name, chunk):
    return Codec(name=name, chunk=chunk)


@pytest.mark.parametrize(
    ("name", "short", "eps"),
    [("fp16", torch.float16, 2**-11), ("bf16", torch.bfloat16, 2**-8)],
)
@PROFILE
@given(sizes=SIZES)
def test_casts_round_to_nearest_even(name, short, eps, sizes):
    length, _, dtype = sizes
    x = samples(length, dtype)
    found = round_trip(x, Codec(name=name))
    assert torch.equal(found, x.to(short).to(dtype))
    assert ((found - x).abs() <= eps * x.abs()).all()


@PROFILE
@given(sizes=SIZES)
def test_truncation_goes_toward_zero(sizes):
    length, _, dtype = sizes
    x = samples(length, dtype)
    found = round_trip(x, Codec(name="bf16_truncated"))
    assert (found.abs() <= x.float().abs()).all()
    assert ((x.abs() - found.abs()) < 2**-7 * x.abs()).all()


@pytest.mark.parametrize(("name", "most"), [("int8", 127), ("int4", 7)])
@PROFILE
@given(sizes=SIZES)
def test_multiples_of_a_scale_are_off_by_half_a_scale_at_most(name, most, sizes):
    length, chunk, dtype = sizes
    x = samples(length, dtype)
    found = round_trip(x, scaled(name, chunk))
    parts = zip(x.split(chunk), found.split(chunk), strict=True)
    for was, now in parts if length else ():
        scale = was.abs().max() / most
        assert ((now - was).abs() <= 0.5001 * scale).all()
        largest = was.abs().argmax()
        torch.testing.assert_close(now[largest], was[largest], rtol=1e-6, atol=0)


@PROFILE
@given(length=st.integers(0, 90), fraction=st.sampled_from([0.01, 0.1, 0.5, 1.0]))
def test_top_k_keeps_the_largest_as_they_are(length, fraction):
    x, codec = samples(length, torch.float32), Codec(name="top_k", fraction=fraction)
    found = round_trip(x, codec)
    kept = found != 0
    assert kept.sum() == codec.kept(length)
    assert torch.equal(found[kept], x[kept])
    if 0 < kept.sum() < length:
        assert x[kept].abs().min() >= x[~kept].abs().max()


def test_known_bytes():
    """What travels is defined, not only what arrives."""
    x = torch.tensor([1.0, -2.0, 0.5, 127.0, 0.0, 0.0, -3.5, 7.0, 1.0])
    eight = encoded(x, scaled("int8", 4))
    assert eight[:12].view(torch.float32).tolist() == pytest.approx([1.0, 7 / 127, 1 / 127])
    # Ties go to the even one: 0.5 to 0, and 63.5 to 64.
    assert eight[12:].view(torch.int8).tolist() == [1, -2, 0, 127, 0, 0, -64, 127, 127]
    four = encoded(torch.tensor([7.0, -7.0, 3.0, -1.0, 5.0]), scaled("int4", 8))
    assert four[:4].view(torch.float32).tolist() == [1.0]
    # The first three below; -1 and 5 above the first two.
    assert four[4:].tolist() == [0xF7, 0x59, 0x03]
    top = encoded(torch.tensor([0.0, -3.0, 1.0, 2.0]), Codec(name="top_k", fraction=0.5))
    assert top[:8].view(torch.float32).tolist() == [-3.0, 2.0]
    assert top[8:].view(torch.int32).tolist() == [1, 3]
    third = torch.tensor([1.0 + 2**-8 + 2**-20, -(1.0 + 2**-8 + 2**-20), 1.0 + 2**-8])
    nearest, chopped = Codec(name="bf16"), Codec(name="bf16_truncated")
    assert encoded(third, nearest).view(torch.int16).tolist() == [0x3F81, 0x3F81 - 2**15, 0x3F80]
    assert encoded(third, chopped).view(torch.int16).tolist() == [0x3F80, 0x3F80 - 2**15, 0x3F80]


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_chunks_of_zeros_and_of_next_to_nothing_become_zeros(name):
    x = torch.cat([torch.zeros(8), torch.full((8,), 1e-44), torch.ones(8)])
    found = round_trip(x, scaled(name, 8))
    assert found.tolist() == [0.0] * 16 + [1.0] * 8


@pytest.mark.parametrize(("name", "bias"), [("bf16", 0.0), ("bf16_truncated", -0.0028)])
def test_truncation_is_biased_and_rounding_is_not(name, bias):
    (x,) = laplace(1)
    found = round_trip(x, Codec(name=name))
    shrunk = ((found - x).double() * x.sign()).sum() / x.double().abs().sum()
    assert shrunk.item() == pytest.approx(bias, abs=3e-5)


def test_blocks_and_tiles_change_nothing():
    """A long tensor is coded in parts that stay in the cache; nobody can tell."""
    x = samples(200_003, torch.float32)
    for name in ("int8", "int4"):
        whole = round_trip(x, scaled(name, 1000))
        parts = [round_trip(part, scaled(name, 1000)) for part in x.split(1000)]
        assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 3, 99_999])
def test_what_is_no_number_is_said(name, bad, place):
    x = samples(100_000, torch.float32)
    x[place] = bad
    with pytest.raises(CodecError, match="1 of 100000 values to be encoded are NaN or infinite"):
        encoded(x, Codec(name=name))


@pytest.mark.parametrize(
    ("name", "dtype", "value", "said"),
    [
        ("fp16", torch.float32, 7e4, "holds magnitudes up to 65504, and got 70000; bf16 and int8"),
        ("bf16", torch.float32, 3.4e38, "holds magnitudes up to 3.3895e.38, and got 3.4e.38"),
        ("int8", torch.float64, -1e39, "holds magnitudes up to 3.4028e.38, and got 1e.39"),
        ("top_k", torch.float64, 1e39, "holds magnitudes up to 3.4028e.38, and got 1e.39"),
    ],
)
def test_what_is_too_large_is_said(name, dtype, value, said):
    x = samples(100, dtype)
    x[42] = value
    with pytest.raises(CodecError, match=said):
        encoded(x, Codec(name=name))


def test_the_largest_are_found_wherever_they_are():
    """Of many values a sample says where to begin; here it says too much, and too little."""
    codec = Codec(name="top_k", fraction=0.01)
    for start in (0, 1):  # where a sample looks, and where it does not
        x = torch.linspace(0.0, 1.0, 200_000)
        stride = len(x) // 2**14
        x[start::stride] += 5.0
        found = round_trip(x, codec)
        expected = x.topk(codec.kept(len(x))).indices
        assert torch.equal(found.nonzero().view(-1), expected.sort().values)
    x = torch.zeros(200_000)
    x[7] = -1.0
    assert round_trip(x, codec).nonzero().view(-1).tolist() == [7]


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_near_the_largest_of_fp32_nothing_becomes_infinite_in_silence(name):
    """A scale is rounded, and its largest multiple may then be too large."""
    codec, refused = scaled(name, 2), 0
    for steps in range(300):
        x = torch.tensor([torch.finfo(torch.float32).max, 1.0])
        x.view(torch.int32)[0] -= steps
        try:
            assert torch.isfinite(round_trip(x, codec)).all()
        except CodecError:
            refused += 1
    assert refused < 200
