"""Makes the running statistics of local batch norms one, before anybody else reads them."""

import torch

from workbench.comm.collectives import all_reduce
from workbench.layers.cut_model import CutModel


def average_statistics(model: CutModel) -> None:
    """Averages running means and variances over the ranks that hold the same channels.

    Under `batch_norm="local"` each rank has seen other rows, and so has its own statistics.
    The average is what evaluation and checkpoints use; with "synchronized" it changes nothing.
    A batch norm in eval mode has the same everywhere, and keeps it.
    """
    pieces, graph = model.pieces(), model.plan.graph
    with torch.no_grad():
        for name, placed in model.placements.items():
            piece = pieces[name]
            if (
                placed.trainable
                or graph[graph.owners[name]].evaluating
                or not piece.is_floating_point()
                or not name.endswith(("running_mean", "running_var"))
            ):
                continue
            group = model.replica_group(placed.group_size)
            if group.size > 1:
                piece.copy_(all_reduce(piece, group, layer="statistics") / group.size)
