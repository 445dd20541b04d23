"""What the kernels of layers take beside their tensors, as torch's allocator sees it.

Each distinct convolution of a plan, and on a GPU each linear layer, runs by itself, forward and
backward, with a meter on. No measurement is repeated, since the allocator sees the same each time.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from workbench.comm.groups.world import RankConfig, World
from workbench.model.build import build_fake, with_tensors
from workbench.model.dtypes import TORCH_DTYPES
from workbench.model.tracing.inputs import called_whole
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.graph.graph import Graph, Layer
from workbench.plan.machine.work import Needed, Workspace, local_shape, takes_workspace, work_of
from workbench.plan.plans.plan import Plan
from workbench.train.loop.memory import PeakMeter
from workbench.train.measure.device import DTYPES

Shape = tuple[int, ...]


def workspaces(
    config: RankConfig, experiment: Experiment, *, rows: Sequence[int]
) -> tuple[Workspace, ...]:
    """Measures the layers of one rank of an experiment's plan.

    Args:
        config: the place of this rank.
        experiment: the experiment whose plan and precision are taken.
        rows: the numbers of rows that each rank is given.
    """
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
        plan: the plan.
        ranks: the ranks whose layers are measured.
        rows: the numbers of rows that each rank is given.
        precision: the precision to compute in.
        device: the device that computes.
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
    """The layers of a plan, as its ranks have them.

    Args:
        plan: the plan.
        device: the device that computes.
        dtype: the type to compute in.
    """

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
