"""torch's optimizer and scheduler of values, and what an optimizer remembers as named tensors.

The state of a parameter is cut as the parameter is, so a checkpoint holds it as logical tensors of
their own, named `optimizer/<state>/<parameter>`; single numbers, such as how many updates there
were, are whole everywhere. Which there are says the value (`plan/experiment/optimizers.py`).

A parameter that was never updated has its state in full as well, with the values that torch begins
with. When it is read back, torch begins with them itself: some depend on the learning rate of the
first update.

A scheduler runs on a stand-in: an optimizer with the same groups and options, of one number each.
What it has changed there after t steps are the options of step t, whoever asks first for which.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.optimizers import AnyOptimizer
from workbench.plan.experiment.schedule import AnySchedule, StepFunction, WarmupCosine
from workbench.plan.io.errors import ExperimentError

# Where torch has one kernel for a whole update.
_FUSED_ON = ("cpu", "cuda")

_OF_TORCH: Mapping[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
}


def build_optimizer(
    value: AnyOptimizer, *parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """The torch optimizer of this value, fused where torch can.

    Others go parameter by parameter on every device, so that their temporary tensors are those of
    one parameter at a time.

    Args:
        parameters: this rank's pieces without a group, and those of each of the value's groups;
            those of size zero are left out, and there may be none left, as on a rank that owns
            nothing.
    """
    held = [[p for p in members if p.numel() > 0] for members in parameters]
    every = [p for members in held for p in members]
    on = all(p.is_floating_point() and p.device.type in _FUSED_ON for p in every)
    how = {"fused": on or None} if value.fused else {"foreach": False}
    options = [one.options for one in value.parted]
    members = [{"params": own, **of} for own, of in zip(held, options, strict=True)]
    return _OF_TORCH[value.kind](members, **options[0], **how)


def grouped(
    value: AnyOptimizer, parameters: Mapping[str, nn.Parameter], dims: Mapping[str, int]
) -> list[list[nn.Parameter]]:
    """Parameters as `build_optimizer` takes them: without a group, and those of each group."""
    found: list[list[nn.Parameter]] = [[] for _ in value.parted]
    for name, parameter in parameters.items():
        found[value.group_of(name, dims[name])].append(parameter)
    return found


EMA = "ema"
"""The state that holds averaged weights, if an experiment wants them."""


def entry(state: str, name: str) -> str:
    return f"optimizer/{state}/{name}"


Values = Mapping[str, AnyOptimizer]
"""The optimizer of each parameter, with the options of its group."""


def state_tensors(
    optimizer: torch.optim.Optimizer, values: Values, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """The state of these parameters, by entry; the tensors are the optimizer's own.

    A parameter of size zero has none.
    """
    return {
        entry(state, name): held_or_first(optimizer, values[name], parameter, state)
        for name, parameter in parameters.items()
        if parameter.numel() > 0
        for state in values[name].remembers.names
    }


def held_or_first(
    optimizer: torch.optim.Optimizer, value: AnyOptimizer, parameter: Tensor, state: str
) -> Tensor:
    """A state of one parameter; before its first update, what torch begins with."""
    held = optimizer.state[parameter].get(state) if parameter in optimizer.state else None
    return first(value, parameter, state) if held is None else held


def first(value: AnyOptimizer, parameter: Tensor, state: str) -> Tensor:
    begins = value.remembers[state]
    if state in value.remembers.numbers:
        return torch.tensor(begins, dtype=torch.float32)
    return torch.full_like(parameter.detach(), begins)


def load_state(
    optimizer: torch.optim.Optimizer,
    values: Values,
    parameters: Mapping[str, nn.Parameter],
    read: Callable[[str, str], Tensor],
) -> None:
    """Puts back what `state_tensors` gave.

    Args:
        parameters: the parameters that it updates, by name; others may be among them if of size
            zero.
        read: (state, name) -> this rank's piece of that state; it becomes the optimizer's own.
    """
    fused = bool(optimizer.defaults.get("fused"))
    for name, parameter in parameters.items():
        known = values[name].remembers
        if parameter.numel() == 0 or not known.names:
            continue
        numbers = {state: read(state, name) for state in known.numbers}
        if "step" in numbers and not numbers["step"].any():
            continue
        # Numbers keep their precision, of which later ones are made; torch's own way back casts.
        where = parameter.device if fused else torch.device("cpu")
        kept = {state: number.to(where, torch.float32) for state, number in numbers.items()}
        for state in known.elements:
            kept[state] = read(state, name).to(parameter)
        optimizer.state[parameter] = kept


def forget(optimizer: torch.optim.Optimizer, value: AnyOptimizer) -> None:
    """Makes an optimizer one that has not updated anything yet."""
    members = [group["params"] for group in optimizer.param_groups]
    optimizer.state.clear()
    optimizer.state.update(build_optimizer(value, *members).state)


Options = Mapping[str, Any]


def build_scheduler(
    schedule: AnySchedule,
    optimizer: torch.optim.Optimizer,
    steps: int,
) -> torch.optim.lr_scheduler.LRScheduler:
    """Torch's scheduler of this value.

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
