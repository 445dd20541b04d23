"""torch's schedulers, on a stand-in: every option of every step."""

import inspect

import pytest
import torch
from torch import nn

from tests.plan.graphs import vgg
from workbench.plan.experiment.experiment import SGD, Adam, Experiment, ParameterGroup
from workbench.plan.experiment.schedule import (
    FUNCTIONS,
    KNOWN,
    REFUSED,
    LRScheduler,
    StepFunction,
    WarmupCosine,
)
from workbench.plan.extension.user_object import OwnObjectError
from workbench.plan.io.errors import ExperimentError
from workbench.plan.plans.plan import Plan
from workbench.train.optimizer.state import Schedule

PLAN, STEPS = Plan.data_parallel(vgg(), 2), 9
HEAD = ParameterGroup("fc2.*", lr=0.3)
SCHEDULES = (
    WarmupCosine(warmup=3, final=0.1),
    LRScheduler("StepLR", step_size=2, gamma=0.5),
    LRScheduler("MultiStepLR", milestones=[1, 5]),
    LRScheduler("ConstantLR", total_iters=4),
    LRScheduler("LinearLR"),
    LRScheduler("ExponentialLR", gamma=0.7),
    LRScheduler("PolynomialLR", total_iters=STEPS, power=2.0),
    LRScheduler("CosineAnnealingLR", T_max=4, eta_min=0.01),
    LRScheduler("CosineAnnealingWarmRestarts", T_0=2, T_mult=2),
    LRScheduler("CyclicLR", base_lr=0.01, max_lr=0.2, step_size_up=3, mode="triangular2"),
    LRScheduler("OneCycleLR", max_lr=[0.2, 0.4], total_steps=STEPS, three_phase=True),
    StepFunction(function=lambda step: 1 / (1 + step % 4)),
)


def plain(value, schedule):
    """Options of each step: of a real optimizer, on parameters that move."""
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    build = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[value.kind]
    optimizer = build([{"params": [first]}, {"params": [second], "lr": 0.3}], **value.options)
    if isinstance(schedule, WarmupCosine):
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda t: schedule.factor(t, STEPS)
        )
    elif isinstance(schedule, StepFunction):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t % 4))
    else:
        known = getattr(torch.optim.lr_scheduler, schedule.name)
        scheduler = known(optimizer, **schedule.arguments)
    found = []
    for _ in range(STEPS):
        found.append([{n: group[n] for n in value.options} for group in optimizer.param_groups])
        first.grad = second.grad = torch.ones(2)
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda one: getattr(one, "name", one.kind))
@pytest.mark.parametrize("kind", [SGD, Adam])
def test_options_of_every_step_whoever_asks_first(schedule, kind):
    momentum = dict(momentum=0.9) if kind is SGD else {}
    value = kind(0.1, groups=[HEAD], **momentum)
    run = Experiment(plan=PLAN, data="digits", optimizer=value, steps=STEPS, schedule=schedule)
    expected, planned = plain(value, schedule), Schedule(run)
    for step in (0, 3, 8, 2, 2, 5):
        assert planned.at(step) == expected[step]


def test_one_cycle_has_the_steps_of_the_experiment():
    value, cycle = SGD(0.1, momentum=0.9), LRScheduler("OneCycleLR", max_lr=0.2)
    fields = dict(plan=PLAN, data="digits", optimizer=value, steps=STEPS)
    found = Schedule(Experiment(**fields, schedule=cycle))
    expected = Schedule(Experiment(**fields, schedule=cycle.replace(total_steps=STEPS)))
    assert [found.at(step) for step in range(STEPS)] == [expected.at(s) for s in range(STEPS)]


def test_all_of_torchs_are_known_or_refused():
    theirs = {name for name in torch.optim.lr_scheduler.__all__ if name != "LRScheduler"}
    refused = {name for name in theirs if name.lower() in REFUSED}
    assert theirs == set(KNOWN) | refused
    assert len(refused) == len(REFUSED)


@pytest.mark.parametrize("name", KNOWN)
def test_arguments_are_torchs(name):
    known = inspect.signature(getattr(torch.optim.lr_scheduler, name)).parameters
    theirs = {n: p for n, p in known.items() if n not in ("optimizer", "last_epoch", *FUNCTIONS)}
    needed = {n for n, p in theirs.items() if p.default is inspect.Parameter.empty}
    assert (needed, set(theirs)) == (
        set(KNOWN[name].needed),
        {*KNOWN[name].needed, *KNOWN[name].possible},
    )


def test_what_torch_refuses_is_an_error_of_the_schedule():
    schedule = LRScheduler("LinearLR", start_factor=2.0)
    run = Experiment(plan=PLAN, data="digits", optimizer=SGD(0.1), steps=STEPS, schedule=schedule)
    with pytest.raises(ExperimentError, match="schedule: LinearLR: "):
        Schedule(run)


def test_a_function_that_fails_later_is_told_with_its_step():
    schedule = StepFunction(function=lambda step: 1 - step if step == 2 else 1 - step % 2)
    planned = Schedule(
        Experiment(plan=PLAN, data="digits", optimizer=SGD(0.1), steps=STEPS, schedule=schedule)
    )
    assert planned.at(1)[0]["lr"] == 0.0
    with pytest.raises(OwnObjectError, match=r"of step 2 is -1\.0"):
        planned.at(2)


def test_options_of_a_step_before_are_those_that_it_had():
    """A run may be set back."""
    schedule = LRScheduler("StepLR", step_size=2, gamma=0.5)
    fields = dict(plan=PLAN, data="synthetic", optimizer=SGD(lr=0.8), steps=STEPS)
    found = Schedule(Experiment(**fields, schedule=schedule))
    rates = [found.at(step)[0]["lr"] for step in (4, 0, 1, 3, 3, 2)]
    assert rates == [0.2, 0.8, 0.8, 0.4, 0.4, 0.4]
