"""What encodings have left out so far, as a checkpoint keeps it.

With error feedback a rank holds a residual of every gradient that it sends. A checkpoint holds

    residual/<use>/<replica>/<parameter>

as logical tensors, cut as the parameters are, one for each set of ranks that together hold the
whole model: under the plan that it was saved under, each rank goes on with its own. Under another
one, of a checkpoint or of a re-cut, residuals are added up or begin at zero, so that what is held
back in total is the same. Where several sums of gradients take turns, `use` counts them in the
order of their next turns.
"""

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from workbench.layers.cut_model import CutModel
from workbench.model.slices import PieceSet
from workbench.plan.placement import Shard
from workbench.train.checkpoint.owners import Holding, holdings
from workbench.train.reshard.reshard import Pieces

RESIDUAL = "residual/"
_ENTRY = re.compile(RESIDUAL + r"(\d+)/(\d+)/(.+)")

Residuals = Sequence[Mapping[str, Tensor]]
"""For each sum of gradients, this rank's pieces by parameter, where they lie."""


def residual_holdings(model: CutModel, uses: int) -> list[Holding]:
    """Every piece, the same list on all ranks."""
    size, found = model.plan.world_size, []
    for name in model.trainable():
        k = model.placements[name].group_size
        replicas = size // k
        for piece in holdings(name, model.placements[name], size) if replicas > 1 else ():
            for use in range(uses):
                for replica in range(replicas):
                    holders = tuple(rank for rank in piece.holders if rank // k == replica)
                    entry = residual_entry(use, replica, name)
                    found.append(Holding(entry, piece.shard, piece.index, piece.elements, holders))
    return found


def named(model: CutModel, residuals: Residuals) -> dict[str, Tensor]:
    """This rank's pieces by the names of their logical tensors."""
    return {
        residual_entry(use, _replica(model, name), name): piece
        for use, pieces in enumerate(residuals)
        for name, piece in pieces.items()
    }


@torch.no_grad()
def restore_residuals(reader: PieceSet | Pieces, model: CutModel, residuals: Residuals) -> None:
    """Adds what a checkpoint or a re-cut brings to this rank's residuals, if it keeps some."""
    for stored in reader.names:
        match = _ENTRY.fullmatch(stored)
        if match is None or not residuals:
            continue
        use, replica, name = int(match[1]), int(match[2]), match[3]
        placed = model.placements[name]
        replicas = model.plan.world_size // placed.group_size
        mine = residuals[use % len(residuals)].get(name)
        if mine is not None and replica % replicas == _replica(model, name):
            shard = placed.placement if isinstance(placed.placement, Shard) else None
            index = model.context.rank % placed.group_size
            mine.add_(reader.read(stored, shard, index).view_as(mine).to(mine.device))


def residual_entry(use: int, replica: int, name: str) -> str:
    """The name of the logical tensor of one sum, one set of ranks and one parameter."""
    return f"{RESIDUAL}{use}/{replica}/{name}"


def _replica(model: CutModel, name: str) -> int:
    """Which of the sets of ranks that hold a whole parameter this rank is in."""
    return model.context.rank // model.placements[name].group_size
