"""The steps of one engine in `bench predict`, with their memory, traffic and time."""

import gc
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from workbench.comm.groups.world import RankConfig, World
from workbench.plan.experiment.experiment import Experiment
from workbench.train.run.loop import agree
from workbench.train.run.memory import PeakMeter, tensor_bytes
from workbench.train.run.rank import RankState, group_specs_of


def watched(experiment: Experiment) -> int:
    """The index of the step that is measured: the first one that follows an optimizer's update.

    What is done every few steps is done in it.
    """
    timing = experiment.sync.timing
    first = max(2, timing.warmup + timing.late + 1 if timing.late else timing.warmup)
    return -(-(first + 1) // timing.every) * timing.every - 1


@dataclass(frozen=True)
class Observed:
    """The measurements of one rank, in one step in the middle of a run.

    Attributes:
        peak_bytes: the bytes of its tensors at the peak, shared memory included.
        traffic: the recorder's rows (group, op, layer, phase, calls, messages, bytes).
        step_s: the median seconds of the steps after it; where one in a few is longer,
            the mean; 0 if there were none.
    """

    peak_bytes: int
    traffic: tuple[tuple[str, str, str, str, int, int, int], ...]
    step_s: float = 0.0


def measure(
    config: RankConfig, experiment: Experiment, *, weights: Path, timed: int = 0
) -> Observed:
    """Runs a few steps and measures the last one, when the optimizer has its state.

    Before it, late sums have arrived, so that none is in flight but those that it starts. `timed`
    further steps are timed.
    """
    gc.collect()  # what an earlier case has left must not be freed under the meter
    with PeakMeter(torch.device(config.device)) as meter, World.open(config) as world:
        groups = world.groups(group_specs_of(experiment.plan))
        state = RankState.start(experiment, world, groups, weights, None)
        for index in range(watched(experiment)):
            _step(state, index)
        state.strategy.rest()
        world.recorder.reset()
        # No event reports what attendants and gloo's threads have freed meanwhile.
        meter.lap(live_bytes=tensor_bytes(state.held()) + world.staged_bytes)
        _step(state, watched(experiment))
        peak = meter.stop().peak_bytes
        meter.start()
        state.strategy.rest()
        rows = tuple(row.counts for row in world.recorder.rows())
        first = watched(experiment) + 1
        step_s = _seconds(state, range(first, first + timed))
        state.strategy.rest()
    return Observed(peak, rows, step_s)


def time_steps(config: RankConfig, experiment: Experiment, *, weights: Path, timed: int) -> float:
    """Seconds of a step, as in `Observed`, in a run of its own.

    `timed` steps follow the ones that allocate memory and the optimizer's state.
    """
    with World.open(config) as world:
        groups = world.groups(group_specs_of(experiment.plan))
        state = RankState.start(experiment, world, groups, weights, None)
        first = watched(experiment)
        for index in range(first):
            _step(state, index)
        step_s = _seconds(state, range(first, first + timed))
        state.strategy.rest()
    return step_s


def _seconds(state: RankState, steps: range) -> float:
    """The mean or median seconds of a step."""
    taken = []
    for index in steps:
        began = time.perf_counter()
        _step(state, index)
        taken.append(time.perf_counter() - began)
    if not taken:
        return 0.0
    in_mean = state.experiment.sync.timing.every > 1
    return statistics.fmean(taken) if in_mean else statistics.median(taken)


def _step(state: RankState, index: int) -> None:
    """Runs one step like the training loop."""
    result = state.stepper.run(index)
    agree(state.everyone, result.loss, False, result.blocked_s)
    state.stepper.update()
