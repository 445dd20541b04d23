"""Runs of a few steps, and all that they leave on a rank."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workbench.client.verifying import merge
from workbench.comm.groups.world import RankConfig, World
from workbench.layers.cut_model import CutModel
from workbench.model.weights.initial import initialize
from workbench.plan.experiment.experiment import CrossEntropy, Experiment, LocalSGD, ParameterServer
from workbench.program.step import program_of
from workbench.store.messages import StopRequest
from workbench.train.run.loop import train
from workbench.train.run.memory import tensor_bytes
from workbench.train.run.rank import CONTROL, RankState, group_specs_of
from workbench.train.run.scoring import evaluate
from workbench.train.step.executor import Stepper
from workbench.train.step.loss import CrossEntropyLoss
from workbench.train.strategy.strategy import OwnGradients, strategy_of, updater_of
from workbench.train.verify.verification import Difference, Verification
from workbench.train.verify.verify import compare_in
from workbench.train.verify.whole_model import write_reference


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


def started(
    world: World, experiment: Experiment, weights: Path, resume: Path | None = None
) -> RankState:
    """This rank's part before the first step."""
    groups = world.groups(group_specs_of(experiment.plan))
    return RankState.start(experiment, world, groups, weights, resume)


def go_on(state: RankState, steps: range) -> list[float]:
    """Takes steps; this rank's part of the loss of each."""
    losses = []
    for step in steps:
        losses.append(state.stepper.run(step).loss)
        state.stepper.update()
    return losses


def pieces_of(state: RankState) -> dict[str, Tensor]:
    """This rank's pieces as they are now."""
    return {name: piece.detach().clone() for name, piece in state.model.pieces().items()}


def evaluated(state: RankState) -> dict[str, float]:
    """In batches of five."""
    model, data, dtype = state.model, state.test_data, state.stepper.dtype
    return evaluate(model, data, 5, state.everyone, state.world.device, dtype, state.scoring)


def trained(
    world: World, experiment: Experiment, weights: Path
) -> tuple[dict[str, Tensor], int, list[tuple[object, ...]]]:
    """This rank's pieces and their state, the bytes of state that it holds, and its traffic."""
    state = started(world, experiment, weights)
    go_on(state, range(experiment.steps))
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


def differences(
    world: World, experiment: Experiment, weights: Path, reference: Path, repeat: bool
) -> list[Difference]:
    """How far this rank is off."""
    return compare_in(world, experiment, weights=weights, reference=reference, repeat=repeat)[0]


def verified(
    on_ranks: Any,
    folder: Path,
    experiment: Experiment,
    module: nn.Module,
    *,
    repeat: bool = False,
    like: Experiment | None = None,
) -> Verification:
    """An experiment on ranks, against the whole module in one process, which runs one `like` it."""
    start, reference = folder / "start.safetensors", folder / "reference.safetensors"
    weights = initialize(experiment.plan.graph, 0, folder, module=module)
    write_reference(like or experiment, weights, start, reference)
    given = experiment, start, reference, repeat
    return merge(experiment, on_ranks(experiment.plan.world_size, differences, *given))


def is_exact(found: Verification, experiment: Experiment) -> bool:
    """Whether all that was compared is exact, but for gradients that no other rank sums."""
    apart = experiment.fused or isinstance(experiment.sync, ParameterServer | LocalSGD)
    kinds = [kind for kind in found.kinds if not (apart and kind == "gradient")]
    return all(found.of(kind).error <= found.tolerance(kind) for kind in kinds)


def session(
    config: RankConfig,
    experiment: Experiment,
    weights: Path,
    directory: Path,
    resume: Path | None,
    stop_after: int | None,
):
    """`train`, its rows kept; rank 1 (or the only one) asks to stop during a step."""
    rows, control = [], StopRequest()

    def emit(row):
        rows.append(row)
        if config.rank == config.world_size // 2 and row["step"] + 1 == stop_after:
            control.stop_requested = True

    outcome = train(
        config,
        experiment,
        weights=weights,
        directory=directory,
        resume=resume,
        control=control,
        emit=emit,
    )
    return rows, outcome
