"""What an all-reduce algorithm must do, whoever wrote it: checked in one process, on many ranks.

Groups of 1 to 8 ranks sum 0, 1, k-1, k and 1003 elements of fp64, fp32 and bf16.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.comm.algorithms.algorithm import Algorithm
from workbench.comm.algorithms.dry_run import drive
from workbench.comm.codecs.coders import Coder, coder_of
from workbench.comm.codecs.coding import PieceCoding
from workbench.comm.messages.flat import accumulator
from workbench.plan.experiment.codec import Codec
from workbench.plan.experiment.dry_run import DryRun
from workbench.plan.extension.extension import Check

MOST_RANKS = 8
LENGTH = 1003
_DTYPES = (torch.float64, torch.float32, torch.bfloat16)
_CPU = torch.device("cpu")
_ADDING = {torch.ops.aten.add, torch.ops.aten.add_, torch.ops.aten.sub, torch.ops.aten.sub_}
_INT8 = Codec(name="int8", chunk=64)
_FEEDBACK = Codec(name="top_k", fraction=0.2, error_feedback=True)


@dataclass(frozen=True)
class _Case:
    ranks: int
    length: int
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.length} elements of {dtype} on {self.ranks} ranks"

    def inputs(self, seed: int = 0) -> list[Tensor]:
        generator = torch.Generator().manual_seed(100 * self.ranks + self.length + seed)
        shape = self.ranks, self.length
        return list(torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype))


_Fault = Callable[[_Case], str]


def checks_of(algorithm: Algorithm) -> list[Check]:
    """Checks an algorithm; with a coded form, that one too.

    Returns:
        For each thing that was checked, whether it holds, and where it does not.
    """
    exact = list(_cases(_DTYPES))
    found = [
        _checked(what, exact, _of(algorithm, fault))
        for what, fault in (
            ("messages fit together, and every rank ends", _fits),
            ("the sum is torch's, to rounding", _is_the_sum),
            ("all ranks have the same bits", _is_equal),
            ("a dry run exchanges what a real one does", _is_dry),
            ("additions are as many as it makes", _is_added),
            ("the sum is its own adjoint: <A x, y> = <x, A y>", _is_adjoint),
        )
    ]
    if not algorithm.takes_codec:
        return found
    coded = list(_cases(_DTYPES[:2]))
    return found + [
        _checked(what, coded, _of(algorithm, fault))
        for what, fault in (
            ("coded: exact through a codec that loses nothing", _is_exact_coded),
            ("coded: all ranks have the same bits", _is_equal_coded),
            ("coded: a dry run exchanges what a real one does", _is_dry_coded),
            ("coded: what error feedback keeps is what is missing", _is_kept),
        )
    ]


def _cases(dtypes: Sequence[torch.dtype]) -> Iterator[_Case]:
    for ranks in range(1, MOST_RANKS + 1):
        for length in sorted({0, 1, ranks - 1, ranks, LENGTH}):
            for dtype in dtypes:
                yield _Case(ranks, length, dtype)


def _of(algorithm: Algorithm, fault: Callable[[Algorithm, _Case], str]) -> _Fault:
    return lambda case: fault(algorithm, case)


def _checked(what: str, cases: Sequence[_Case], fault: _Fault) -> Check:
    """Whether no case has a fault; whatever the algorithm raises is one."""
    for case in cases:
        try:
            said = fault(case)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        if said:
            return Check(what, False, f"{case}: {said}")
    return Check(what, True, f"{len(cases)} cases, 1 to {MOST_RANKS} ranks")


def _run(algorithm: Algorithm, flats: Sequence[Tensor]) -> DryRun:
    """Sums in place."""
    members = range(len(flats))
    rounds = [algorithm.rounds(flat, members, me) for me, flat in enumerate(flats)]
    return drive(rounds, flats, f"algorithm {algorithm.name!r}")


def _run_coded(
    algorithm: Algorithm,
    flats: Sequence[Tensor],
    coder: Coder,
    residuals: Sequence[Tensor | None] | None = None,
) -> DryRun:
    members = range(len(flats))
    rounds = [
        algorithm.coded_rounds(flat, members, me, PieceCoding(coder, _CPU, residual))
        for me, (flat, residual) in enumerate(
            zip(flats, residuals or [None] * len(flats), strict=True)
        )
    ]
    return drive(rounds, flats, f"algorithm {algorithm.name!r} with a codec")


def _fits(algorithm: Algorithm, case: _Case) -> str:
    _run(algorithm, case.inputs())
    return ""


def _is_the_sum(algorithm: Algorithm, case: _Case) -> str:
    flats, inputs = case.inputs(), torch.stack(case.inputs())
    _run(algorithm, flats)
    return _off(flats, inputs)


def _off(flats: Sequence[Tensor], inputs: Tensor) -> str:
    """How far sums are from those of the inputs [ranks, length]; "": so near as rounding allows."""
    exact, size = inputs.double().sum(0), inputs.double().abs().sum(0)
    tolerated = len(inputs) * torch.finfo(inputs.dtype).eps * size
    for rank, flat in enumerate(flats):
        error = (flat.double() - exact).abs()
        wrong = ~(error <= tolerated)
        if wrong.any():
            place = int(wrong.nonzero()[0])
            got, wanted = flat[place].item(), exact[place].item()
            return f"rank {rank} has {got:.6g} for element {place}, and the sum is {wanted:.6g}"
    return ""


def _is_equal(algorithm: Algorithm, case: _Case) -> str:
    flats = case.inputs()
    _run(algorithm, flats)
    return _unlike(flats)


def _unlike(flats: Sequence[Tensor]) -> str:
    first = flats[0].view(torch.uint8)
    unlike = [n for n, flat in enumerate(flats) if not torch.equal(flat.view(torch.uint8), first)]
    return f"rank {unlike[0]} has other bits than rank 0" if unlike else ""


def _is_dry(algorithm: Algorithm, case: _Case) -> str:
    done = _run(algorithm, case.inputs())
    dry = algorithm.dry(case.length, case.dtype.itemsize, case.ranks)
    return _differs(dry, done)


def _differs(dry: DryRun, done: DryRun) -> str:
    for name in ("messages", "bytes", "rounds", "additions", "pairs"):
        said, found = getattr(dry, name), getattr(done, name)
        if said != found:
            return f"{name} are {said} when it is run dry, and {found} with values"
    return ""


def _is_added(algorithm: Algorithm, case: _Case) -> str:
    with _Additions() as made:
        stated = sum(_run(algorithm, case.inputs()).additions)
    least = (case.ranks - 1) * case.length
    if stated < least:
        return f"{stated} are stated, and a sum takes {least} at least"
    # Fewer than the least: it adds by operations that are not counted.
    return f"{stated} are stated, and {made.count} made" if least <= made.count != stated else ""


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


def _is_adjoint(algorithm: Algorithm, case: _Case) -> str:
    x, y = case.inputs(1), case.inputs(2)
    ax, ay = case.inputs(1), case.inputs(2)
    _run(algorithm, ax)
    _run(algorithm, ay)
    there, size = _inner(ax, y)
    back, other = _inner(x, ay)
    tolerated = 4 * case.ranks * torch.finfo(case.dtype).eps * (size + other)
    return "" if abs(there - back) <= tolerated else f"{there:.6g} is not {back:.6g}"


def _inner(a: Sequence[Tensor], b: Sequence[Tensor]) -> tuple[float, float]:
    """The inner product over all ranks, and that of magnitudes."""
    product = torch.stack(list(a)).double() * torch.stack(list(b)).double()
    return float(product.sum()), float(product.abs().sum())


def _is_exact_coded(algorithm: Algorithm, case: _Case) -> str:
    flats, inputs = case.inputs(), torch.stack(case.inputs())
    _run_coded(algorithm, flats, _Exact())
    return _off(flats, inputs)


def _is_equal_coded(algorithm: Algorithm, case: _Case) -> str:
    flats = case.inputs()
    _run_coded(algorithm, flats, coder_of(_INT8, _CPU))
    return _unlike(flats)


def _is_dry_coded(algorithm: Algorithm, case: _Case) -> str:
    done = _run_coded(algorithm, case.inputs(), coder_of(_INT8, _CPU))
    dry = algorithm.dry(case.length, case.dtype.itemsize, case.ranks, _INT8.encoded_bytes)
    return _differs(dry, done)


def _is_kept(algorithm: Algorithm, case: _Case) -> str:
    """The sum and all that was left out of it are the sum of what came in."""
    flats, inputs = case.inputs(), torch.stack(case.inputs())
    residuals = [torch.zeros(case.length, dtype=accumulator(case.dtype)) for _ in flats]
    _run_coded(algorithm, flats, coder_of(_FEEDBACK, _CPU), residuals)
    if case.ranks == 1:
        return ""
    exact, size = inputs.double().sum(0), inputs.double().abs().sum(0)
    kept = flats[0].double() + torch.stack(residuals).double().sum(0)
    # Its codec rounds fp64 to fp32, but for what it leaves out.
    tolerated = 4 * case.ranks * torch.finfo(torch.float32).eps * size
    wrong = ~((kept - exact).abs() <= tolerated)
    return f"{int(wrong.sum())} elements are lost, or come twice" if wrong.any() else ""


class _Exact(Coder):
    """Loses nothing: the bytes of fp64."""

    def encoded_bytes(self, length: int) -> int:
        return 8 * length

    def encode(self, x: Tensor, wire: Tensor) -> None:
        wire.view(torch.float64).copy_(x)

    def decode(self, wire: Tensor, out: Tensor) -> None:
        out.copy_(wire.view(torch.float64))
