"""The all-gather that is under way while its caller computes on what came before."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.comm.collectives import reduce_scatter
from workbench.comm.groups.group import Call, Group
from workbench.comm.groups.watch import Work
from workbench.comm.pieces import cut, lengths, resized, shaped
from workbench.comm.regions import Gradient
from workbench.plan.placement import Shard


class PendingGather:
    """An all-gather of rows under way."""

    def __init__(
        self, call: Call, flat: Tensor, shape: tuple[int, ...], rows: Shard, works: list[Work]
    ) -> None:
        self.call, self.rows = call, rows
        self._flat, self._shape, self._works = flat, shape, works

    def wait(self) -> Tensor:
        """The whole tensor, once it is there; only this time counts as blocked.

        Raises:
            CommError: as for a collective that blocks.
        """
        link = self.call.group.link
        if link is not None:
            with self.call.timed():
                link.wait(self._works, self.call)
        return shaped(self._flat, self._shape)


@torch.no_grad()
def start_all_gather(x: Tensor, rows: Shard, group: Group, *, layer: str = "") -> PendingGather:
    """Starts to gather rows, of which x are this rank's, on all ranks of the group.

    All ranks start them in one order, and take them in any. What travels is what `all_gather`
    sends, and is recorded as that.

    Args:
        x: [own rows, ...].
        rows: how many each rank of the group has.
        group: who gathers.
        layer: the label in the record.
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


def take_gathered(x: Tensor, pending: PendingGather, gradient: Gradient) -> Tensor:
    """The result of `start_all_gather(x, ...)`, as `gather_from` would have given it."""
    return _Take.apply(x, pending, gradient)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pending: PendingGather, gradient: Gradient) -> Tensor:
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
