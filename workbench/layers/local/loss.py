"""Cross-entropy of logits that lie by rows, by groups, or cut by classes."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.comm.all_reduce import all_reduce
from workbench.comm.collectives import all_gather
from workbench.comm.groups.group import Group
from workbench.plan.experiment.task import CrossEntropy
from workbench.plan.placement.placement import Shard

PLAIN = CrossEntropy(ignore_index=None)
"""Every label is a class, and counts as much as any other."""


def cross_entropy_sum(logits: Tensor, labels: Tensor, options: CrossEntropy = PLAIN) -> Tensor:
    """Returns the sum over labels [] of the cross-entropy; 0 for no rows.

    Args:
        logits: the logits [rows, classes, ...]; half types are computed in fp32.
        labels: the class of each place [rows, ...].
    """
    wide = logits.float() if _half(logits) else logits
    return F.cross_entropy(wide, labels, reduction="sum", **torch_options(options, wide))


def torch_options(options: CrossEntropy, logits: Tensor) -> dict[str, Any]:
    """The same as arguments of `torch.nn.functional.cross_entropy` for these logits."""
    weight = None if options.weight is None else logits.new_tensor(options.weight)
    ignored = {} if options.ignore_index is None else {"ignore_index": options.ignore_index}
    return {"weight": weight, "label_smoothing": options.label_smoothing, **ignored}


def kept_labels(labels: Tensor, options: CrossEntropy) -> Tensor:
    """Returns which labels are not ignored, bool of their shape."""
    if options.ignore_index is None:
        return torch.ones_like(labels, dtype=torch.bool)
    return labels != options.ignore_index


def label_weights(labels: Tensor, options: CrossEntropy) -> Tensor:
    """Returns what each label counts: the weight of its class, in float64; 0 if it is ignored."""
    kept = kept_labels(labels, options).double()
    if options.weight is None:
        return kept
    weight = kept.new_tensor(options.weight)
    return kept * weight[labels.clamp(0, len(weight) - 1)]


def cut_cross_entropy_sum(
    logits: Tensor,
    labels: Tensor,
    classes: Shard,
    group: Group,
    options: CrossEntropy = PLAIN,
    *,
    layer: str = "",
) -> Tensor:
    """Returns the sum over rows of the cross-entropy, each rank holding some classes of each row.

    r = rows of the group, C_g = classes held here

        logits  [r, C_g]     cut by `classes`, cross-entropy's gradient needs no communication
        labels  [r]          replicated
        loss    []           replicated

        forward    max over classes, then sum of exponents, label's logit, and of smoothed labels
                   the weighted sum of logits: one all-gather of r elements and one all-reduce of
                   2 r or 3 r
        backward   softmax - one-hot, local

    With weights w, of which that of an ignored label y is 0, and smoothing e over C classes, the
    loss of a label is a (log sum exp z - z_y) + b (W log sum exp z - sum w z). There a = (1 - e)
    w_y, W = sum w, and b = e / C, or 0 where y is ignored.

    Args:
        logits: this rank's logits of all rows; half types are computed in fp32.
        labels: the class of each row, the same on all ranks.

    Raises:
        CommError: other ranks did not come, or came for something else.

    Source: Shoeybi et al. 2019 (arXiv:1909.08053, sec. 3); unequal pieces are ours.
    """
    wide = logits.float() if _half(logits) else logits
    return _CutCrossEntropy.apply(wide, labels, classes, group, options, layer)


def _half(logits: Tensor) -> bool:
    return logits.dtype in (torch.bfloat16, torch.float16)


def highest_class(logits: Tensor, classes: Shard, group: Group, *, layer: str = "") -> Tensor:
    """Returns the class of the highest logit of each row [rows], the same on all ranks.

    Of equal ones it is the first. Every rank gives its own highest logit of each row, and its
    class: two all-gathers of r elements for r rows.

    Args:
        logits: this rank's logits of all rows [rows, classes held here].

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
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        classes: Shard,
        group: Group,
        options: CrossEntropy,
        layer: str,
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
        parts = [exponents.sum(dim=1), at_label]
        spread = _Spread.of(options, labels, logits, classes, first)
        if spread.smooths:
            parts.append(logits @ spread.weight)
        sums = all_reduce(torch.stack(parts), group, layer=layer)
        ctx.save_for_backward(exponents, sums[0], local, mine)
        ctx.spread = spread
        log = sums[0].log() + highest
        found = spread.at_label * (log - sums[1])
        if spread.smooths:
            found = found + spread.over_all * (spread.total * log - sums[2])
        return torch.where(spread.counts, found, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        exponents, total, local, mine = ctx.saved_tensors
        spread: _Spread = ctx.spread
        scale = spread.at_label + spread.over_all * spread.total
        dlogits = exponents * (scale * grad / total)[:, None]
        if dlogits.shape[1]:
            if spread.smooths:
                dlogits.addr_(spread.over_all * grad, spread.weight, alpha=-1)
            at_label = spread.at_label * -mine.to(dlogits.dtype) * grad
            dlogits.scatter_add_(1, local[:, None], at_label[:, None])
        return dlogits, None, None, None, None, None


@dataclass(frozen=True)
class _Spread:
    """How much of each label lies at its class, and how much over all of them.

    Attributes:
        counts: whether a label counts [r].
        at_label: the weight of a label at its own class [r].
        over_all: the weight of a label at every class, which the class's own multiplies [r].
        weight: the weights of the classes that are held here [C_g]; where nothing smooths, none.
    """

    counts: Tensor
    at_label: Tensor
    over_all: Tensor
    weight: Tensor
    total: float
    smooths: bool

    @classmethod
    def of(
        cls, options: CrossEntropy, labels: Tensor, logits: Tensor, classes: Shard, first: int
    ) -> "_Spread":
        smoothing, extent = options.label_smoothing, classes.extent
        counts, weight = kept_labels(labels, options), logits.new_empty(0)
        if smoothing > 0:  # else nothing as long as the classes is made in a step
            ones = logits.new_ones(logits.shape[1])
            held = (options.weight or ())[first : first + logits.shape[1]]
            weight = ones if options.weight is None else logits.new_tensor(held)
        return cls(
            counts,
            (1 - smoothing) * label_weights(labels, options).to(logits.dtype),
            smoothing / extent * counts.to(logits.dtype),
            weight,
            float(extent) if options.weight is None else sum(options.weight),
            smoothing > 0,
        )
