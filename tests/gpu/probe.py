"""What the tests of GPUs run on engines."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import all_ranks
from workbench.comm.all_reduce import all_reduce, start_all_reduce
from workbench.comm.collectives import all_gather, broadcast
from workbench.comm.groups.world import RankConfig, World
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.placement.placement import Shard
from workbench.plan.plans.plan import Plan
from workbench.train.run.memory import PeakMeter
from workbench.train.run.rank import RankState, group_specs_of
from workbench.train.run.reshard import under

EVERY, CYCLES = 7, 2_000_000  # a millisecond or so


def place(config: RankConfig, experiment: Experiment, *, weights: Path) -> tuple[str, str]:
    """Where this rank computes, and through what it communicates."""
    with World.open(config) as world:
        return world.device.type, dist.get_backend()


def mixed(config: RankConfig) -> tuple[str, str, list[float]]:
    """Sums and copies between a GPU, of rank 0, and the host, and where this rank is."""
    with World.open(replace(config, device="cpu" if config.rank else "cuda:0")) as world:
        everyone = all_ranks(world)
        x = torch.full((1,), world.rank + 1.0, device=world.device)
        flat = everyone.buffer(1, x).copy_(x)
        start_all_reduce(flat, everyone).wait()
        sums = [all_reduce(x, everyone, algorithm=by) for by in ("auto", "direct", "ring")]
        every = all_gather(x, Shard(0, (1, 1)), everyone)
        found = [flat, *sums, every, broadcast(x, 0, everyone)]
        assert {tensor.device for tensor in found} == {world.device}
        return world.device.type, dist.get_backend(), torch.cat(found).tolist()


def memory(
    config: RankConfig, experiment: Experiment, *, weights: Path
) -> tuple[tuple[int, int], tuple[int, int]]:
    """(peak, live) bytes of some steps: as the meter says, and as torch's allocator does."""
    device = torch.device(config.device)
    with PeakMeter(device) as meter, World.open(config) as world:
        groups = world.groups(group_specs_of(experiment.plan))
        state = RankState.start(experiment, world, groups, weights, None)
        meter.lap()
        for step in range(experiment.steps):
            state.stepper.run(step)
            state.stepper.update()
        allocator = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        reading = meter.lap()
    return (reading.peak_bytes, reading.live_bytes), allocator


def re_cut(config: RankConfig, experiment: Experiment, *, weights: Path) -> set[str]:
    """On which devices all lies that takes part in a step, some steps after a re-cut."""
    other = Plan.data_parallel(experiment.plan.graph, experiment.plan.world_size)
    with World.open(config) as world:
        groups = world.groups(group_specs_of(experiment.plan))
        state = RankState.start(experiment, world, groups, weights, None)
        for step in range(2 * experiment.steps):
            if step == experiment.steps:
                state = under(state, other.with_batch_norm("synchronized"), step)
            state.stepper.run(step)
            state.stepper.update()
        state.strategy.settle()
        held = [*state.model.pieces().values(), *state.updater.tensors()]
        held += [piece for left in state.strategy.in_flight for piece in left.gradients.values()]
        held += [piece for left in state.strategy.in_flight for piece in left.weights.values()]
        return {tensor.device.type for tensor in held}


class Slow(TorchDispatchMode):
    """Some operations on a GPU begin a millisecond late, behind a host that has gone on."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        if self.count % EVERY == 0:
            torch.cuda._sleep(CYCLES)
        return function(*args, **(kwargs or {}))


def slowly(config: RankConfig, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """A function of one rank, with slow kernels in between; asserts that there were some."""
    torch.cuda.set_device(config.device)
    with Slow() as slow:
        answer = function(config, *args)
    assert slow.count > EVERY
    return answer
