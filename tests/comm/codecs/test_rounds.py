"""The coded algorithms by themselves: any number of ranks, any length, against what they say."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.comm.codecs.coded import NAMES, coding, laplace, round_trip
from tests.comm.lockstep import run
from workbench.comm.algorithms.flat import FLAT
from workbench.comm.algorithms.hierarchical import across
from workbench.comm.messages.flat import cut, even
from workbench.plan.collective.codec import Codec

PROFILE = settings(max_examples=40, derandomize=True, database=None)
ALGORITHMS = {name: FLAT[name].coded_rounds for name in ("ring", "direct")}
SMALL_CHUNKS = {"int8": {"chunk": 8}, "int4": {"chunk": 8}}
CODECS = st.sampled_from([Codec(name=name, **SMALL_CHUNKS.get(name, {})) for name in NAMES])
DTYPES = st.sampled_from([torch.float32, torch.float64])
LENGTHS = st.integers(0, 60)


def samples(length, ranks, dtype):
    generator = torch.Generator().manual_seed(100 * length + ranks)
    values = 10 * torch.randn(ranks, length, generator=generator, dtype=torch.float64)
    return list(values.to(dtype))


def summed(algorithm, inputs, codec, residuals=None):
    """What each rank ends with, and what it received."""
    flats, k = [x.clone() for x in inputs], len(inputs)
    losses = [None] * k if residuals is None else residuals
    ranks = [
        algorithm(flat, range(k), me, coding(codec, losses[me])) for me, flat in enumerate(flats)
    ]
    return flats, run(ranks)


def hop_by_hop(inputs, codec):
    """A ring's sums, segment by segment: from the rank after its owner round to the owner."""
    k, wholes = len(inputs), []
    cuts = [cut(x, even(len(x), k)) for x in inputs]
    for owner in range(k):
        total = cuts[(owner + 1) % k][owner]
        for hop in range(2, k + 1):
            total = cuts[(owner + hop) % k][owner] + round_trip(total, codec)
        wholes.append(round_trip(total, codec) if k > 1 else total)
    return torch.cat(wholes)


def at_once(inputs, codec):
    """Direct sums: every part but the owner's goes through the codec, and so does the sum."""
    k, wholes = len(inputs), []
    cuts = [cut(x, even(len(x), k)) for x in inputs]
    for owner in range(k):
        total = torch.zeros_like(cuts[0][owner])
        for rank in range(k):
            part = cuts[rank][owner]
            total += part if rank == owner else round_trip(part, codec)
        wholes.append(round_trip(total, codec) if k > 1 else total)
    return torch.cat(wholes)


@pytest.mark.parametrize(("name", "serial"), [("ring", hop_by_hop), ("direct", at_once)])
@PROFILE
@given(ranks=st.integers(1, 6), length=LENGTHS, dtype=DTYPES, codec=CODECS)
def test_sums_are_those_of_one_process_that_follows_the_codes(
    name, serial, ranks, length, dtype, codec
):
    inputs = samples(length, ranks, dtype)
    flats, _ = summed(ALGORITHMS[name], inputs, codec)
    expected = serial(inputs, codec)
    assert all(torch.equal(flat, expected) for flat in flats)


@pytest.mark.parametrize("name", ALGORITHMS)
@PROFILE
@given(ranks=st.integers(1, 6), length=LENGTHS, dtype=DTYPES, codec=CODECS)
def test_messages_have_the_lengths_that_the_codec_says(name, ranks, length, dtype, codec):
    _, found = summed(ALGORITHMS[name], samples(length, ranks, dtype), codec)
    sizes = [codec.encoded_bytes(n) for n in even(length, ranks)]
    for me, (messages, received, exchanges) in enumerate(found):
        back = [n for i, n in enumerate(sizes) if i != me]
        # A ring's rank hears of all segments but the one before it, of its own at last.
        there = [n for i, n in enumerate(sizes) if i != (me - 1) % ranks]
        there = there if name == "ring" else [sizes[me]] * (ranks - 1)
        assert received == sum(there) + sum(back)
        assert messages == sum(n > 0 for n in [*there, *back])
        assert exchanges == (0 if ranks == 1 else 2 if name == "direct" else 2 * (ranks - 1))


@pytest.mark.parametrize("name", ALGORITHMS)
@PROFILE
@given(ranks=st.integers(1, 6), length=LENGTHS, dtype=DTYPES, codec=CODECS)
def test_nothing_is_lost_with_error_feedback(name, ranks, length, dtype, codec):
    """What has arrived and what is still held back are together what was to be summed."""
    residuals = [torch.zeros(length, dtype=dtype) for _ in range(ranks)]
    arrived, exact = torch.zeros(length).double(), torch.zeros(length).double()
    for step in range(3):
        inputs = [(step + 1) * x for x in samples(length, ranks, dtype)]
        flats, _ = summed(ALGORITHMS[name], inputs, codec, residuals)
        arrived += flats[0]
        exact += torch.stack(inputs).double().sum(0)
    held = torch.stack(residuals).double().sum(0)
    torch.testing.assert_close(arrived + held, exact, rtol=0, atol=2e-4)


@PROFILE
@given(
    sizes=st.lists(st.integers(1, 3), min_size=2, max_size=4),
    length=LENGTHS,
    codec=CODECS,
    shuffled=st.randoms(use_true_random=False),
)
def test_hosts_code_what_goes_between_them(sizes, length, codec, shuffled):
    """What each host has summed within goes in; all that own an element have its bits."""
    order = list(range(sum(sizes)))
    shuffled.shuffle(order)
    hosts = tuple(tuple(order.pop() for _ in range(size)) for size in sizes)
    inputs = samples(length, len(sizes), torch.float32)  # one of each host
    wholes = [x.clone() for x in inputs]
    kept = [torch.zeros(length) for _ in inputs]
    ranks = {}
    for whole, residual, members in zip(wholes, kept, hosts, strict=True):
        segments = even(length, len(members))
        pieces = zip(members, cut(whole, segments), cut(residual, segments), strict=True)
        ranks |= {
            rank: across(part, length, hosts, rank, coding(codec, lost))
            for rank, part, lost in pieces
        }
    run([ranks[rank] for rank in sorted(ranks)])
    assert all(torch.equal(whole, wholes[0]) for whole in wholes)
    total = wholes[0].double() + torch.stack(kept).double().sum(0)
    exact = torch.stack(inputs).double().sum(0)
    torch.testing.assert_close(total, exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("codec", "name", "error", "bias"),
    [
        (Codec(name="bf16_truncated"), "ring", 0.0081, -0.0070),
        (Codec(name="bf16_truncated"), "direct", 0.0056, -0.0049),
        (Codec(name="bf16"), "ring", 0.0026, 0.0),
        (Codec(name="int8", chunk=2**16), "ring", 0.023, 0.0),
        (Codec(name="int8", chunk=2**16), "direct", 0.021, 0.0),
        (Codec(name="int8"), "ring", 0.0161, 0.0),
        (Codec(name="int8"), "direct", 0.0142, 0.0),
    ],
)
def test_errors_are_those_of_the_literature_notes(codec, name, error, bias):
    """Four ranks, 262,144 Laplace values: the relative L2 error of the sum, and its shrinking.

    A chunk of 2**16 is a whole segment, as in the paper.
    """
    inputs = laplace(4)
    flats, _ = summed(ALGORITHMS[name], inputs, codec)
    exact = torch.stack(inputs).double().sum(0)
    off = flats[0].double() - exact
    assert (off.norm() / exact.norm()).item() == pytest.approx(error, rel=0.05)
    assert ((off * exact.sign()).sum() / exact.abs().sum()).item() == pytest.approx(bias, abs=2e-4)
