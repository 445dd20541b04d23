"""Steps with and without a tracer, on one rank."""

import gc
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tests.train.runs import pieces_of
from workbench.comm.groups.world import World
from workbench.plan.experiment.experiment import Experiment
from workbench.train.run.loop import agree
from workbench.train.run.memory import PeakMeter
from workbench.train.run.rank import RankState, group_specs_of
from workbench.train.trace.trace import RankTrace
from workbench.train.trace.tracer import Tracer

WARM = 2


@dataclass(frozen=True)
class Seen:
    """What was seen of a step.

    Attributes:
        tensors: pieces after it.
        peak_bytes: of it.
        counts: (group, op, layer, phase, calls, messages, bytes) of it.
        left: hooks and replacements that are still there after it.
    """

    tensors: dict[str, Tensor]
    peak_bytes: int
    counts: list[tuple[object, ...]]
    left: list[str]
    trace: RankTrace | None


def step(world: World, experiment: Experiment, weights: Path, traced: bool) -> Seen:
    """The third step of a run."""
    groups = world.groups(group_specs_of(experiment.plan))
    gc.collect()
    with PeakMeter(torch.device("cpu")) as meter:
        state = RankState.start(experiment, world, groups, weights, None)
        for index in range(WARM):
            _step(state, index)
        world.recorder.reset()
        trace = None
        parts = state.stepper.passes.parts
        if traced:
            tracer = Tracer(
                state.model, parts, world.recorder, world.device, state.updater.optimizer
            )
            meter.lap()
            with tracer:
                _step(state, WARM)
            trace = tracer.trace
        else:
            meter.lap()
            _step(state, WARM)
        peak = meter.lap().peak_bytes
    left = [name for part in parts for name, module in part.named_modules() if replaced(module)]
    optimizer = state.updater.optimizer
    left += ["update"] * len(optimizer._optimizer_step_pre_hooks)
    left += ["updated"] * len(optimizer._optimizer_step_post_hooks)
    left += ["no garbage is collected"] * (not gc.isenabled())
    left += ["listener"] * (world.recorder.listener is not None)
    pieces = pieces_of(state)
    return Seen(pieces, peak, [row.counts for row in world.recorder.rows()], left, trace)


def replaced(module: torch.nn.Module) -> bool:
    return "forward" in module.__dict__


def _step(state: RankState, index: int) -> None:
    result = state.stepper.run(index)
    agree(state.everyone, result.loss, False, result.blocked_s)
    state.stepper.update()
