"""Runs of a few steps, and all that they leave on a rank."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.comm.groups.world import World
from workbench.layers.cut_model import CutModel
from workbench.plan.experiment.experiment import CrossEntropy, Experiment
from workbench.program.step import program_of
from workbench.train.run.memory import tensor_bytes
from workbench.train.run.rank import CONTROL, RankState, group_specs_of
from workbench.train.step.executor import Stepper
from workbench.train.step.loss import CrossEntropyLoss
from workbench.train.strategy.strategy import OwnGradients, strategy_of, updater_of


def stepper_of(
    world: World, model: CutModel, experiment: Experiment, *, sums: bool = True, **options: Any
) -> Stepper:
    """Executes an experiment's steps on batches that it is given.

    Args:
        world: This rank's place.
        model: This rank's part.
        experiment: What runs.
        sums: Whether gradients are summed and weights move.
        options: Further arguments of `Stepper`.
    """
    program = program_of(experiment).of(world.rank)
    everyone = model.groups.get((CONTROL, tuple(range(world.size))))
    strategy = strategy_of(program, model, updater_of(program, model, everyone))
    if not sums:
        strategy = OwnGradients(strategy)
    if isinstance(experiment.loss, CrossEntropy):
        options["loss"] = CrossEntropyLoss(experiment.loss, model.plan.graph, everyone)
    return Stepper(experiment, model, strategy, None, world, torch.float64, **options)


def trained(
    world: World, experiment: Experiment, weights: Path
) -> tuple[dict[str, Tensor], int, list[tuple[object, ...]]]:
    """This rank's pieces and their state, the bytes of state that it holds, and its traffic."""
    groups = world.groups(group_specs_of(experiment.plan))
    state = RankState.start(experiment, world, groups, weights, None)
    for step in range(experiment.steps):
        state.stepper.run(step)
        state.stepper.update()
    held = tensor_bytes(state.updater.tensors())
    traffic = [(r.op, r.layer, r.messages, r.bytes) for r in world.recorder.rows()]
    values = state.updater.values.items()
    everything = {f"optimizer/{s}/{n}" for n, one in values for s in one.remembers.names}
    found = state.model.pieces() | state.updater.state(everything)
    return {name: tensor.detach().clone() for name, tensor in found.items()}, held, traffic


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Both hold the same tensors, bit by bit."""
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
