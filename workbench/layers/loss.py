"""Cross-entropy of logits that lie by rows, by groups, or cut by classes."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.comm.all_reduce import all_reduce
from workbench.comm.collectives import all_gather
from workbench.comm.groups.group import Group
from workbench.plan.placement.placement import Shard


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the sum over labels [] of the cross-entropy; 0 for no rows.

    Args:
        logits: the logits [rows, classes, ...]; half types are computed in fp32.
        labels: the class of each place [rows, ...].
    """
    return F.cross_entropy(logits.float() if _half(logits) else logits, labels, reduction="sum")


def cut_cross_entropy_sum(
    logits: Tensor, labels: Tensor, classes: Shard, group: Group, *, layer: str = ""
) -> Tensor:
    """Returns the sum over rows of the cross-entropy, each rank holding some classes of each row.

    r = rows of the group, C_g = classes held here

        logits  [r, C_g]     cut by `classes`, cross-entropy's gradient needs no communication
        labels  [r]          replicated
        loss    []           replicated

        forward    max over classes, then sum of exponents and label's logit: one all-gather
                   and one all-reduce of 2 r elements
        backward   softmax - one-hot, local

    Args:
        logits: this rank's logits of all rows; half types are computed in fp32.
        labels: the class of each row, the same on all ranks.
        classes: how the classes are cut over the group.
        group: the ranks that hold classes of these rows.
        layer: the layer under which traffic is recorded.

    Raises:
        CommError: other ranks did not come, or came for something else.

    Source: Shoeybi et al. 2019 (arXiv:1909.08053, sec. 3); unequal pieces are ours.
    """
    wide = logits.float() if _half(logits) else logits
    return _CutCrossEntropy.apply(wide, labels, classes, group, layer)


def _half(logits: Tensor) -> bool:
    return logits.dtype in (torch.bfloat16, torch.float16)


def highest_class(logits: Tensor, classes: Shard, group: Group, *, layer: str = "") -> Tensor:
    """Returns the class of the highest logit of each row [rows], the same on all ranks.

    Of equal ones it is the first. Every rank gives its own highest logit of each row, and its
    class: two all-gathers of r elements for r rows.

    Args:
        logits: this rank's logits of all rows [rows, classes held here].
        classes: how the classes are cut over the group.
        group: the ranks that hold classes of these rows.
        layer: the layer under which traffic is recorded.

    Raises:
        CommError: other ranks did not come, or came for something else.
    """
    first, held = classes.span(group.rank)
    if held:
        own, place = logits.max(dim=1)
    else:
        own = logits.new_full((len(logits),), float("-inf"))
        place = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    one = Shard(0, (1,) * group.size)
    values = all_gather(own[None], one, group, layer=layer)
    places = all_gather((place + first)[None], one, group, layer=layer)
    best = values == values.max(dim=0).values
    return places.masked_fill(~best, classes.extent).min(dim=0).values


class _CutCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, classes: Shard, group: Group, layer: str
    ) -> Tensor:
        first, held = classes.span(group.rank)
        lowest = logits.new_full((len(logits),), float("-inf"))
        own = logits.max(dim=1).values if held else lowest
        every = all_gather(own[None], Shard(0, (1,) * group.size), group, layer=layer)
        highest = every.max(dim=0).values
        exponents = (logits - highest[:, None]).exp_()
        local = (labels - first).clamp(0, max(held - 1, 0))
        mine = (labels >= first) & (labels < first + held)
        at_label = (
            torch.where(mine, logits.gather(1, local[:, None])[:, 0], 0.0)
            if held
            else torch.zeros_like(highest)
        )
        sums = all_reduce(torch.stack([exponents.sum(dim=1), at_label]), group, layer=layer)
        ctx.save_for_backward(exponents, sums[0], local, mine)
        return (sums[0].log() + highest - sums[1]).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        exponents, total, local, mine = ctx.saved_tensors
        dlogits = exponents * (grad / total)[:, None]
        if dlogits.shape[1]:
            dlogits.scatter_add_(1, local[:, None], (-mine.to(dlogits.dtype) * grad)[:, None])
        return dlogits, None, None, None, None
