"""Each check of a codec fails for one that does just that wrong."""

import pytest
import torch

from tests.own_sums import Half, Sign
from workbench.comm.codecs.checks import checks_of
from workbench.comm.codecs.coders import coder_of
from workbench.plan.experiment.codec import Codec

CPU = torch.device("cpu")
BUILT_IN = [
    *(Codec(name=name) for name in ("fp16", "bf16", "bf16_truncated", "int8", "int4")),
    Codec(name="int8", chunk=16, error_feedback=True),
    Codec(name="top_k", fraction=0.1, error_feedback=True),
]


@pytest.mark.parametrize("codec", BUILT_IN, ids=lambda c: f"{c.name} {c.error_feedback}")
def test_built_in_ones_pass(codec):
    found = checks_of(coder_of(codec, CPU))
    assert all(check.ok for check in found), found
    assert len(found) == 7 + (codec.name != "top_k") + codec.error_feedback


class Cleaning(Half):
    """NaN becomes zero, which the base class sees."""

    def encode(self, x, wire):
        super().encode(x.nan_to_num(0.0, 0.0, 0.0), wire)


@pytest.mark.parametrize("codec", [Sign(), Half(), Cleaning()], ids=lambda c: c.name)
def test_own_ones_pass(codec):
    found = checks_of(codec)
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
def test_wrong_ones_fail_where_they_are_wrong(codec, failing):
    (check,) = [check for check in checks_of(codec) if check.what.startswith(failing)]
    assert not check.ok
    assert "value" in check.said
