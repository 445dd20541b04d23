"""Steps of small nets on this rank, for the record and for the meter."""

from pathlib import Path

import torch

from tests.layers import nets
from tests.train.runs import stepper_of
from workbench.bench.predict.stepping import measure
from workbench.comm.groups.world import RankConfig, World
from workbench.comm.messages.recorder import BytesBySender
from workbench.layers.cut import cut
from workbench.layers.local.context import BatchContext
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.placement.placement import Shard, apportion
from workbench.train.data.feed import MicroBatch
from workbench.train.run.loop import agree
from workbench.train.run.rank import everyone, group_specs_of


def received_in_a_step(
    world: World, experiment: Experiment, net: type[torch.nn.Module]
) -> tuple[list[tuple[object, ...]], tuple[tuple[object, ...], ...]]:
    """(group, op, layer, phase, calls, messages, bytes) of every row of the record, and senders.

    Senders are rows of (op, phase, rank, bytes).
    """
    plan, by_sender = experiment.plan, BytesBySender()
    world.recorder.by_sender = by_sender
    groups = world.groups(group_specs_of(plan))
    context = BatchContext(world.rank, (0,) * world.size, seed=nets.SEED)
    reader = nets.Memory(nets.made(net).state_dict())
    dtype = torch.float64 if experiment.precision == "fp64" else torch.float32
    model = cut(plan, context, groups, reader, device=world.device, dtype=dtype)
    stepper = stepper_of(world, model, experiment)
    images, labels = nets.batch(net, experiment.batch_size)
    images = images.to(dtype) if images.is_floating_point() else images
    first, batches = 0, []
    for count in apportion(len(images), (1,) * experiment.accumulate):
        rows = apportion(count, (1,) * world.size)
        start, length = Shard(0, rows).span(world.rank)
        mine = slice(first + start, first + start + length)
        batches.append(MicroBatch(rows, first, (images[mine],), labels[mine]))
        first += count
    stepper.run(0, tuple(batches))
    agree(everyone(groups, plan), 0.0, False, 0.0)
    stepper.update()
    stepper.strategy.rest()
    world.recorder.by_sender = None
    return [row.counts for row in world.recorder.rows()], by_sender.rows()


def peak_of_a_step(config: RankConfig, experiment: Experiment, weights: Path) -> int:
    """Bytes of this rank at the highest point of a step in the middle of a run."""
    return measure(config, experiment, weights=weights).peak_bytes
