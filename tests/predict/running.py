"""Steps of small nets on this rank, for the record and for the meter."""

from contextlib import nullcontext
from pathlib import Path

import torch

from tests.layers import nets
from workbench.bench.stepping import measure
from workbench.comm.groups.record import Givers
from workbench.comm.groups.world import Seat, World
from workbench.layers.context import BatchContext
from workbench.layers.cut import cut
from workbench.plan.experiment import Experiment
from workbench.plan.placement import Shard, apportion
from workbench.train.loop.loop import agree
from workbench.train.loop.passes import MicroBatch, pass_of
from workbench.train.loop.state import everyone, group_specs_of
from workbench.train.strategies.strategy import strategy_of, updater_of


def received_in_a_step(
    world: World, experiment: Experiment, net: type[torch.nn.Module]
) -> tuple[list[tuple[object, ...]], tuple[tuple[object, ...], ...]]:
    """(group, op, layer, phase, calls, messages, bytes) of every row of the record, and the givers.

    Those are (op, phase, rank, bytes).
    """
    plan, givers = experiment.plan, Givers()
    world.recorder.givers = givers
    groups = world.groups(group_specs_of(plan))
    context = BatchContext(world.rank, (0,) * world.size, seed=nets.SEED)
    reader = nets.Memory(nets.made(net).state_dict())
    model = cut(plan, context, groups, reader, device=world.device)
    updater = updater_of(experiment, model)
    strategy = strategy_of(experiment, model, updater)
    passing = pass_of(model, nullcontext, strategy.after_round)
    images, labels = nets.batch(net, experiment.batch_size)
    strategy.begin()
    first = 0
    for index, count in enumerate(apportion(len(images), (1,) * experiment.accumulate)):
        rows = apportion(count, (1,) * world.size)
        start, length = Shard(0, rows).span(world.rank)
        mine = slice(first + start, first + start + length)
        batch = MicroBatch(rows, first, images[mine], labels[mine])
        last = index == experiment.accumulate - 1
        passing.run(batch, 0, len(images), strategy.last if last else _not_yet)
        first += count
    strategy.finish(apportion(len(images), (1,) * world.size))
    agree(everyone(groups, plan), 0.0, False, 0.0)
    strategy.update(0)
    strategy.rest()
    world.recorder.givers = None
    return [row.counts for row in world.recorder.rows()], givers.rows()


def _not_yet() -> None:
    """More micro-batches follow."""


def peak_of_a_step(seat: Seat, experiment: Experiment, weights: Path) -> int:
    """Bytes of this rank at the highest point of a step in the middle of a run."""
    return measure(seat, experiment, weights=weights).peak_bytes
