"""Runs of a few steps, and all that they leave on a rank."""

from pathlib import Path

import torch
from torch import Tensor

from workbench.comm.groups.world import World
from workbench.plan.experiment import Experiment
from workbench.train.loop.memory import tensor_bytes
from workbench.train.loop.state import RankState, group_specs_of

STATES = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")


def trained(
    world: World, experiment: Experiment, weights: Path
) -> tuple[dict[str, Tensor], int, list[tuple[object, ...]]]:
    """This rank's pieces and their state, the bytes of state that it holds, and its traffic."""
    groups = world.groups(group_specs_of(experiment.plan))
    state = RankState.start(experiment, world, groups, weights, None)
    for step in range(experiment.steps):
        state.stepper.run(step)
        state.strategy.update(step)
    held = tensor_bytes(state.updater.tensors())
    traffic = [(r.op, r.layer, r.messages, r.bytes) for r in world.recorder.rows()]
    everything = {f"optimizer/{s}/{n}" for n in state.model.trainable() for s in STATES}
    found = state.model.pieces() | state.updater.state(everything)
    return {name: tensor.detach().clone() for name, tensor in found.items()}, held, traffic


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Both hold the same tensors, bit by bit."""
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
