"""What an all-reduce algorithm or a codec must do, whoever wrote it: checked in one process.

Groups of 1 to 8 ranks sum 0, 1, k-1, k and 1003 elements of fp64, fp32 and bf16. Codecs code random
values of many lengths. One with error feedback must leave out less than there is,
||x - D(E(x))|| <= ||x||, or what it keeps grows from step to step.

Source: compressors that contract, Karimireddy et al. 2019 (arXiv:1901.09847), on error feedback.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.comm.algorithms.algorithm import Algorithm
from workbench.comm.algorithms.dry_run import drive
from workbench.comm.codecs.coders import Coder, coder_of
from workbench.comm.codecs.coding import PieceCoding
from workbench.comm.messages.errors import CodecError
from workbench.comm.messages.flat import accumulator
from workbench.plan.collective.algorithm import DryRun
from workbench.plan.collective.codec import Codec
from workbench.plan.extension.extension import Check

MOST_RANKS = 8
LENGTHS = (*range(1, 18), 127, 128, 1000, 1003, 4099)
STEPS = 40
_WIDE = (torch.float32, torch.float64)
_Case = TypeVar("_Case")
_CPU = torch.device("cpu")
_SAME = 1e-5  # relative: fp32 to a few roundings
_ADDING = {torch.ops.aten.add, torch.ops.aten.add_, torch.ops.aten.sub, torch.ops.aten.sub_}
_INT8 = Codec(name="int8", chunk=64)
_FEEDBACK = Codec(name="top_k", fraction=0.2, error_feedback=True)


def _checked(
    names: Sequence[str],
    cases: Sequence[_Case],
    faults: Callable[[_Case], Sequence[str]],
    tried: str,
) -> list[Check]:
    """Whether no case has a fault of each name; whatever the extension raises is one of all."""
    first = [""] * len(names)
    for case in cases:
        try:
            found = faults(case)
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"] * len(names)
        first = [old or (new and f"{case}: {new}") for old, new in zip(first, found, strict=True)]
        if all(first):
            break
    tried = f"{len(cases)} cases, {tried}"
    return [
        Check(name, not fault, fault or tried) for name, fault in zip(names, first, strict=True)
    ]


@dataclass(frozen=True)
class _Sum:
    ranks: int
    length: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.length} elements of {_name(self.dtype)} on {self.ranks} ranks"

    def inputs(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(100 * self.ranks + self.length)
        shape = self.ranks, self.length
        return list(torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype))


def algorithm_checks(algorithm: Algorithm) -> list[Check]:
    """Checks an algorithm; with a coded form, that one too.

    Returns:
        For each thing that was checked, whether it holds, and where it does not.
    """
    exact = (
        "the sum is torch's, to rounding",
        "all ranks have the same bits",
        "a dry run exchanges what a real one does",
        "additions are as many as it makes",
    )
    coded = (
        "coded: exact through a codec that loses nothing",
        "coded: all ranks have the same bits",
        "coded: a dry run exchanges what a real one does",
        "coded: what error feedback keeps is what is missing",
    )
    cases = [
        _Sum(ranks, length, dtype)
        for ranks in range(1, MOST_RANKS + 1)
        for length in sorted({0, 1, ranks - 1, ranks, 1003})
        for dtype in (*_WIDE, torch.bfloat16)
    ]
    tried = f"1 to {MOST_RANKS} ranks"
    found = _checked(exact, cases, lambda case: _exact_faults(algorithm, case), tried)
    if algorithm.takes_codec:
        cases = [case for case in cases if case.dtype in _WIDE]
        found += _checked(coded, cases, lambda case: _coded_faults(algorithm, case), tried)
    return found


def _exact_faults(algorithm: Algorithm, case: _Sum) -> Sequence[str]:
    flats, members = case.inputs(), range(case.ranks)
    rounds = [algorithm.rounds(flat, members, me) for me, flat in enumerate(flats)]
    with _Additions() as made:
        done = drive(rounds, flats, f"algorithm {algorithm.name!r}")
    dry = algorithm.dry(case.length, case.dtype.itemsize, case.ranks)
    stated, least, added = sum(done.additions), (case.ranks - 1) * case.length, ""
    if stated < least:
        added = f"{stated} are stated, and a sum takes {least} at least"
    elif least <= made.count != stated:  # fewer than the least: by operations that are not counted
        added = f"{stated} are stated, and {made.count} made"
    return _off(flats, case), _unlike(flats), _differs(dry, done), added


def _coded_faults(algorithm: Algorithm, case: _Sum) -> Sequence[str]:
    residuals = [torch.zeros(case.length, dtype=accumulator(case.dtype)) for _ in range(case.ranks)]

    def summed(coder: Coder, kept: Sequence[Tensor | None]) -> tuple[list[Tensor], DryRun]:
        flats, members = case.inputs(), range(case.ranks)
        rounds = [
            algorithm.coded_rounds(flat, members, me, PieceCoding(coder, _CPU, kept[me]))
            for me, flat in enumerate(flats)
        ]
        return flats, drive(rounds, flats, f"algorithm {algorithm.name!r} with a codec")

    nothing = [None] * case.ranks
    exact, _ = summed(_Exact(), nothing)
    rounded, done = summed(coder_of(_INT8, _CPU), nothing)
    kept, _ = summed(coder_of(_FEEDBACK, _CPU), residuals)
    dry = algorithm.dry(case.length, case.dtype.itemsize, case.ranks, _INT8.encoded_bytes)
    missing = ""
    if case.ranks > 1:
        # The sum and all that was left out of it. Its codec rounds fp64 to fp32, but for that.
        total = kept[0].double() + torch.stack(residuals).double().sum(0)
        missing = _off([total], case, 4 * torch.finfo(torch.float32).eps)
        missing = missing and f"of what is summed and kept, {missing}"
    return _off(exact, case), _unlike(rounded), _differs(dry, done), missing


def _off(sums: Sequence[Tensor], case: _Sum, tolerance: float | None = None) -> str:
    """How far sums are from those of the case; "": as near as rounding allows."""
    inputs = torch.stack(case.inputs()).double()
    exact, size = inputs.sum(0), inputs.abs().sum(0)
    eps = torch.finfo(case.dtype).eps if tolerance is None else tolerance
    for rank, flat in enumerate(sums):
        wrong = ~((flat.double() - exact).abs() <= case.ranks * eps * size)
        if wrong.any():
            place = int(wrong.nonzero()[0])
            got, wanted = flat[place].item(), exact[place].item()
            return f"rank {rank} has {got:.6g} for element {place}, and the sum is {wanted:.6g}"
    return ""


def _unlike(flats: Sequence[Tensor]) -> str:
    first = flats[0].view(torch.uint8)
    unlike = [n for n, flat in enumerate(flats) if not torch.equal(flat.view(torch.uint8), first)]
    return f"rank {unlike[0]} has other bits than rank 0" if unlike else ""


def _differs(dry: DryRun, done: DryRun) -> str:
    for name in ("messages", "bytes", "rounds", "additions", "pairs"):
        predicted, counted = getattr(dry, name), getattr(done, name)
        if predicted != counted:
            return f"{name} are {predicted} when it is run dry, and {counted} with values"
    return ""


class _Additions(TorchDispatchMode):
    """Counts the elements that are added to others."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _ADDING and isinstance(args[1], Tensor):
            self.count += result.numel() * result.is_floating_point()
        elif func.overloadpacket is torch.ops.aten.sum:
            self.count += args[0].numel() - result.numel()
        return result


class _Exact(Coder):
    """Loses nothing: the bytes of fp64."""

    def encoded_bytes(self, length: int) -> int:
        return 8 * length

    def encode(self, x: Tensor, wire: Tensor) -> None:
        wire.view(torch.float64).copy_(x)

    def decode(self, wire: Tensor, out: Tensor) -> None:
        out.copy_(wire.view(torch.float64))


@dataclass(frozen=True)
class _Values:
    length: int
    dtype: torch.dtype

    def __str__(self) -> str:
        values = "value" if self.length == 1 else "values"
        return f"{self.length} {values} of {_name(self.dtype)}"

    def make(self, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(self.length + 10_000 * seed)
        return torch.randn(self.length, generator=generator, dtype=torch.float64).to(self.dtype)


def codec_checks(codec: Coder) -> list[Check]:
    """Checks a codec.

    Returns:
        For each thing that was checked, whether it holds, and where it does not.
    """
    checks: dict[str, Callable[[Coder, _Values], str]] = {
        "its bytes are as many as it says": _is_sized,
        "the same values give the same, whatever came between": _is_steady,
        "what it decodes is in the bytes alone, and values stay": _is_in_bytes,
        "adding is decoding, then adding": _adds,
        "zeros stay zeros": _keeps_zeros,
        "NaN and infinity are refused": _refuses,
        "with error feedback nothing is lost for good": _loses_nothing,
    }
    if codec.error is not None:
        checks[f"no value is off by more than {codec.error:.3g} of the largest"] = _is_near
    if codec.error_feedback:
        checks["it leaves out less than there is"] = _contracts
    cases = [_Values(length, dtype) for length in LENGTHS for dtype in _WIDE]

    def checked(what: str, fault: Callable[[Coder, _Values], str]) -> list[Check]:
        tried = f"up to {LENGTHS[-1]} values"
        return _checked((what,), cases, lambda case: (fault(codec, case),), tried)

    return [check for named in checks.items() for check in checked(*named)]


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


def _is_sized(codec: Coder, case: _Values) -> str:
    size = codec.encoded_bytes(case.length)
    if type(size) is not int or size < 0:
        return f"encoded_bytes is {size!r}, which is no whole number >= 0"
    _decoded(codec, _wire(codec, case.make()), case.make())
    return ""


def _is_steady(codec: Coder, case: _Values) -> str:
    x = case.make()
    first, _, again = _wire(codec, x), _wire(codec, case.make(1)), _wire(codec, x)
    same = torch.equal(_decoded(codec, first, x), _decoded(codec, again, x))
    return "" if same else "encoding it once more, after others, gave something else"


def _is_in_bytes(codec: Coder, case: _Values) -> str:
    x = case.make()
    first = _decoded(codec, _wire(codec, x, 0), x, 0.0)
    other = _decoded(codec, _wire(codec, x, 255), x, torch.nan)
    if not torch.equal(x, case.make()):
        return "encoding changed the values"
    same = torch.equal(first, other)
    return "" if same else "what is decoded depends on what was in the memory before"


def _adds(codec: Coder, case: _Values) -> str:
    x, out = case.make(), case.make(2)
    wire = _wire(codec, x)
    decoded = _decoded(codec, wire, x)
    for sign in (1, -1):
        total, expected = out.clone(), out + sign * decoded
        codec.add(wire, total, sign)
        if not torch.allclose(total, expected, rtol=_SAME, atol=_SAME * _most(decoded)):
            return f"add with sign {sign} is off by {_most(total - expected):.3g}"
    return ""


def _keeps_zeros(codec: Coder, case: _Values) -> str:
    x = torch.zeros(case.length, dtype=case.dtype)
    most = _most(_decoded(codec, _wire(codec, x), x))
    return f"zeros become magnitudes up to {most:.3g}" if not most == 0 else ""


def _refuses(codec: Coder, case: _Values) -> str:
    coding = PieceCoding(codec, _CPU, what="a check")
    for bad in (torch.nan, torch.inf, -torch.inf):
        for place in (0, -1):
            x = case.make()
            x[place] = bad
            (wire,) = coding.buffers([len(x)])
            try:
                coding.encode(x, wire)
            except CodecError:
                continue
            return f"{bad} in place {place} was encoded"
    return ""


def _loses_nothing(codec: Coder, case: _Values) -> str:
    """All that was decoded, and what is kept in the end, are all that came."""
    residual, came, arrived = torch.zeros(3, case.length, dtype=case.dtype)
    coding = PieceCoding(codec, _CPU, residual, "a check")
    sizes = 0.0
    for step in range(STEPS):
        x = case.make(step)
        came += x
        (wire,) = coding.buffers([len(x)])
        coding.encode(x, wire)
        coding.add(wire, arrived)
        sizes += _most(residual) + _most(arrived) + _most(x)
    off = _most(arrived + residual - came)
    return "" if off <= _SAME * sizes else f"after {STEPS} steps {off:.3g} is missing"


def _is_near(codec: Coder, case: _Values) -> str:
    x = case.make()
    off = _most(_decoded(codec, _wire(codec, x), x) - x)
    assert codec.error is not None
    most = codec.error * _most(x) * (1 + 1e-3)
    return "" if off <= most else f"a value is off by {off:.3g}, and {most:.3g} was promised"


def _contracts(codec: Coder, case: _Values) -> str:
    x = case.make()
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
