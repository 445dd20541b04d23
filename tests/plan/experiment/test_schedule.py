"""Schedules as values: what they are relative to, and what is refused."""

import pytest

from tests.plan.graphs import vgg
from workbench.plan.experiment.experiment import SGD, AdamW, Experiment, ParameterGroup, Rprop
from workbench.plan.experiment.schedule import LRScheduler, WarmupCosine
from workbench.plan.io.errors import ExperimentError
from workbench.plan.plans.plan import Plan

FIELDS = dict(
    plan=Plan.hybrid(vgg(), 4, 2), data="digits", optimizer=SGD(0.1, momentum=0.9), steps=10
)
CYCLE = LRScheduler("OneCycleLR", max_lr=[0.2, 0.4], total_steps=10, max_momentum=0.9)


@pytest.mark.parametrize(
    "schedule",
    [
        WarmupCosine(warmup=2),
        WarmupCosine(total=20, final=0.1),
        LRScheduler("MultiStepLR", milestones=(2, 4), gamma=0.5),
        LRScheduler("OneCycleLR", max_lr=0.2, epochs=2, steps_per_epoch=5, total_steps=None),
        LRScheduler("OneCycleLR", max_lr=0.2),
        "warmup_cosine",
        "math:exp",
    ],
)
def test_text_and_back(schedule):
    run = Experiment(**FIELDS, schedule=schedule)
    assert Experiment.from_toml(run.to_toml()) == run


def test_factors_by_hand():
    cosine = WarmupCosine(warmup=3, final=0.5)
    assert [cosine.factor(step, 7) for step in range(8)] == pytest.approx(
        [0.25, 0.5, 0.75, 1.0, 0.5 + 0.25 * (1 + 0.5**0.5), 0.75, 0.5 + 0.25 * (1 - 0.5**0.5), 0.5]
    )


def test_another_rate_scales_everything():
    optimizer = SGD(0.1, momentum=0.9, groups=[ParameterGroup("*.bias", lr=0.4)])
    run = Experiment(**FIELDS | dict(optimizer=optimizer), schedule=CYCLE)
    half = run.at_rate(0.05)
    assert half.optimizer.parted[0].lr == 0.05
    assert half.optimizer.parted[1].lr == pytest.approx(0.2)
    assert half.schedule.arguments["max_lr"] == pytest.approx([0.1, 0.2])
    assert run.at_rate(0.1) == run
    one = LRScheduler("CyclicLR", base_lr=0.1, max_lr=0.4, gamma=0.5)
    assert one.at_rate(0.1, 0.3) == one.replace(base_lr=0.3, max_lr=0.4 * (0.3 / 0.1))
    assert WarmupCosine().at_rate(0.1, 0.3) == WarmupCosine()


@pytest.mark.parametrize(
    "schedule",
    [
        WarmupCosine(total=10),
        WarmupCosine(warmup=9),
        LRScheduler("StepLR", step_size=1),
        LRScheduler("OneCycleLR", max_lr=1, epochs=5, steps_per_epoch=2),
        LRScheduler("OneCycleLR", max_lr=1),
        LRScheduler("PolynomialLR", total_iters=10),
        LRScheduler("PolynomialLR", total_iters=3, power=0),
        LRScheduler("LinearLR", end_factor=0.1),
        LRScheduler("LinearLR", end_factor=0, total_iters=10),
        LRScheduler("OneCycleLR", max_lr=1, total_steps=10, base_momentum=0.1, max_momentum=0.9),
    ],
)
def test_schedules_that_just_fit(schedule):
    assert Experiment(**FIELDS, schedule=schedule).schedule == schedule


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: LRScheduler("ReduceLROnPlateau"), "follows a metric.*use WarmupCosine or one of"),
        (lambda: LRScheduler("LambdaLR", lr_lambda=1), "give the function itself, schedule=f"),
        (lambda: LRScheduler("SequentialLR"), "takes other schedulers.*schedule=f"),
        (lambda: LRScheduler("steplr"), "no schedule 'steplr'; use"),
        (lambda: LRScheduler("StepLR"), "StepLR needs step_size"),
        (lambda: LRScheduler("StepLR", step_size=0), "integer >= 1, got 0"),
        (lambda: LRScheduler("PolynomialLR", total_iters="10"), "total_iters must be an integer"),
        (lambda: LRScheduler("StepLR", step_size=3, last_epoch=2), "last_epoch is no argument"),
        (lambda: LRScheduler("CyclicLR", base_lr=1, max_lr=2, scale_fn="x"), "is a function"),
    ],
)
def test_schedulers_that_are_refused(made, said):
    with pytest.raises(ExperimentError, match=said):
        made()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(steps=11, schedule=CYCLE), "end after 10 steps.*steps=11; give total_steps=11"),
        (dict(schedule=WarmupCosine(total=9)), "total=9 steps.*steps=10"),
        (dict(schedule=WarmupCosine(warmup=10)), "leaves none of 10 steps"),
        (
            dict(schedule=LRScheduler("OneCycleLR", max_lr=1, epochs=3)),
            "has epochs=3 alone.* give both, total_steps=10, or none",
        ),
        (
            dict(schedule=LRScheduler("OneCycleLR", max_lr=1, steps_per_epoch=30)),
            "has steps_per_epoch=30 alone",
        ),
        (
            dict(schedule=LRScheduler("OneCycleLR", max_lr=1, epochs=3, steps_per_epoch=3)),
            "end after 9 steps",
        ),
        (
            dict(schedule=LRScheduler("PolynomialLR", total_iters=9)),
            "PolynomialLR is at 0 after total_iters=9 steps, and there are steps=10; give total_it",
        ),
        (dict(schedule=LRScheduler("PolynomialLR")), "total_iters=5 steps, which is torch's def"),
        (
            dict(schedule=LRScheduler("LinearLR", end_factor=0)),
            "LinearLR is at 0 after total_iters",
        ),
        (dict(optimizer=SGD(0.1), schedule=CYCLE), "cycle_momentum=False, and SGD has none"),
        (dict(optimizer="adagrad", schedule=CYCLE), "Adagrad has none"),
        (dict(optimizer=Rprop(), schedule="warmup_cosine"), "Rprop .* would do nothing"),
        (dict(schedule=CYCLE.replace(base_momentum=0.0)), "base_momentum must be between 0 and 1"),
        (dict(schedule=CYCLE.replace(max_momentum=1.0)), "max_momentum must be between 0 and 1"),
        (dict(schedule=CYCLE.replace(max_momentum=[0.5, 1.0])), "max_momentum must be between"),
        (dict(schedule="ReduceLROnPlateau"), "follows a metric"),
        (dict(optimizer=Rprop(), schedule=lambda step: 1.0), "Rprop .* would do nothing"),
        (dict(schedule=lambda step: -1.0), "of step 0 is -1.0: it must be a number >= 0"),
        (dict(schedule=lambda step: 1 / step), "of step 0: ZeroDivisionError"),
        (dict(schedule=lambda step: float("nan")), "of step 0 is nan"),
        (dict(schedule=lambda step: [1.0, 0.5][step]), r"of step \d+: IndexError"),
    ],
)
def test_schedules_that_do_not_fit(fields, said):
    assert Experiment(**FIELDS | dict(optimizer=AdamW()), schedule=CYCLE).schedule == CYCLE
    with pytest.raises(ExperimentError, match=said):
        Experiment(**FIELDS | fields)


def test_the_first_steps_of_a_schedule_are_those_of_all():
    for schedule in (WarmupCosine(warmup=2), LRScheduler("OneCycleLR", max_lr=1)):
        assert schedule.over(10) == schedule.over(10).over(3) != schedule
    assert WarmupCosine(total=20).over(10) == WarmupCosine(total=20)
    assert CYCLE.over(3) == CYCLE
