"""What a codec must do, whoever wrote it: checked in one process, on random values of many lengths.

A codec with error feedback must leave out less than there is, ||x - D(E(x))|| <= ||x||, or what it
keeps grows from step to step.

Source: compressors that contract, Karimireddy et al. 2019 (arXiv:1901.09847), on error feedback.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.comm.codecs.coders import Coder
from workbench.comm.codecs.coding import PieceCoding
from workbench.comm.messages.errors import CodecError
from workbench.plan.extension.extension import Check

LENGTHS = (*range(1, 18), 127, 128, 1000, 1003, 4099)
STEPS = 40
_CPU = torch.device("cpu")
_SAME = 1e-5  # relative: fp32 to a few roundings


@dataclass(frozen=True)
class _Case:
    length: int
    dtype: torch.dtype

    def __str__(self) -> str:
        values = "value" if self.length == 1 else "values"
        return f"{self.length} {values} of {str(self.dtype).removeprefix('torch.')}"

    def values(self, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(self.length + 10_000 * seed)
        return torch.randn(self.length, generator=generator, dtype=torch.float64).to(self.dtype)


_Fault = Callable[[Coder, _Case], str]


def checks_of(codec: Coder) -> list[Check]:
    """Checks a codec.

    Returns:
        For each thing that was checked, whether it holds, and where it does not.
    """
    checks: list[tuple[str, _Fault]] = [
        ("its bytes are as many as it says", _is_sized),
        ("the same values give the same, whatever came between", _is_steady),
        ("what it decodes is in the bytes alone, and values stay", _is_in_bytes),
        ("adding is decoding, then adding", _adds),
        ("zeros stay zeros", _keeps_zeros),
        ("NaN and infinity are refused", _refuses),
        ("with error feedback nothing is lost for good", _loses_nothing),
    ]
    if codec.error is not None:
        checks.append((f"no value is off by more than {codec.error:.3g} of the largest", _is_near))
    if codec.error_feedback:
        checks.append(("it leaves out less than there is", _contracts))
    return [_checked(what, codec, fault) for what, fault in checks]


def _cases() -> Iterator[_Case]:
    for length in LENGTHS:
        for dtype in (torch.float32, torch.float64):
            yield _Case(length, dtype)


def _checked(what: str, codec: Coder, fault: _Fault) -> Check:
    """Whether no case has a fault; whatever the codec raises is one."""
    cases = list(_cases())
    for case in cases:
        try:
            said = fault(codec, case)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        if said:
            return Check(what, False, f"{case}: {said}")
    return Check(what, True, f"{len(cases)} cases, up to {LENGTHS[-1]} values")


def _wire(codec: Coder, x: Tensor, fill: int = 0) -> Tensor:
    """What a tensor becomes, in memory that had something else in it."""
    (wire,) = PieceCoding(codec, _CPU).buffers([len(x)])
    wire.fill_(fill)
    codec.encode(x, wire)
    return wire


def _decoded(codec: Coder, wire: Tensor, like: Tensor, fill: float = 0.0) -> Tensor:
    out = torch.full_like(like, fill)
    codec.decode(wire, out)
    return out


def _is_sized(codec: Coder, case: _Case) -> str:
    size = codec.encoded_bytes(case.length)
    if type(size) is not int or size < 0:
        return f"encoded_bytes is {size!r}, which is no whole number >= 0"
    _decoded(codec, _wire(codec, case.values()), case.values())
    return ""


def _is_steady(codec: Coder, case: _Case) -> str:
    x = case.values()
    first = _wire(codec, x)
    _wire(codec, case.values(1))
    again = _wire(codec, x)
    there = _decoded(codec, first, x)
    if not torch.equal(there, _decoded(codec, again, x)):
        return "encoding it once more, after others, gave something else"
    return ""


def _is_in_bytes(codec: Coder, case: _Case) -> str:
    x = case.values()
    one = _decoded(codec, _wire(codec, x, 0), x, 0.0)
    other = _decoded(codec, _wire(codec, x, 255), x, torch.nan)
    if not torch.equal(x, case.values()):
        return "encoding changed the values"
    if not torch.equal(one, other):
        return "what is decoded depends on what was in the memory before"
    return ""


def _adds(codec: Coder, case: _Case) -> str:
    x, out = case.values(), case.values(2)
    wire = _wire(codec, x)
    decoded = _decoded(codec, wire, x)
    for sign in (1, -1):
        found = out.clone()
        codec.add(wire, found, sign)
        expected = out + sign * decoded
        if not torch.allclose(found, expected, rtol=_SAME, atol=_SAME * _most(decoded)):
            return f"add with sign {sign} is off by {_most(found - expected):.3g}"
    return ""


def _keeps_zeros(codec: Coder, case: _Case) -> str:
    x = torch.zeros(case.length, dtype=case.dtype)
    most = _most(_decoded(codec, _wire(codec, x), x))
    return f"zeros become magnitudes up to {most:.3g}" if not most == 0 else ""


def _refuses(codec: Coder, case: _Case) -> str:
    coding = PieceCoding(codec, _CPU, what="a check")
    for bad in (torch.nan, torch.inf, -torch.inf):
        for place in (0, -1):
            x = case.values()
            x[place] = bad
            (wire,) = coding.buffers([len(x)])
            try:
                coding.encode(x, wire)
            except CodecError:
                continue
            return f"{bad} in place {place} was encoded"
    return ""


def _loses_nothing(codec: Coder, case: _Case) -> str:
    """All that was decoded, and what is kept in the end, are all that came."""
    residual = torch.zeros(case.length, dtype=case.dtype)
    coding = PieceCoding(codec, _CPU, residual, "a check")
    came, arrived = torch.zeros_like(residual), torch.zeros_like(residual)
    sizes = 0.0
    for step in range(STEPS):
        x = case.values(step)
        came += x
        (wire,) = coding.buffers([len(x)])
        coding.encode(x, wire)
        coding.add(wire, arrived)
        sizes += _most(residual) + _most(arrived) + _most(x)
    off = _most(arrived + residual - came)
    return "" if off <= _SAME * sizes else f"after {STEPS} steps {off:.3g} is missing"


def _is_near(codec: Coder, case: _Case) -> str:
    x = case.values()
    off = _most(_decoded(codec, _wire(codec, x), x) - x)
    assert codec.error is not None
    most = codec.error * _most(x) * (1 + 1e-3)
    return "" if off <= most else f"a value is off by {off:.3g}, and {most:.3g} was promised"


def _contracts(codec: Coder, case: _Case) -> str:
    x = case.values()
    left, there = (x - _decoded(codec, _wire(codec, x), x)).norm().item(), x.norm().item()
    if left > there * (1 + _SAME):
        return f"of {there:.3g} it leaves out {left:.3g}"
    for place in {0, case.length // 2, case.length - 1}:
        alone = torch.zeros_like(x)
        alone[place] = 1.0
        if not _decoded(codec, _wire(codec, alone), alone)[place]:
            return f"it never sends value {place}, even where all others are 0"
    return ""


def _most(x: Tensor) -> float:
    return float(x.abs().max())
