"""Holds one rank of the split model against what one process computed."""

from pathlib import Path

import torch
from torch import Tensor
from workbench.model.slices import WeightsFile

from workbench.comm.world import Seat, World
from workbench.plan.experiment import Experiment
from workbench.plan.placement import Replicate, Shard
from workbench.train.objective import own_rows
from workbench.train.reference import write_reference
from workbench.train.state import RankState, group_specs_of
from workbench.train.verification import Difference

__all__ = ["compare", "write_reference"]

# A gradient counts as no smaller than this part of the model's largest entry.
FLOOR = 1e-3
# Buffers that differ by rank where batch norm is local.
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def compare(
    seat: Seat, experiment: Experiment, *, weights: Path, reference: Path
) -> list[Difference]:
    """Trains this rank's part from the same weights on the same data, and compares.

    Args:
        seat: where this rank sits.
        experiment: as `write_reference` had it.
        weights: the initial weights.
        reference: what `write_reference` wrote.

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
            state.optimizer.step()
        return found + _values(state, whole)


def _outputs(state: RankState, outputs: tuple[Tensor, ...], whole: WeightsFile) -> list[Difference]:
    model, rank = state.model, state.world.rank
    rows = Shard(0, model.context.rows)
    found = []
    for index, name in enumerate(model.plan.graph.outputs):
        with torch.no_grad():
            mine = own_rows(model, name, outputs[index])
        entry = f"output/{index}"
        error = _error(mine, whole.read(entry, rows, rank), _scale(whole, entry))
        found.append(Difference("output", name, rank, error))
    return found


def _gradients(state: RankState, whole: WeightsFile) -> list[Difference]:
    entries = [f"gradient/{name}" for name in state.model.trainable()]
    floor = FLOOR * max(_scale(whole, entry) for entry in entries)
    found = []
    for name, parameter in state.model.trainable().items():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found.append(_compared(state, whole, "gradient", name, gradient, floor))
    return found


def _values(state: RankState, whole: WeightsFile) -> list[Difference]:
    local = state.experiment.plan.batch_norm == "local"
    found = []
    for name, piece in state.model.pieces().items():
        if state.model.placements[name].trainable:
            found.append(_compared(state, whole, "weight", name, piece.detach(), 0.0))
        elif not (local and name.endswith(STATISTICS)):
            found.append(_compared(state, whole, "buffer", name, piece, 0.0))
    return found


def _compared(
    state: RankState, whole: WeightsFile, what: str, name: str, piece: Tensor, floor: float
) -> Difference:
    placed, rank = state.model.placements[name], state.world.rank
    cut = None if isinstance(placed.placement, Replicate) else placed.placement
    entry = f"{what}/{name}"
    expected = whole.read(entry, cut, rank % placed.group_size)
    return Difference(what, name, rank, _error(piece, expected, max(floor, _scale(whole, entry))))


def _scale(whole: WeightsFile, entry: str) -> float:
    return float(whole.read(f"scale/{entry}"))


def _error(mine: Tensor, expected: Tensor, scale: float) -> float:
    """Max |mine - expected| / scale; 0 / 0 is 0, a NaN is infinite."""
    if mine.shape != expected.shape:
        return float("inf")
    if mine.numel() == 0:
        return 0.0
    off = (mine.detach().double().cpu() - expected.double()).abs().max().item()
    if off == 0.0:
        return 0.0
    return off / scale if off == off and scale > 0 else float("inf")
