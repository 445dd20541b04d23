"""The systems that `bench splitbrain` compares, on one rank, each as a step to be called.

All of them start from the same weights, read the same rows of the same batches in the same
order, and use the same optimizer, fused where the system can; each rank computes with one
thread, except for the one process that has the threads of all of them.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.comm.groups.world import World
from workbench.layers.cut_model import Groups
from workbench.plan.experiment import Experiment
from workbench.train.data.data import open_data, rows_of_step
from workbench.train.loop.loop import agree
from workbench.train.loop.state import RankState


@dataclass(frozen=True)
class Side:
    """One system on one rank.

    Attributes:
        name: of the system.
        step: runs one step and returns this rank's part of the mean loss.
        samples: of one step, over all ranks that take part.
        takes_part: whether this rank does.
        threads: that it computes with.
        rest: waits until nothing of it travels any more.
    """

    name: str
    step: Callable[[int], float]
    samples: int
    takes_part: bool = True
    threads: int = 1
    rest: Callable[[], None] = lambda: None


def workbench_side(experiment: Experiment, world: World, groups: Groups, weights: Path) -> Side:
    """The cut model, as `train` runs it: status of all ranks included."""
    state = RankState.start(experiment, world, groups, weights, None)

    def step(index: int) -> float:
        result = state.stepper.run(index)
        agree(state.everyone, result.loss, False, result.blocked_s)
        state.strategy.update(index)
        return result.loss

    return Side("workbench", step, experiment.batch_size, rest=state.strategy.rest)


class Trainer:
    """Trains a model by hand on a span of each batch's rows.

    Args:
        experiment: what runs.
        model: whole, or as a peer wraps it.
        optimizer: of its parameters.
        start, count: this rank's rows of a batch.
    """

    def __init__(
        self,
        experiment: Experiment,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        start: int,
        count: int,
    ) -> None:
        graph = experiment.plan.graph
        self.experiment, self.model, self.optimizer = experiment, model, optimizer
        self.start, self.count = start, count
        self.data = open_data(experiment.data, graph.input_shape, graph.num_classes, "train")

    def step(self, index: int) -> float:
        """One step; returns the mean loss of these rows."""
        experiment = self.experiment
        order = rows_of_step(len(self.data), experiment.batch_size, experiment.seed, index)
        images, labels = self.data.batch(order[self.start : self.start + self.count])
        loss: Tensor = F.cross_entropy(self.model(images), labels)
        self.learn(loss)
        return loss.item()

    def learn(self, loss: Tensor) -> None:
        """Goes backward, and updates."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()


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
