"""The recurrence of pipelined steps, written down serially: nothing overlaps, nothing is reused."""

from pathlib import Path

import torch
from torch import Tensor

from tests.train.runs import pieces_of, started
from workbench.comm.all_reduce import all_reduce
from workbench.comm.groups.world import World
from workbench.plan.experiment.experiment import Experiment, Pipelined, Synchronous
from workbench.train.run.rank import RankState
from workbench.train.step.executor import Stepper
from workbench.train.strategy.strategy import OwnGradients

Weights = dict[str, Tensor]


def serially(world: World, experiment: Experiment, weights: Path) -> list[Weights]:
    """This rank's weights after every step of w[t+1] = w[t] - lr * S[t - (K - 1)]."""
    sync = experiment.sync
    assert isinstance(sync, Pipelined)
    late = sync.width - 1
    state = started(world, experiment.replace(sync=Synchronous()), weights)
    own, stepper = OwnGradients(state.strategy), state.stepper
    run, data, dtype = state.experiment, stepper.feed.data, stepper.dtype
    stepper = Stepper(run, state.model, own, data, world, dtype)
    parameters = state.model.trainable()
    sums: list[Weights] = []
    places: list[Weights] = []
    found = []
    for step in range(experiment.steps):
        places.append({name: p.detach().clone() for name, p in parameters.items()})
        stepper.run(step)
        sums.append({name: summed(state, name, p) for name, p in parameters.items()})
        old = step if step < sync.warmup else step - late
        if old >= (0 if step < sync.warmup else sync.warmup):
            for name, parameter in parameters.items():
                parameter.grad = sums[old][name]
                if sync.compensation is not None and old < step:
                    g, moved = sums[old][name], parameter.detach() - places[old][name]
                    parameter.grad = g + sync.compensation_lambda * g * g * moved
            state.updater.step()
        found.append(pieces_of(state))
    return found


def summed(state: RankState, name: str, parameter: torch.nn.Parameter) -> Tensor:
    mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    group = state.model.replica_group(state.model.placements[name].group_size)
    return all_reduce(mine, group, algorithm="direct")


def stepwise(
    world: World, experiment: Experiment, weights: Path
) -> tuple[list[Weights], list[str], list[tuple[str, str, int, int, int]]]:
    """This rank's weights after every step as they are trained, notes, and what travelled."""
    state = started(world, experiment, weights)
    found = []
    for step in range(experiment.steps):
        state.stepper.run(step)
        state.stepper.update()
        found.append(pieces_of(state))
    state.strategy.settle()
    rows = world.recorder.rows()
    return found, state.notes, [(r.op, r.layer, r.calls, r.messages, r.bytes) for r in rows]


def both(
    world: World, experiments: list[Experiment], weights: Path
) -> list[tuple[list[Weights], list[Weights], list[str]]]:
    """For each: this rank's weights after every step as trained and serially, and the notes."""
    found = []
    for experiment in experiments:
        trained, notes, _ = stepwise(world, experiment, weights)
        found.append((trained, serially(world, experiment, weights), notes))
    return found
