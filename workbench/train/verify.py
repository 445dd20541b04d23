"""Holds one rank of the split model against what one process computed."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from workbench.comm.world import Seat, World
from workbench.model.slices import WeightsFile
from workbench.plan.experiment import Experiment
from workbench.plan.placement import Replicate, Shard
from workbench.train.objective import own_rows
from workbench.train.reference import write_reference
from workbench.train.state import RankState, group_specs_of
from workbench.train.verification import Difference

__all__ = ["compare", "write_reference"]

# A gradient counts as no smaller than this part of the largest in the model.
FLOOR = 1e-3
PART = 2**22  # elements
# Buffers that differ by rank where batch norm is local.
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def compare(
    seat: Seat, experiment: Experiment, *, weights: Path, reference: Path
) -> list[Difference]:
    """Trains this rank's part from the same weights on the same data, and compares.

    Args:
        seat: where this rank sits.
        experiment: as `write_reference` had it.
        weights: the weights that it started from.
        reference: the entries that `write_reference` wrote.

    Returns:
        One difference for each output, and for each gradient, weight and buffer held here.
    """
    whole = WeightsFile(reference)
    with World.open(seat) as world:
        groups = world.groups(group_specs_of(experiment.plan))
        state = RankState.start(experiment, world, groups, weights, None)
        found: list[Difference] = []
        for step in range(experiment.steps):
            result = state.stepper.run(step)
            if step == 0:
                found += _outputs(state, result.outputs, whole)
                found += _gradients(state, whole)
            state.strategy.update(step)
        return found + _values(state, whole)


def _outputs(state: RankState, outputs: tuple[Tensor, ...], whole: WeightsFile) -> list[Difference]:
    model, rank = state.model, state.world.rank
    rows = Shard(0, model.context.rows)
    found = []
    for index, name in enumerate(model.plan.graph.outputs):
        with torch.no_grad():
            mine = own_rows(model, name, outputs[index])
        entry = f"output/{index}"
        scale = _scale(whole, entry)
        error = _error(mine, whole.read(entry, rows, rank), scale)
        found.append(Difference("output", name, rank, error, _rounding(whole, entry, scale)))
    return found


def _gradients(state: RankState, whole: WeightsFile) -> list[Difference]:
    found = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in state.model.trainable().items()
    }
    return _compared(state, whole, "gradient", found, FLOOR)


def _values(state: RankState, whole: WeightsFile) -> list[Difference]:
    local = state.experiment.plan.batch_norm == "local"
    weights, buffers = {}, {}
    for name, piece in state.model.pieces().items():
        if isinstance(piece, nn.Parameter):
            weights[name] = piece.detach()
        elif not (local and name.endswith(STATISTICS)):
            buffers[name] = piece
    found = _compared(state, whole, "weight", weights, 1.0)
    return found + _compared(state, whole, "buffer", buffers, 1.0)


def _compared(
    state: RankState, whole: WeightsFile, what: str, pieces: Mapping[str, Tensor], floor: float
) -> list[Difference]:
    """This rank's pieces of one kind against the slices of the whole tensors.

    A tensor counts as no smaller than `floor` times the largest of its kind in the model.
    """
    scales = {name: _scale(whole, f"{what}/{name}") for name in pieces}
    least = floor * max(scales.values(), default=0.0)
    found, rank = [], state.world.rank
    for name, piece in pieces.items():
        placed = state.model.placements[name]
        cut = None if isinstance(placed.placement, Replicate) else placed.placement
        entry, scale = f"{what}/{name}", max(least, scales[name])
        error = _error(piece, whole.read(entry, cut, rank % placed.group_size), scale)
        found.append(Difference(what, name, rank, error, _rounding(whole, entry, scale)))
    return found


def _scale(whole: WeightsFile, entry: str) -> float:
    return float(whole.read(f"scale/{entry}"))


def _rounding(whole: WeightsFile, entry: str, scale: float) -> float:
    """What rounding alone does to the whole model's tensor, as `_error` measures it."""
    name = f"rounding/{entry}"
    off = float(whole.read(name)) if name in whole.names else 0.0
    return _relative(off, scale)


def _error(mine: Tensor, expected: Tensor, scale: float) -> float:
    """Max |mine - expected| / scale; 0 / 0 is 0, a NaN is infinite."""
    if mine.shape != expected.shape:
        return float("inf")
    off = 0.0
    parts = zip(_parts(mine.detach()), _parts(expected), strict=True)
    for difference in ((a.double().cpu() - b.double()).abs_().max().item() for a, b in parts):
        if difference != difference:
            return float("inf")
        off = max(off, difference)
    return _relative(off, scale)


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """A tensor in parts of a size that can be copied without a thought for memory."""
    return tensor.reshape(-1).split(PART) if tensor.numel() else ()


def _relative(off: float, scale: float) -> float:
    if off == 0.0:
        return 0.0
    return off / scale if off == off and scale > 0 else float("inf")
