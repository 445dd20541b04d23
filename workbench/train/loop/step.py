"""The gradients of one step on one rank."""

import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from workbench.comm.groups.world import World
from workbench.layers.cut_model import CutModel
from workbench.plan.experiment import Experiment
from workbench.plan.placement import apportion
from workbench.train.data.data import Dataset, rows_of_step
from workbench.train.loop.objective import StepLoss, step_loss
from workbench.train.loop.passes import MicroBatch, Precision, pass_of
from workbench.train.strategies.strategy import Strategy


@dataclass(frozen=True)
class StepResult:
    """What one step did, before its gradients are applied.

    Attributes:
        loss: this rank's part of the mean loss.
        samples: of the whole batch.
        seconds: from the first row's loading to the last gradient's sum.
        blocked_s: of these, spent waiting in collectives.
        batches: what it ran on.
        outputs: of the last micro-batch, as the plan's flow lays them.
    """

    loss: float
    samples: int
    seconds: float
    blocked_s: float
    batches: tuple[MicroBatch, ...]
    outputs: tuple[Tensor, ...]


class Stepper:
    """Computes the gradients of one step after another.

    Args:
        experiment: what to run.
        model: this rank's part.
        strategy: makes of them what the optimizer is to see.
        data: the training split.
        world: this rank's place.
        dtype: of images.
        loss: of a step.
    """

    def __init__(
        self,
        experiment: Experiment,
        model: CutModel,
        strategy: Strategy,
        data: Dataset,
        world: World,
        dtype: torch.dtype,
        loss: StepLoss = step_loss,
    ) -> None:
        self.experiment, self.model, self.strategy = experiment, model, strategy
        self.data, self.world, self.dtype = data, world, dtype
        precision = _precision(experiment, world.device)
        self.passing = pass_of(model, precision, strategy.after_round, loss)

    def run(self, step: int) -> StepResult:
        """Leaves in every `grad` what the strategy's next update is to see.

        That is, for synchronous steps, the gradient of the mean loss over the global batch.
        """
        started, blocked = time.perf_counter(), self.world.recorder.blocked_s
        batches = self._load(step)
        rows = tuple(map(sum, zip(*(batch.rows for batch in batches), strict=True)))
        samples = sum(rows)
        self.strategy.begin()
        total = 0.0
        outputs: tuple[Tensor, ...] = ()
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            outputs, reported = self.passing.run(
                batch, step, samples, self.strategy.last if last else _not_yet
            )
            total += reported
        self.strategy.finish(rows)
        seconds = time.perf_counter() - started
        blocked_s = self.world.recorder.blocked_s - blocked
        return StepResult(total, samples, seconds, blocked_s, batches, outputs)

    def _load(self, step: int) -> tuple[MicroBatch, ...]:
        """This rank's part of the step's global batch, cut into micro-batches."""
        order = rows_of_step(len(self.data), self.experiment.batch_size, self.experiment.seed, step)
        device = self.world.device
        batches, first = [], 0
        for count in apportion(len(order), (1,) * self.experiment.accumulate):
            if count == 0:  # the short last batch of an epoch
                continue
            rows = self.experiment.plan.rows_of(count)
            start = first + sum(rows[: self.world.rank])
            images, labels = self.data.batch(order[start : start + rows[self.world.rank]])
            batches.append(
                MicroBatch(rows, first, images.to(device, self.dtype), labels.to(device))
            )
            first += count
        return tuple(batches)


def _precision(experiment: Experiment, device: torch.device) -> Precision:
    """Makes the context in which forward passes run."""
    if experiment.precision == "bf16":
        return partial(torch.autocast, device.type, torch.bfloat16)
    return nullcontext


def _not_yet() -> None:
    """More micro-batches follow."""
