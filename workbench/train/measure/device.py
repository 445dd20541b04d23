"""A device's own figures, where no layer was measured; and what kernels take beside their tensors.

All ranks measure at once, since they share the memory of their host. For the workspaces, each
distinct convolution of a plan, and on a GPU each linear layer, runs by itself, forward and
backward, with a meter on. That is not repeated, since the allocator sees the same each time.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from workbench.comm.codecs import PieceCoding, coder_of
from workbench.comm.groups.group import Group
from workbench.comm.groups.world import RankConfig, World
from workbench.model.build import build_fake, with_tensors
from workbench.model.record.inputs import called_whole
from workbench.model.weights.files import TORCH_DTYPES
from workbench.plan.collective.codec import Codec, CodecName
from workbench.plan.experiment.experiment import SGD, Adam, AdamW, AnyOptimizer, Experiment
from workbench.plan.graph.graph import Graph, Layer
from workbench.plan.machine.work import Needed, Workspace, local_shape, takes_workspace, work_of
from workbench.plan.plans.plan import Plan
from workbench.train.measure.repeating import Repetition, Until, estimate, finish, slowest
from workbench.train.optimizer.state import build_optimizer
from workbench.train.run.memory import PeakMeter

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
        recomputed_s: the seconds that it costs besides to compute a small layer again.
    """

    bandwidth: float
    flops: dict[str, float]
    call_s: float
    recomputed_s: float
    update_s_per_byte: dict[str, float]
    coding_s_per_byte: dict[str, float]
    library_bytes: int = 0


def device(config: RankConfig, experiment: Experiment, *, within_s: float) -> DeviceMeasured:
    """Measures the devices of the ranks of an experiment's plan."""
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


Shape = tuple[int, ...]


def workspaces(
    config: RankConfig, experiment: Experiment, *, rows: Sequence[int]
) -> tuple[Workspace, ...]:
    """Measures the layers of one rank of an experiment's plan."""
    plan, precision = experiment.plan, experiment.precision
    with World.open(config) as world:
        return workspaces_of(plan, [world.rank], rows, precision, world.device)


def workspaces_of(
    plan: Plan, ranks: Sequence[int], rows: Sequence[int], precision: str, device: torch.device
) -> tuple[Workspace, ...]:
    """Measures the layers that some ranks of a plan have, one after the other.

    Each is measured at the rows that follow from those of the ranks, and at the powers of two below
    these, since other kernels may be chosen for few rows. Layers that `takes_workspace` leaves out
    are not measured.

    Args:
        rows: the numbers of rows that each rank is given.
    """
    points: dict[str, dict[int, Needed]] = {}
    modules = _Modules(plan, device, DTYPES[precision])
    for layer in plan.graph.layers:
        if not takes_workspace(layer, device.type):
            continue
        for rank in ranks:
            works = [
                work_of(plan, layer, rank, (count,) * plan.world_size, precision) for count in rows
            ]
            known = points.setdefault(works[0].key, {})
            for count in _ladder([work.rows for work in works]):
                if count not in known:
                    known[count] = modules.measured(layer, rank, count)
    return tuple(
        Workspace(
            key=key,
            precision=precision,
            points=tuple((count, *needed) for count, needed in sorted(known.items())),
        )
        for key, known in points.items()
    )


def _ladder(rows: Sequence[int]) -> list[int]:
    """These numbers of rows, and the powers of two below the largest."""
    return sorted({*rows, *(2**power for power in range(max(rows).bit_length()))} - {0})


class _Modules:
    """The layers of a plan, as its ranks have them."""

    def __init__(self, plan: Plan, device: torch.device, dtype: torch.dtype) -> None:
        self.plan, self.device, self.dtype = plan, device, dtype

    @cached_property
    def _root(self) -> nn.Module:
        return build_fake(self.plan.graph.source)

    @cached_property
    def _innermost(self) -> set[str]:
        return _with_channels_innermost(self._root, self.plan.graph)

    def measured(self, layer: Layer, rank: int, rows: int) -> Needed:
        """Runs a layer forward and backward as a rank has it, with so many rows."""
        flow = self.plan.flow
        read, given = flow.inputs[layer.name], flow.outputs[layer.name]
        shape = local_shape(layer.input_shape, read, rank % read.group_size)
        out = local_shape(layer.output_shape, given, rank % given.group_size)
        if 0 in (*shape, *out):
            return Needed(0, 0, 0)
        x = torch.ones(rows, *shape, dtype=self.dtype, device=self.device)
        if layer.kind == "linear":
            linear = nn.Linear(shape[-1], out[-1], device=self.device, dtype=self.dtype)
            return _needed(linear, x.requires_grad_())
        return self._of_convolution(layer, rank, x)

    def _of_convolution(self, layer: Layer, rank: int, x: Tensor) -> Needed:
        """Runs a convolution on its local input [rows, channels, height, width]."""
        flow, graph = self.plan.flow, self.plan.graph
        weight = (graph[layer.shared] if layer.shared else layer).weights[0]
        path = weight.name.rpartition(".")[0]
        whole = self._root.get_submodule(path)
        assert isinstance(whole, nn.Conv2d)
        out, per_group, *_ = flow.weights[weight.name].piece_shape(rank)
        channels = x.shape[1]
        module = nn.Conv2d(
            channels,
            out,
            whole.kernel_size,  # type: ignore[arg-type]  # a pair, which its type does not say
            whole.stride,  # type: ignore[arg-type]
            whole.padding,  # type: ignore[arg-type]
            whole.dilation,  # type: ignore[arg-type]
            channels // per_group,
            whole.bias is not None,
            whole.padding_mode,
            self.device,
            self.dtype,
        )
        if path in self._innermost:
            x = x.contiguous(memory_format=torch.channels_last)
        return _needed(module, x.requires_grad_())


def _needed(module: nn.Module, x: Tensor) -> Needed:
    if x.device.type == "cuda":  # cuBLAS keeps what it takes first, of each thread
        torch.autograd.grad(module(x).sum(), (x, *module.parameters()))
    y, forward = _beside(x.device, lambda: [module(x)])
    grads = [torch.ones_like(y[0])]
    _, of_input = _beside(x.device, lambda: torch.autograd.grad(y, x, grads, retain_graph=True))
    weights = list(module.parameters())
    _, of_weights = _beside(x.device, lambda: torch.autograd.grad(y, weights, grads))
    return Needed(forward, of_input, of_weights)


def _beside(
    device: torch.device, call: Callable[[], Sequence[Tensor]]
) -> tuple[Sequence[Tensor], int]:
    """(the tensors that a call gives, the bytes at its peak beside them)."""
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    meter = PeakMeter(device)
    meter.start()
    given = call()
    peak = meter.stop().peak_bytes - before
    return given, max(0, peak - sum(tensor.nbytes for tensor in given))


def _with_channels_innermost(root: nn.Module, graph: Graph) -> set[str]:
    """The paths of convolutions whose images lie with their channels innermost, as ConvNeXt's.

    The model runs once on fake tensors, which have no values.
    """
    mode, found = FakeTensorMode(), set[str]()

    def fake(tensor: Tensor) -> Tensor:
        with mode:
            return torch.empty(tensor.shape, dtype=tensor.dtype)

    def note(path: str, given: tuple[Any, ...]) -> None:
        if not given[0].is_contiguous() and given[0].is_contiguous(
            memory_format=torch.channels_last
        ):
            found.add(path)

    model = with_tensors(root, fake)
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(lambda _, given, path=path: note(path, given))
    rows = max(2, graph.least_batch)
    with mode, torch.no_grad():
        batch = [
            torch.empty(rows, *one.shape, dtype=TORCH_DTYPES[one.dtype]) for one in graph.inputs
        ]
        called_whole(model, graph.inputs, batch)
    return found
