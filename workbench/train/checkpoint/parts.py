"""Which pieces of a run each rank writes into a checkpoint."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from workbench.layers.cut_model import CutModel
from workbench.model.pieces import Piece
from workbench.plan.experiment import Optimizer
from workbench.train.checkpoint.in_flight import InFlight
from workbench.train.checkpoint.owners import Holding, assign, holdings
from workbench.train.checkpoint.residuals import Residuals, named, residual_holdings
from workbench.train.strategies.optimizer import Updater, entry, state_names

Part = dict[str, Piece]
"""What one rank writes, by the name of the logical tensor that it is a piece of."""


def parts(
    step: int,
    model: CutModel,
    updater: Updater,
    *,
    in_flight: Sequence[InFlight] = (),
    residuals: Residuals = (),
) -> tuple[Part, tuple[str, ...]]:
    """This rank's part of a checkpoint, and the files that all ranks will write.

    Args:
        step: optimizer updates made so far.
        model: this rank's part; buffers that differ by rank (the statistics of a local batch
            norm) are to be made equal before.
        updater: of its pieces.
        in_flight: what is computed and not yet used, of the same steps on all ranks.
        residuals: what was computed and not yet sent; for as many sums on all ranks.

    Returns:
        Pieces that show live tensors; by rank, the name of its file, "" where it writes none.
    """
    world, rank = model.plan.world_size, model.context.rank
    waiting = {what: pieces for each in in_flight for what, pieces in each.by_age(step).items()}
    every = _all_holdings(model, updater.value) + _waiting_holdings(model, waiting)
    every += residual_holdings(model, len(residuals))
    written = assign(every, world)
    files = tuple(f"rank-{rank:05d}.safetensors" if own else "" for rank, own in enumerate(written))
    tensors = model.pieces() | updater.state({held.name for held in written[rank]})
    tensors |= named(model, residuals)
    for what, pieces in waiting.items():
        tensors |= {what + name: piece for name, piece in pieces.items()}
    return {held.name: _piece(held, tensors[held.name]) for held in written[rank]}, files


def _all_holdings(model: CutModel, value: Optimizer) -> list[Holding]:
    """Every piece of every logical tensor, the same list on all ranks."""
    size, found = model.plan.world_size, []
    for name, placed in model.placements.items():
        found += holdings(name, placed, size)
    for name in model.trainable():
        pieces = holdings(name, model.placements[name], size)
        for state in state_names(value):
            if state == "step":  # one number, known to whoever holds a part of the parameter
                found.append(Holding(entry(state, name), None, 0, 1, pieces[0].holders))
            else:
                found += holdings(entry(state, name), model.placements[name], size)
    return found


def _waiting_holdings(model: CutModel, kinds: Iterable[str]) -> list[Holding]:
    """The same of what is in flight, which lies as the parameters do."""
    size, placements = model.plan.world_size, model.placements
    return [
        holding
        for kind in kinds
        for name in model.trainable()
        for holding in holdings(kind + name, placements[name], size)
    ]


def _piece(held: Holding, tensor: Tensor) -> Piece:
    whole = list(tensor.shape)
    if held.shard is None:
        return Piece(tensor, tuple(whole))
    whole[held.shard.dim] = held.shard.extent
    start, _ = held.shard.span(held.index)
    return Piece(tensor, tuple(whole), held.shard.dim, start, held.shard.blocks)
