"""What the tests of GPUs run on engines."""

from pathlib import Path

import torch
import torch.distributed as dist

from workbench.comm.world import Seat, World
from workbench.plan.experiment import Experiment
from workbench.train.memory import PeakMeter
from workbench.train.state import RankState, group_specs_of


def place(seat: Seat, experiment: Experiment, *, weights: Path) -> tuple[str, str]:
    """Where this rank computes, and through what it communicates."""
    with World.open(seat) as world:
        return world.device.type, dist.get_backend()


def memory(
    seat: Seat, experiment: Experiment, *, weights: Path
) -> tuple[tuple[int, int], tuple[int, int]]:
    """(peak, live) bytes of some steps: as the meter says, and as torch's allocator does."""
    device = torch.device(seat.device)
    with PeakMeter(device) as meter, World.open(seat) as world:
        groups = world.groups(group_specs_of(experiment.plan))
        state = RankState.start(experiment, world, groups, weights, None)
        meter.lap()
        for step in range(experiment.steps):
            state.stepper.run(step)
            state.strategy.update(step)
        allocator = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        reading = meter.lap()
    return (reading.peak_bytes, reading.live_bytes), allocator
