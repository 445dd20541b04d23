"""The options of an optimizer's groups in every step, as torch's own scheduler moves them.

The scheduler runs on a stand-in: an optimizer with the same groups and options, of one number each.
What it has changed there after t steps are the options of step t, whoever asks first for which.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.schedule import AnySchedule, StepFunction, WarmupCosine
from workbench.plan.io.errors import ExperimentError
from workbench.train.strategies.remembered import build_optimizer

Options = Mapping[str, Any]


def build_scheduler(
    schedule: AnySchedule,
    optimizer: torch.optim.Optimizer,
    steps: int,
) -> torch.optim.lr_scheduler.LRScheduler:
    """Torch's scheduler of this value.

    Args:
        schedule: the schedule of an `Experiment`.
        optimizer: the optimizer whose options it moves.
        steps: the steps of the experiment.

    Raises:
        ExperimentError: torch refuses an argument.
        OwnObjectError: the user's own function cannot be loaded, or gives no number.
    """
    if isinstance(schedule, StepFunction):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.factor)
    if isinstance(schedule, WarmupCosine):
        factor = partial(schedule.factor, steps=steps)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    build = getattr(torch.optim.lr_scheduler, schedule.name)
    try:
        return build(optimizer, **schedule.over(steps).arguments)
    except (TypeError, ValueError) as error:
        raise ExperimentError(f"schedule: {schedule.name}: {error}") from error


class Schedule:
    """The options of each group in each step.

    Args:
        experiment: the experiment, whose optimizer and schedule these are.

    Raises:
        ExperimentError: torch refuses an argument of the schedule.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._begin()

    def at(self, step: int) -> Sequence[Options]:
        """Of a step, by its index."""
        if step < self._done:
            self._begin()
        while self._done < step:
            self._scheduler.step()
            self._done += 1
        groups = self._optimizer.param_groups
        return [{name: group[name] for name in self._names} for group in groups]

    def _begin(self) -> None:
        value, schedule = self._experiment.optimizer, self._experiment.schedule
        assert schedule is not None
        self._optimizer = build_optimizer(
            value, *([nn.Parameter(torch.zeros(1))] for _ in value.parted)
        )
        self._scheduler = build_scheduler(schedule, self._optimizer, self._experiment.steps)
        self._optimizer.step()  # of nothing, as the scheduler expects one before its own
        self._names, self._done = tuple(value.options), 0
