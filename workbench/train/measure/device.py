"""A device's own figures: what it attains where no layer was measured.

All ranks measure at once, since they share the memory of their host.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.checkpoint import checkpoint

from workbench.comm.codecs import PieceCoding, coder_of
from workbench.comm.groups.group import Group
from workbench.comm.groups.world import RankConfig, World
from workbench.plan.collective.codec import Codec, CodecName
from workbench.plan.experiment.experiment import SGD, Adam, AdamW, AnyOptimizer, Experiment
from workbench.train.measure.repeating import Repetition, Until, estimate, finish, slowest
from workbench.train.strategies.remembered import build_optimizer

_UNTIL = Until(relative=0.05, least=3, most=40)
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
_OPTIMIZERS: tuple[AnyOptimizer, ...] = (SGD(lr=1e-6, momentum=0.9), Adam(lr=1e-6), AdamW(lr=1e-6))
_CODECS: tuple[CodecName, ...] = get_args(CodecName)
_COPIED_BYTES, _UPDATED_BYTES, _CODED_BYTES = 2**26, 2**24, 2**22
SIDE = {"cpu": 384, "cuda": 8192}  # of the matrices that are multiplied
_ROW_S = 0.1
_CALLS = 200
_BLOCKS, _OF_BLOCK = 20, 3  # layers
_SMALL_SIDE = 64


@dataclass(frozen=True)
class DeviceMeasured:
    """What one rank's device attains while the others do the same.

    Attributes:
        bandwidth: bytes read and written per second by a copy.
        flops: floating-point operations per second of products of square matrices, by precision.
        call_s: seconds of an operation that has next to nothing to do.
        recomputed_s: the seconds that it costs besides to compute a small layer again.
        update_s_per_byte: the seconds of an update for each byte of parameters, by the optimizer's
            kind.
        coding_s_per_byte: the seconds of encoding and decoding for each byte of a tensor, by the
            codec's name.
        library_bytes: the bytes that libraries keep for themselves once they have computed.
    """

    bandwidth: float
    flops: dict[str, float]
    call_s: float
    recomputed_s: float
    update_s_per_byte: dict[str, float]
    coding_s_per_byte: dict[str, float]
    library_bytes: int = 0


def device(config: RankConfig, experiment: Experiment, *, within_s: float) -> DeviceMeasured:
    """Measures the devices of the ranks of an experiment's plan.

    Args:
        config: the place of this rank.
        experiment: the experiment, which says how many ranks there are.
        within_s: seconds for all figures; each is repeated a few times at least.
    """
    with World.open(config) as world:
        spec = ("calibration", tuple(range(world.size)))
        group = world.groups([spec])[spec]
        each = within_s / (5 + len(DTYPES) + len(_OPTIMIZERS) + len(_CODECS))

        def timed(call: Callable[[], object]) -> float:
            return _timed(call, group, world.device, each)

        source = torch.ones(_COPIED_BYTES // 4, device=world.device)
        target = torch.empty_like(source)
        copy_s = timed(lambda: target.copy_(source))
        side = SIDE[world.device.type]
        flops = {}
        for name, dtype in DTYPES.items():
            a = torch.ones(side, side, dtype=dtype, device=world.device)
            flops[name] = 2.0 * side**3 / timed(partial(torch.mm, a, a))
        small = torch.ones(1, device=world.device, requires_grad=True)
        plain_s, again_s, forward_s = (timed(call) for call in _blocks(world.device))
        updates = {value.kind: timed(_update(value, world.device)) for value in _OPTIMIZERS}
        codings = {name: timed(_coding(Codec(name=name), world.device)) for name in _CODECS}
        return DeviceMeasured(
            2 * _COPIED_BYTES / copy_s,
            flops,
            timed(lambda: [small.relu() for _ in range(_CALLS)]) / _CALLS,
            max(0.0, again_s - plain_s - forward_s) / (_BLOCKS * _OF_BLOCK),
            {kind: seconds / _UPDATED_BYTES for kind, seconds in updates.items()},
            {name: seconds / _CODED_BYTES for name, seconds in codings.items()},
            library_bytes(world.device),
        )


def library_bytes(device: torch.device) -> int:
    """Bytes that cuBLAS keeps on a GPU once a linear layer has run there, forward and backward.

    It has a workspace for each thread that computes: backward passes have one of their own.

    Args:
        device: the device; one that is no GPU keeps nothing.
    """
    if device.type != "cuda":
        return 0
    layer = nn.Linear(_SMALL_SIDE, _SMALL_SIDE, device=device)
    x = torch.ones(_SMALL_SIDE, _SMALL_SIDE, device=device, requires_grad=True)
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated(device)
    torch.autograd.grad(layer(x).sum(), (x, *layer.parameters()))
    return torch.cuda.memory_allocated(device) - before


def _blocks(device: torch.device) -> Sequence[Callable[[], object]]:
    """Small layers of the kinds that are recomputed most, forward and backward.

    Returns:
        Keeping what they save; computing it again; and forward alone.
    """
    convolution, norm = nn.Conv2d(4, 4, 1, device=device), nn.BatchNorm2d(4, device=device)
    x = torch.ones(2, 4, 2, 2, device=device, requires_grad=True)

    def blocks(given: torch.Tensor) -> torch.Tensor:
        for _ in range(_BLOCKS):
            given = norm(convolution(given)).relu()
        return given

    def again() -> torch.Tensor:
        given: torch.Tensor = checkpoint(blocks, x, use_reentrant=False, preserve_rng_state=False)
        return given

    def backward(given: torch.Tensor) -> None:
        given.sum().backward()

    return lambda: backward(blocks(x)), lambda: backward(again()), lambda: blocks(x)


def _update(value: AnyOptimizer, device: torch.device) -> Callable[[], object]:
    parameter = nn.Parameter(torch.ones(_UPDATED_BYTES // 4, device=device))
    parameter.grad = torch.ones_like(parameter)
    return build_optimizer(value, [parameter]).step


def _coding(codec: Codec, device: torch.device) -> Callable[[], object]:
    """Encodes and decodes, as a rank does with what it sends and receives."""
    x = torch.randn(_CODED_BYTES // 4, device=device)
    coding = PieceCoding(coder_of(codec, device), device)
    (wire,) = coding.buffers([len(x)])

    def there_and_back() -> None:
        coding.encode(x, wire)
        coding.decode(wire, x)

    return there_and_back


def _timed(
    call: Callable[[], object], group: Group, device: torch.device, within_s: float
) -> float:
    """Seconds of a call, while all ranks do the same.

    Calls are timed many in a row: a host that grants a part of its time takes the rest away in
    pieces of up to a tenth of a second, which must not pass for odd moments.
    """
    call()
    times = max(1, round(_ROW_S / slowest(_seconds(call, 1, device), group)))
    repetition = Repetition(group, _UNTIL, within_s)
    seconds: list[NDArray[np.float64]] = []
    while repetition.goes_on(seconds):
        seconds.append(np.array([_seconds(call, times, device)]))
    return float(estimate(np.stack(seconds))[0][0])


def _seconds(call: Callable[[], object], times: int, device: torch.device) -> float:
    finish(device)
    began = time.perf_counter()
    for _ in range(times):
        call()
    finish(device)
    return (time.perf_counter() - began) / times
