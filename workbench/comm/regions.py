"""Differentiable crossings between placements.

One convention for the whole library: a gradient is that of the one logical loss. The gradient of
a replicated tensor is replicated, and complete on every rank; that of a cut tensor is its piece;
that of a summand is that of the sum. Where the users of a replicated tensor differ by rank, each
rank knows only a summand of the gradient (Partial), and the crossing adds them up. Under it

    crossing            value                    forward         gradient                 backward
    copy_to             Replicate -> Replicate   -               Partial -> Replicate     all-reduce
    gather_from         Shard -> Replicate       all-gather      Replicate -> Shard       slice
      gradient=partial                                           Partial -> Shard         red.-scat.
    reduce_from         Partial -> Replicate     all-reduce      Replicate -> Replicate   -
      gradient=partial                                           Partial -> Replicate     all-reduce
    scatter_to          Replicate -> Shard       slice           Shard -> Replicate       all-gather
    reduce_scatter_to   Partial -> Shard         red.-scat.      Shard -> Replicate       all-gather
    exchange            Shard -> Shard'          all-to-all      Shard' -> Shard          all-to-all

`gradient="partial"` folds a following `copy_to` into the crossing.

`torch.distributed.nn` follows another convention (the ranks' losses are summed: its all-reduce is
its own backward); mixing the two scales gradients by the group's size.

Source: the names follow Megatron-LM's tensor_parallel/mappings.py, whose f and g (Shoeybi et al.
2019, arXiv:1909.08053, sec. 3) are copy_to and reduce_from. Unequal pieces are ours.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from workbench.comm.all_reduce import all_reduce
from workbench.comm.collectives import all_gather, all_to_all, reduce_scatter
from workbench.comm.groups.group import Group
from workbench.plan.placement.placement import Shard

GradientPlacement = Literal["replicate", "partial"]


def copy_to(x: Tensor, group: Group, *, layer: str = "") -> Tensor:
    """Hands a replicated x to computations that differ by rank; its gradient is summed.

    Args:
        x: the tensor, of one shape and the same values on all ranks.
        group: the ranks that hold it.
        layer: the layer under which the all-reduce of the gradient is recorded.

    Raises:
        CommError: in backward, other ranks did not come, or came for something else.
    """
    return _CopyTo.apply(x, group, layer)


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, layer: str) -> Tensor:
        ctx.group, ctx.layer = group, layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_reduce(grad, ctx.group, layer=ctx.layer, phase="backward"), None, None


def gather_from(
    x: Tensor,
    shard: Shard,
    group: Group,
    *,
    gradient: GradientPlacement = "replicate",
    layer: str = "",
) -> Tensor:
    """Makes whole, on every rank, a tensor of which x is this rank's piece.

    Args:
        x: this rank's piece [..., shard.sizes[rank], ...].
        shard: how the tensor is cut over the group.
        group: the ranks that hold its pieces.
        gradient: whether the gradient of the whole is complete on every rank, or "partial": each
            rank has a summand of it.
        layer: the layer under which the collectives are recorded.

    Raises:
        ValueError: `shard` fits neither x nor the group.
        CommError: other ranks did not come, or came for something else; in backward, too.
    """
    return _GatherFrom.apply(x, shard, group, gradient, layer)


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shard: Shard, group: Group, gradient: GradientPlacement, layer: str
    ) -> Tensor:
        ctx.shard, ctx.group, ctx.gradient, ctx.layer = shard, group, gradient, layer
        return all_gather(x, shard, group, layer=layer, phase="forward")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        if ctx.gradient == "replicate":
            piece = _slice(grad, ctx.shard, ctx.group)
        else:
            piece = reduce_scatter(grad, ctx.shard, ctx.group, layer=ctx.layer, phase="backward")
        return piece, None, None, None, None


def reduce_from(
    x: Tensor, group: Group, *, gradient: GradientPlacement = "replicate", layer: str = ""
) -> Tensor:
    """Sums, for every rank, a tensor of which x is this rank's summand.

    Args:
        x: this rank's summand, of one shape on all ranks.
        group: the ranks that sum.
        gradient: whether the gradient of the sum is complete on every rank, or "partial": each
            rank has a summand of it.
        layer: the layer under which the collectives are recorded.

    Raises:
        CommError: other ranks did not come, or came for something else; in backward, too.
    """
    return _ReduceFrom.apply(x, group, gradient, layer)


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, gradient: GradientPlacement, layer: str
    ) -> Tensor:
        ctx.group, ctx.gradient, ctx.layer = group, gradient, layer
        return all_reduce(x, group, layer=layer, phase="forward")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.gradient == "partial":
            grad = all_reduce(grad, ctx.group, layer=ctx.layer, phase="backward")
        return grad, None, None, None


def scatter_to(x: Tensor, shard: Shard, group: Group, *, layer: str = "") -> Tensor:
    """Takes this rank's piece [..., shard.sizes[rank], ...] of a replicated x.

    Args:
        x: the tensor [..., shard.extent, ...], with the same values on all ranks.
        shard: how it is cut over the group.
        group: the ranks that hold its pieces.
        layer: the layer under which the all-gather of the gradient is recorded.

    Raises:
        CommError: in backward, other ranks did not come, or came for something else.
    """
    return _ScatterTo.apply(x, shard, group, layer)


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Shard, group: Group, layer: str) -> Tensor:
        ctx.shard, ctx.group, ctx.layer = shard, group, layer
        return _slice(x, shard, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        whole = all_gather(grad, ctx.shard, ctx.group, layer=ctx.layer, phase="backward")
        return whole, None, None, None


def reduce_scatter_to(x: Tensor, shard: Shard, group: Group, *, layer: str = "") -> Tensor:
    """Takes this rank's piece [..., shard.sizes[rank], ...] of the sum of all ranks' x.

    Args:
        x: this rank's summand [..., shard.extent, ...].
        shard: how the sum is cut over the group.
        group: the ranks that sum.
        layer: the layer under which the collectives are recorded.

    Raises:
        ValueError: `shard` fits neither x nor the group.
        CommError: other ranks did not come, or came for something else; in backward, too.
    """
    return _ReduceScatterTo.apply(x, shard, group, layer)


class _ReduceScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Shard, group: Group, layer: str) -> Tensor:
        ctx.shard, ctx.group, ctx.layer = shard, group, layer
        return reduce_scatter(x, shard, group, layer=layer, phase="forward")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        whole = all_gather(grad, ctx.shard, ctx.group, layer=ctx.layer, phase="backward")
        return whole, None, None, None


def exchange(x: Tensor, source: Shard, target: Shard, group: Group, *, layer: str = "") -> Tensor:
    """Turns this rank's piece under `source` into its piece under `target`.

    Args:
        x: this rank's piece [..., source.sizes[rank], ...].
        source: how the tensor is cut over the group.
        target: how it is to be cut, along this or another dimension.
        group: the ranks that hold its pieces.
        layer: the layer under which the collectives are recorded.

    Raises:
        ValueError: `source` or `target` fits neither x nor the group.
        CommError: other ranks did not come, or came for something else; in backward, too.
    """
    return _Exchange.apply(x, source, target, group, layer)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, source: Shard, target: Shard, group: Group, layer: str
    ) -> Tensor:
        ctx.source, ctx.target, ctx.group, ctx.layer = source, target, group, layer
        return all_to_all(x, source, target, group, layer=layer, phase="forward")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        back = all_to_all(
            grad, ctx.target, ctx.source, ctx.group, layer=ctx.layer, phase="backward"
        )
        return back, None, None, None, None


def _slice(x: Tensor, shard: Shard, group: Group) -> Tensor:
    """Returns this rank's piece of x, in memory of its own."""
    return x.narrow(shard.dim, *shard.span(group.rank)).clone(memory_format=torch.contiguous_format)
