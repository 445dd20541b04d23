"""Runs an experiment on one rank, from the first slice of the weights to the last checkpoint."""

from collections.abc import Callable
from pathlib import Path

import torch

from workbench.comm.groups.world import Seat, World
from workbench.plan.experiment import Experiment
from workbench.plan.metrics import Row
from workbench.store.outcome import Control, Outcome
from workbench.train.loop.learning_rates import LearningRates
from workbench.train.loop.loop import Loop
from workbench.train.loop.memory import PeakMeter
from workbench.train.loop.state import RankState, group_specs_of
from workbench.train.reshard.requests import RunRequests

__all__ = ["Control", "Outcome", "Row", "Seat", "train"]


def train(
    seat: Seat,
    experiment: Experiment,
    *,
    weights: Path,
    directory: Path,
    resume: Path | None = None,
    control: Control,
    emit: Callable[[Row], None],
) -> Outcome:
    """Trains on one rank until the last step, a wish to stop, or a loss that is no number.

    Every rank ends at the same step and, unless it diverged, leaves a checkpoint.

    Args:
        seat: where this rank sits; its world size is the plan's.
        experiment: what to run, unless the run in `directory` went on under another plan since.
        weights: the initial weights (`model.weights.initialize`); only slices are read.
        directory: of the run; checkpoints go there.
        resume: a checkpoint, under any plan of this model, to go on from.
        control: wishes of the outside, read once a step.
        emit: receives one row of metrics a step.

    Raises:
        CommError: a rank did not arrive, or died.
        CheckpointError: weights or checkpoint are damaged or of another model.
        ReplicasDiffer: ranks that hold the same weights do not have the same bits of them any more.
    """
    wishes = RunRequests(directory)
    experiment = wishes.in_force(experiment)
    rates = LearningRates.of(experiment.optimizer.lr, wishes)
    with PeakMeter(torch.device(seat.device)) as meter, World.open(seat) as world:
        groups = world.groups(group_specs_of(experiment.plan))
        state = RankState.start(experiment, world, groups, weights, resume, rates)
        meter.add(world.shared_bytes)
        return Loop(state, rates, meter, directory, control, emit).run()
