"""What one call of a collective brings to each rank, whichever collective it is."""

import math
from functools import partial

import numpy as np

from workbench.plan.layout import ROWS
from workbench.plan.mesh import shard_groups
from workbench.plan.placement import Shard
from workbench.predict.traffic import received
from workbench.predict.traffic.givers import Giver, add_served
from workbench.predict.traffic.received import Received
from workbench.predict.traffic.summing import Summing
from workbench.program.collective_call import CollectiveCall, Exchange, Summed


def received_of(call: CollectiveCall, summing: Summing) -> Received:
    """Messages and bytes on each rank, were all to take part.

    Args:
        call: of all ranks.
        summing: knows what all-reduces bring.
    """
    numel, width = call.numel, call.itemsize
    if isinstance(call.how, Exchange):
        return _exchanged(call.how, width)
    groups = call.groups(len(numel))
    match call.op:
        case "all_gather":
            return received.all_gather(numel * width, groups)
        case "reduce_scatter":
            return received.reduce_scatter(numel * width, groups)
        case "all_reduce" if isinstance(call.how, Summed):
            algorithm, buffer, codec = call.how
            return summing.started(numel, groups, width, algorithm, buffer=buffer, codec=codec)
        case "all_reduce":
            return summing.waited_for(numel, groups, width)
        case _:
            return _rooted(call)


def _rooted(call: CollectiveCall) -> Received:
    """All gradients to the server of each piece, or all weights back."""
    assert call.server is not None
    groups = call.groups(len(call.numel))
    there = np.ones_like(call.numel) if call.takes is None else call.takes
    serves, size = (call.server > 0) & (there > 0), call.numel * call.itemsize
    up = call.op == "reduce"
    often = (len(groups[0]) - 1) * serves if up else there * ~serves
    return Received(often, often * size, (partial(add_served, serves, size, groups, up=up),))


def _exchanged(exchange: Exchange, itemsize: int) -> Received:
    """An all-to-all; groups differ in their rows."""
    step, rows = exchange.step, exchange.rows
    messages, bytes_ = np.zeros_like(rows.own), np.zeros_like(rows.own)
    givers: tuple[Giver, ...] = ()
    for members in shard_groups(step.group_size, rows.world_size):
        own = Shard(0, tuple(int(rows.own[rank]) * step.rows for rank in members))
        ends = (exchange.source, exchange.target)
        before, after = (own if layout == ROWS else layout.placement for layout in ends)
        assert isinstance(before, Shard)
        assert isinstance(after, Shard)
        lengths = (own.extent, *step.shape)
        rest = math.prod(n for d, n in enumerate(lengths) if d not in (before.dim, after.dim))
        slabs = np.full_like(rows.own, rest * itemsize)
        got = received.all_to_all(slabs, before, after, [members])
        messages, bytes_ = messages + got.messages, bytes_ + got.bytes
        givers += got.givers
    return Received(messages, bytes_, givers)
