"""Each check of an algorithm or a codec fails for one that does just that wrong."""

from dataclasses import replace

import pytest
import torch

from tests.own_sums import Half, Sign, Star, Tree
from workbench.comm.algorithms.algorithm import Algorithm
from workbench.comm.algorithms.flat import FLAT
from workbench.comm.checks import algorithm_checks, codec_checks
from workbench.comm.codecs.coders import coder_of
from workbench.comm.messages.flat import MessageRound
from workbench.plan.collective.codec import Codec


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [*FLAT.values(), Tree(), Star()], ids=lambda a: a.name)
def test_right_ones_pass(algorithm):
    found = algorithm_checks(algorithm)
    assert all(check.ok for check in found), found
    assert len(found) == (8 if algorithm.takes_codec else 4)


class Twice(Tree):
    """Sums some elements twice."""

    def rounds(self, flat, members, me):
        if me == 1:
            flat[:1] *= 2
        yield from super().rounds(flat, members, me)


class OwnBits(Tree):
    """One rank rounds differently."""

    def rounds(self, flat, members, me):
        yield from super().rounds(flat, members, me)
        if me == 1 and len(flat) > 2:
            flat[2] = torch.nextafter(flat[2], flat[2] + 1)


class Sparse(Star):
    """What it sends depends on values."""

    def rounds(self, flat, members, me):
        if len(members) > 1 and flat.any():
            other, room = members[me - 1], torch.empty_like(flat)
            yield MessageRound(((other, flat),), ((members[(me + 1) % len(members)], room),))
        yield from super().rounds(flat, members, me)


class Stuck(Tree):
    """Three ranks wait for each other."""

    def rounds(self, flat, members, me):
        if len(members) == 3:
            yield MessageRound(receives=((members[me - 1], torch.empty_like(flat)),))
        yield from super().rounds(flat, members, me)


class Weighted(Tree):
    """No sum: what it does to x is not what it does to y."""

    def rounds(self, flat, members, me):
        flat *= me + 1
        yield from super().rounds(flat, members, me)


class Forgetful(Star):
    """Forgets what one rank has encoded."""

    def coded_rounds(self, flat, members, me, coding):
        if me == 2:
            flat.zero_()
        yield from super().coded_rounds(flat, members, me, coding)


class Undecoded(Star):
    """The first rank keeps its own sum, and does not decode what it has sent."""

    def coded_rounds(self, flat, members, me, coding):
        exact = None
        for exchange in super().coded_rounds(flat, members, me, coding):
            exact = flat.clone()
            yield exchange
        if me == 0 and exact is not None:
            flat.copy_(exact)


class Stating(Tree):
    """States so many times the additions that it makes."""

    def __init__(self, times):
        self.times = times

    def rounds(self, flat, members, me):
        for one in super().rounds(flat, members, me):
            yield replace(one, additions=self.times * one.additions)


SUM, BITS = "the sum is torch's", "all ranks have the same bits"
DRY, ADDED = "a dry run exchanges", "additions are as many"


@pytest.mark.parametrize(
    ("algorithm", "failing"),
    [
        (Twice(), {SUM}),
        (OwnBits(), {BITS}),
        (Sparse(), {DRY}),
        (Stuck(), {SUM, BITS, DRY, ADDED}),
        (Stating(0), {ADDED}),
        (Stating(2), {ADDED}),
        (Weighted(), {SUM}),
        (Forgetful(), {"coded: exact through", "coded: what error feedback"}),
        (Undecoded(), {"coded: all ranks", "coded: what error feedback"}),
    ],
    ids=lambda a: getattr(a, "name", ""),
)
def test_wrong_ones_fail_where_they_are_wrong(algorithm, failing):
    found = {check.what: check for check in algorithm_checks(algorithm)}
    wrong = {what for what, check in found.items() if not check.ok}
    assert {next(f for f in [*failing, what] if what.startswith(f)) for what in wrong} == failing
    assert all(" on " in found[what].said for what in wrong)  # which case it was


class Product(Star):
    """Adds by a product with ones, which is not counted."""

    def rounds(self, flat, members, me):
        rooms = flat.new_empty(len(members) - 1, len(flat))
        others = [other for other in members if other != members[me]]
        if others:
            sends = tuple((other, flat) for other in others)
            yield MessageRound(sends, tuple(zip(others, rooms, strict=True)), rooms.numel())
        parts = [*rooms[:me], flat, *rooms[me:]]
        flat.copy_(torch.ones(len(parts), dtype=flat.dtype) @ torch.stack(parts))

    coded_rounds = Algorithm.coded_rounds


def test_additions_that_are_not_seen_are_believed():
    assert all(check.ok for check in algorithm_checks(Product()))


class Alone(Tree):
    """Right with others, and wrong where a rank has none."""

    def rounds(self, flat, members, me):
        if len(members) == 1:
            flat *= 2
        yield from super().rounds(flat, members, me)


def test_one_rank_is_a_case_too():
    wrong = [check for check in algorithm_checks(Alone()) if not check.ok]
    assert wrong
    assert all(" on 1 ranks" in check.said for check in wrong)


CPU = torch.device("cpu")
BUILT_IN = [
    *(Codec(name=name) for name in ("fp16", "bf16", "bf16_truncated", "int8", "int4")),
    Codec(name="int8", chunk=16, error_feedback=True),
    Codec(name="top_k", fraction=0.1, error_feedback=True),
]


@pytest.mark.parametrize("codec", BUILT_IN, ids=lambda c: f"{c.name} {c.error_feedback}")
def test_built_in_ones_pass(codec):
    found = codec_checks(coder_of(codec, CPU))
    assert all(check.ok for check in found), found
    assert len(found) == 7 + (codec.name != "top_k") + codec.error_feedback


class Cleaning(Half):
    """NaN becomes zero, which the base class sees."""

    def encode(self, x, wire):
        super().encode(x.nan_to_num(0.0, 0.0, 0.0), wire)


@pytest.mark.parametrize("codec", [Sign(), Half(), Cleaning()], ids=lambda c: c.name)
def test_own_codecs_pass(codec):
    found = codec_checks(codec)
    assert all(check.ok for check in found), found


class Longer(Half):
    def encoded_bytes(self, length):
        return 2 * length + 2


class Float(Half):
    def encoded_bytes(self, length):
        return 16 * length / 8


class Counting(Sign):
    """Keeps something from call to call."""

    def __init__(self):
        self.calls = 0

    def encode(self, x, wire):
        self.calls += 1
        super().encode(x * self.calls, wire)


class Unfilled(Half):
    """Leaves a byte as it is, and reads it."""

    def encode(self, x, wire):
        last = wire[-1].clone()
        super().encode(x, wire)
        wire[-1] = last


class InPlace(Sign):
    def encode(self, x, wire):
        super().encode(x.mul_(2), wire)


class AddsWrong(Half):
    """Knows no sign."""

    def add(self, wire, out, sign=1):
        super().add(wire, out)


class Shifted(Half):
    def decode(self, wire, out):
        super().decode(wire, out)
        out += 1e-4


class Deaf(Half):
    """NaN becomes zero, and nobody is told."""

    def encode(self, x, wire):
        super().encode(x.nan_to_num(0.0, 0.0, 0.0), wire)

    def peak(self, x, wire):
        return wire.new_zeros((), dtype=torch.float32)


class Leaking(Half):
    """Loses a little of what has arrived."""

    def add(self, wire, out, sign=1):
        super().add(wire, out, sign)
        out *= 1 - 1e-4


class Promising(Half):
    error = 2.8e-4  # of a value that is a little more than a power of 2, it is 4.9e-4


class Growing(Sign):
    """Leaves out more than there was."""

    def decode(self, wire, out):
        super().decode(wire, out)
        out *= 4


@pytest.mark.parametrize(
    ("codec", "failing"),
    [
        (Longer(), "its bytes are as many"),
        (Float(), "its bytes are as many"),
        (Counting(), "the same values give the same"),
        (Unfilled(), "what it decodes is in the bytes alone"),
        (InPlace(), "what it decodes is in the bytes alone"),
        (AddsWrong(), "adding is decoding"),
        (AddsWrong(), "with error feedback nothing"),
        (Leaking(), "with error feedback nothing"),
        (Shifted(), "zeros stay zeros"),
        (Deaf(), "NaN and infinity are refused"),
        (Promising(), "no value is off by more than 0.00028"),
        (Growing(), "it leaves out less"),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_wrong_codecs_fail_where_they_are_wrong(codec, failing):
    (check,) = [check for check in codec_checks(codec) if check.what.startswith(failing)]
    assert not check.ok
    assert "value" in check.said
