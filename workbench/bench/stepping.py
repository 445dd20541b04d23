"""What one engine does in `bench predict`: a few steps, watched."""

import gc
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from workbench.comm.groups.world import Seat, World
from workbench.plan.experiment import Experiment, LocalSGD, Pipelined
from workbench.train.loop.loop import agree
from workbench.train.loop.memory import PeakMeter, tensor_bytes
from workbench.train.loop.state import RankState, group_specs_of


def watched(experiment: Experiment) -> int:
    """The step that is watched: the first one that finds the state of an update before it.

    Of local SGD it is one at whose end ranks average.
    """
    sync = experiment.sync
    if isinstance(sync, LocalSGD):
        return -(-3 // sync.every) * sync.every - 1
    return max(2, sync.warmup + sync.width if isinstance(sync, Pipelined) else 0)


@dataclass(frozen=True)
class Observed:
    """What one rank saw of one step in the middle of a run.

    Attributes:
        peak_bytes: of its tensors, shared memory included.
        traffic: rows (group, op, layer, phase, calls, messages, bytes) of the recorder.
        step_s: seconds of the steps after it, their median; of local SGD, where one in a few is
            longer, their mean; 0 if there were none.
    """

    peak_bytes: int
    traffic: tuple[tuple[str, str, str, str, int, int, int], ...]
    step_s: float = 0.0


def measure(seat: Seat, experiment: Experiment, *, weights: Path, timed: int = 0) -> Observed:
    """Runs a few steps, of which the last one counts: the optimizer then has its state.

    Before it, sums that are late have arrived, so that none is under way but those it starts.

    Args:
        seat: where this rank sits.
        experiment: what to run.
        weights: the initial weights.
        timed: steps after those, which are timed.
    """
    gc.collect()  # what an earlier case has left must not be freed under the meter
    with PeakMeter(torch.device(seat.device)) as meter, World.open(seat) as world:
        groups = world.groups(group_specs_of(experiment.plan))
        state = RankState.start(experiment, world, groups, weights, None)
        for index in range(watched(experiment)):
            _step(state, index)
        state.strategy.rest()
        world.recorder.reset()
        # What attendants and gloo's threads have freed meanwhile, no event tells of.
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


def time_steps(seat: Seat, experiment: Experiment, *, weights: Path, timed: int) -> float:
    """Seconds of a step, as in `Observed`, of a run of its own.

    Args:
        seat: where this rank sits.
        experiment: what to run.
        weights: the initial weights.
        timed: steps that are timed, after those that make memory and the optimizer's state.
    """
    with World.open(seat) as world:
        groups = world.groups(group_specs_of(experiment.plan))
        state = RankState.start(experiment, world, groups, weights, None)
        first = watched(experiment)
        for index in range(first):
            _step(state, index)
        step_s = _seconds(state, range(first, first + timed))
        state.strategy.rest()
    return step_s


def _seconds(state: RankState, steps: range) -> float:
    """Of a step."""
    taken = []
    for index in steps:
        began = time.perf_counter()
        _step(state, index)
        taken.append(time.perf_counter() - began)
    if not taken:
        return 0.0
    in_mean = isinstance(state.experiment.sync, LocalSGD)
    return statistics.fmean(taken) if in_mean else statistics.median(taken)


def _step(state: RankState, index: int) -> None:
    """As the training loop does it."""
    result = state.stepper.run(index)
    agree(state.everyone, result.loss, False, result.blocked_s)
    state.strategy.update(index)
