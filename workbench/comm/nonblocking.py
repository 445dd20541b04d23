"""Reduce, broadcast and all-gather that run while their callers compute on.

All messages of one are under way at the same time, and so are several collectives: what the
connection of a root can take is the only limit. Of n bytes on p ranks

    reduce       the root receives (p - 1) n, and adds in rank order (half types in fp32)
    broadcast    every other rank receives n, all of which the root sends
    all-gather   every rank receives the other ranks' rows, as from `collectives.all_gather`

in one round each, through torch's communicators, also where ranks share memory.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.comm.algorithms.executor import RoundExecutor
from workbench.comm.collectives import reduce_scatter
from workbench.comm.groups.group import Group, GroupCall
from workbench.comm.messages.flat import (
    MessageRound,
    MessageRounds,
    added,
    blocks,
    cut,
    lengths,
    resized,
    shaped,
)
from workbench.comm.messages.waiting import AsyncWork
from workbench.comm.pending import Pending
from workbench.comm.regions import GradientPlacement
from workbench.plan.placement.placement import Shard


def start_reduce(flat: Tensor, root: int, group: Group, *, layer: str = "") -> Pending:
    """Starts to sum `flat` [elements] in place on one rank; the others' tensors stay as they are.

    All ranks leave theirs alone until they have waited, and start what they start in one order.

    Raises:
        ValueError: `root` is no index of the group.
    """
    return _start("reduce", flat, root, group, layer)


def start_broadcast(flat: Tensor, root: int, group: Group, *, layer: str = "") -> Pending:
    """Starts to copy `flat` [elements] of one rank over those of the others.

    All ranks leave theirs alone until they have waited, and start what they start in one order.

    Args:
        flat: what is sent, and where it goes on the others; contiguous and one-dimensional.

    Raises:
        ValueError: `root` is no index of the group.
    """
    return _start("broadcast", flat, root, group, layer)


def _start(op: str, flat: Tensor, root: int, group: Group, layer: str) -> Pending:
    if not 0 <= root < group.size:
        raise ValueError(
            f"the root of a {op} in group {group.name} must be one of 0..{group.size - 1}, "
            f"got {root}"
        )
    flat = flat.detach()
    call, link = group.call(op, layer, "step"), group.link
    if link is None:
        return Pending(call, None)
    travelling = flat.to(link.device)
    others = [index for index in range(group.size) if index != root]
    rounds = _reduce if op == "reduce" else _broadcast
    executor = RoundExecutor(rounds(travelling, root, others, group.rank), call)
    pending = Pending(call, executor, None if travelling is flat else (flat, travelling))
    link.watch.also(pending.poll)
    return pending


def _reduce(flat: Tensor, root: int, others: Sequence[int], me: int) -> MessageRounds:
    if me != root:
        yield MessageRound(sends=((root, flat),))
        return
    arrived = cut(flat.new_empty(len(others) * len(flat)), [len(flat)] * len(others))
    additions = len(others) * len(flat)
    yield MessageRound(receives=tuple(zip(others, arrived, strict=True)), additions=additions)
    parts = [*arrived[:root], flat, *arrived[root:]]
    for block in blocks(flat):
        flat[block] = added([part[block] for part in parts])


def _broadcast(flat: Tensor, root: int, others: Sequence[int], me: int) -> MessageRounds:
    if me == root:
        yield MessageRound(sends=tuple((index, flat) for index in others))
    else:
        yield MessageRound(receives=((root, flat),))


class PendingGather:
    """An all-gather of rows under way.

    Args:
        flat: the memory [elements] that it fills.
    """

    def __init__(
        self,
        call: GroupCall,
        flat: Tensor,
        shape: tuple[int, ...],
        rows: Shard,
        works: list[AsyncWork],
    ) -> None:
        self.call, self.rows = call, rows
        self._flat, self._shape, self._works = flat, shape, works

    def wait(self) -> Tensor:
        """Returns the whole tensor, once it is there; only this time counts as blocked.

        Raises:
            CommError: other ranks did not come, or came for something else.
        """
        link = self.call.group.link
        if link is not None:
            with self.call.timed():
                link.wait(self._works, self.call)
        return shaped(self._flat, self._shape)


@torch.no_grad()
def start_all_gather(x: Tensor, rows: Shard, group: Group, *, layer: str = "") -> PendingGather:
    """Starts to gather rows, of which x are this rank's, on all ranks of the group.

    All ranks start their gathers in one order, and take the results in any. What travels is what
    `all_gather` sends, and is recorded as that.

    Args:
        x: this rank's rows [own rows, ...].
    """
    shape = resized(x.shape, 0, rows.extent)
    owned = lengths(shape, 0, rows.sizes)
    call, link = group.call("all_gather", layer, "forward"), group.link
    with call.told("helping"):
        flat = x.new_empty(sum(owned), device=x.device if link is None else link.device)
        parts = cut(flat, owned)
        parts[group.rank].view(x.shape).copy_(x)
        if link is None:
            return PendingGather(call, flat, shape, rows, [])
        call.count(owned, flat.itemsize)
        works = [
            link.begin(dist.broadcast(part, group.ranks[root], link.process_group, async_op=True))
            for root, part in enumerate(parts)
            if len(part) > 0
        ]
    return PendingGather(call, flat, shape, rows, works)


def take_gathered(x: Tensor, pending: PendingGather, gradient: GradientPlacement) -> Tensor:
    """Waits for what `start_all_gather(x, ...)` gathers; as `gather_from`, its backward included.

    Args:
        x: this rank's rows [own rows, ...], as they were when the gather was started.
        gradient: whether the gradient of the result is complete on every rank, or "partial": each
            rank has a summand of it.

    Raises:
        CommError: other ranks did not come, or came for something else.
    """
    return _Take.apply(x, pending, gradient)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pending: PendingGather, gradient: GradientPlacement) -> Tensor:
        ctx.rows, ctx.gradient = pending.rows, gradient
        ctx.group, ctx.layer = pending.call.group, pending.call.key.layer
        return pending.wait().to(x.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.gradient == "partial":
            mine = reduce_scatter(grad, ctx.rows, ctx.group, layer=ctx.layer, phase="backward")
        else:
            mine = grad.narrow(0, *ctx.rows.span(ctx.group.rank)).contiguous()
        return mine, None, None
