"""What one engine does in `bench predict`: a few steps, watched."""

import gc
from dataclasses import dataclass
from pathlib import Path

import torch

from workbench.comm.world import Seat, World
from workbench.plan.experiment import Experiment, Pipelined
from workbench.train.loop import agree
from workbench.train.memory import PeakMeter
from workbench.train.state import RankState, group_specs_of


def watched(experiment: Experiment) -> int:
    """The step that is watched: the first one that finds the state of an update before it."""
    sync = experiment.sync
    return max(2, sync.warmup + sync.width if isinstance(sync, Pipelined) else 0)


@dataclass(frozen=True)
class Observed:
    """What one rank saw of one step in the middle of a run.

    Attributes:
        peak_bytes: of its tensors, shared memory included.
        traffic: rows (group, op, layer, phase, calls, messages, bytes) of the recorder.
    """

    peak_bytes: int
    traffic: tuple[tuple[str, str, str, str, int, int, int], ...]


def measure(seat: Seat, experiment: Experiment, *, weights: Path) -> Observed:
    """Runs three steps, of which the last one counts: the optimizer then has its state."""
    gc.collect()  # what an earlier case has left must not be freed under the meter
    with PeakMeter(torch.device(seat.device)) as meter, World.open(seat) as world:
        groups = world.groups(group_specs_of(experiment.plan))
        state = RankState.start(experiment, world, groups, weights, None)
        for index in range(watched(experiment)):
            _step(state, index)
        meter.add(world.shared_bytes)
        state.strategy.rest()
        world.recorder.reset()
        meter.lap()
        _step(state, watched(experiment))
        peak = meter.stop().peak_bytes
        meter.start()
        state.strategy.rest()
        rows = tuple(row.counts for row in world.recorder.rows())
    return Observed(peak, rows)


def _step(state: RankState, index: int) -> None:
    """As the training loop does it."""
    result = state.stepper.run(index)
    agree(state.everyone, result.loss, False, result.blocked_s)
    state.strategy.update(index)
