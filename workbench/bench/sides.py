"""The systems that `bench splitbrain` compares, on one rank, each as a step to be called.

All of them start from the same weights, read the same rows of the same batches in the same
order, and use the same fused optimizer; each rank computes with one thread, except for the one
process that has the threads of all of them.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from workbench.comm.world import World
from workbench.layers.cut_model import Groups
from workbench.model.build import build
from workbench.model.slices import WeightsFile
from workbench.plan.experiment import Experiment
from workbench.plan.placement import apportion
from workbench.train.data import open_data, rows_of_step
from workbench.train.loop import agree
from workbench.train.optimizer import build_optimizer
from workbench.train.state import RankState


@dataclass(frozen=True)
class Side:
    """One system on one rank.

    Attributes:
        name: of the system.
        step: runs one step and returns this rank's part of the mean loss.
        samples: of one step, over all ranks that take part.
        takes_part: whether this rank does.
        threads: that it computes with.
    """

    name: str
    step: Callable[[int], float]
    samples: int
    takes_part: bool = True
    threads: int = 1


def workbench_side(experiment: Experiment, world: World, groups: Groups, weights: Path) -> Side:
    """The cut model, as `train` runs it: status of all ranks included."""
    state = RankState.start(experiment, world, groups, weights, None)

    def step(index: int) -> float:
        result = state.stepper.run(index)
        agree(state.everyone, result.loss, False, result.blocked_s)
        state.optimizer.step()
        return result.loss

    return Side("workbench", step, experiment.batch_size)


def ddp_side(experiment: Experiment, world: World, weights: Path, bucket_mib: int) -> Side:
    """DistributedDataParallel of torch, with its recommended options."""
    module = _whole_model(experiment, weights)
    model = DistributedDataParallel(
        module, bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True, static_graph=True
    )
    rows = apportion(experiment.batch_size, (1,) * world.size)
    start = sum(rows[: world.rank])
    run = _Whole(experiment, model, start, rows[world.rank])
    return Side(
        f"torch DDP, {bucket_mib} MiB", lambda i: run.step(i) / world.size, experiment.batch_size
    )


def one_process_sides(experiment: Experiment, world: World, weights: Path) -> tuple[Side, Side]:
    """On rank 0: one engine with its part of the batch, and one process with all of it."""
    part = experiment.batch_size // world.size
    names = ("one engine", "one process")
    if world.rank:
        return Side(names[0], _idle, 0, False), Side(names[1], _idle, 0, False)
    module = _whole_model(experiment, weights)
    engine = _Whole(experiment, module, 0, part)
    process = _Whole(experiment, module, 0, experiment.batch_size)
    return (
        Side(names[0], engine.step, part),
        Side(names[1], process.step, experiment.batch_size, threads=world.size),
    )


def _idle(_step: int) -> float:
    return 0.0


def whole_machine(threads: int) -> Callable[[], None]:
    """Gives this process `threads` threads and every core of the host; returns the way back."""
    before = torch.get_num_threads(), os.sched_getaffinity(0)
    if threads > 1:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        torch.set_num_threads(threads)

    def back() -> None:
        os.sched_setaffinity(0, before[1])
        torch.set_num_threads(before[0])

    return back


class _Whole:
    """Trains a whole model on a span of each batch's rows."""

    def __init__(self, experiment: Experiment, model: nn.Module, start: int, count: int) -> None:
        graph = experiment.plan.graph
        self.experiment, self.model, self.start, self.count = experiment, model, start, count
        self.optimizer = build_optimizer(experiment.optimizer, model.parameters())
        self.data = open_data(experiment.data, graph.input_shape, graph.num_classes, "train")

    def step(self, index: int) -> float:
        experiment = self.experiment
        order = rows_of_step(len(self.data), experiment.batch_size, experiment.seed, index)
        images, labels = self.data.batch(order[self.start : self.start + self.count])
        loss: Tensor = F.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.item()


def _whole_model(experiment: Experiment, weights: Path) -> nn.Module:
    model = build(experiment.plan.graph.source).train()
    reader = WeightsFile(weights)
    model.load_state_dict({name: reader.read(name) for name in model.state_dict()})
    return model
