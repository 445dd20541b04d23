"""Makes the running statistics of local batch norms one, before anybody else reads them."""

import torch

from workbench.comm.collectives import all_reduce
from workbench.layers.batch_norm import LocalBatchNorm
from workbench.layers.cut_model import CutModel


def average_statistics(model: CutModel) -> None:
    """Gives all ranks that hold the same channels the world's running means and variances.

    Under `batch_norm="local"` each rank has seen other rows, and keeps statistics of its own. The
    world's are what one process would keep that normalizes the ranks' rows apart: in every
    training pass (a micro-batch) they move by the mean over the parts, each weighted by its
    rows, and `num_batches_tracked` counts the pass once. So a part's variance is weighted, not
    the distance between its mean and the others': as under torch's DDP, that is no part of it.

    When this is called changes nothing but the rounding: a run that is resumed, or re-cut, goes on
    as one that is left alone, and to the bit as one that has saved after the same steps. Where
    nothing was seen since the last call, in eval mode, and with "synchronized", nothing moves.

    Every rank calls it after the same step.
    """
    pieces = model.pieces()
    with torch.no_grad():
        for path, norm in model.traced.named_modules():
            share = norm.share if isinstance(norm, LocalBatchNorm) else None
            if share is None or share.value is None:
                continue
            apart = model.plan.world_size // share.group_size
            for name in (f"{path}.running_mean", f"{path}.running_var"):
                if apart == 1 or name not in pieces:
                    continue
                placed = model.placements[name]
                group = model.replica_group(placed.group_size)
                # Of the ranks that hold this piece, as many as this have seen the same rows.
                alike = share.group_size // placed.group_size
                part = pieces[name] * (share.value / alike)
                pieces[name].copy_(all_reduce(part, group, layer="statistics"))
            share.value = None
