"""The all-reduce that its caller waits for, out of place."""

import torch
from torch import Tensor

from workbench.comm import shared
from workbench.comm.course import begin
from workbench.comm.group import Group
from workbench.comm.over_hosts import sum_over_hosts
from workbench.comm.pieces import accumulator, shaped
from workbench.comm.record import Phase
from workbench.plan.all_reduce import Algorithm

# The first portion is on the wire soon, and the last, for which nothing is left to do, is small.
PORTION_BYTES = 2**22


@torch.no_grad()
def all_reduce(
    x: Tensor,
    group: Group,
    *,
    algorithm: Algorithm = "auto",
    layer: str = "",
    phase: Phase = "step",
) -> Tensor:
    """Sums all ranks' x on every rank, where the sums have the same bits.

    Args:
        x: of one shape and dtype on all ranks.
        group: who sums.
        algorithm: who sums what, and what travels. "direct" and "hierarchical" go through the
            memory that ranks of a host share; the others through torch's communicators, even
            there.
        layer: labels the record, like `phase`.
        phase: of the step.

    Raises:
        ValueError: there is no such algorithm.
        CommError: other ranks did not come, or came for something else.
    """
    call, link = group.call("all_reduce", layer, phase), group.link
    name = group.chosen(algorithm, x.nbytes, beside=False)
    with call.timed():
        if link is None:
            return shaped(x.reshape(-1).clone(), x.shape)
        if link.staging is not None and name in ("direct", "hierarchical"):
            call.count_two_rounds(x.numel(), x.itemsize, group.rank, group.size)
            return shared.all_reduce(x, link.staging, call)
        wide = accumulator(x.dtype) if name == "backend" else x.dtype
        flat = torch.empty(x.numel(), dtype=wide, device=link.device)
        flat.view(x.shape).copy_(x)
        if name == "hierarchical":
            sum_over_hosts(flat, link, call, PORTION_BYTES)
        else:
            begin(name, flat, link, call).wait()
        return shaped(flat.to(x.device, x.dtype), x.shape)
