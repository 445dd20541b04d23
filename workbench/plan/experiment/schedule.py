"""Schedules as values: the learning rate as a function of the step alone.

So a run that is resumed, or goes on under another plan, has the rates that it would have had. One
that follows a metric is refused by its name.

A rate that is requested of a running run scales the whole schedule, by its ratio to the rate of the
experiment.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from workbench.plan.experiment.optimizers import AnyOptimizer, Rprop, at_rate
from workbench.plan.extension.user_object import OwnObject, OwnObjectError
from workbench.plan.io.value import Value, by_name


class WarmupCosine(Value):
    """A linear rise to the optimizer's rate, and half a cosine down from it.

    With w steps of warmup and n in total, step t = 0, 1, ... has the optimizer's rate times

        (t + 1) / (w + 1)                                             before step w
        final + (1 - final) (1 + cos(pi (t - w) / (n - w))) / 2       from then on

    Source: Loshchilov and Hutter 2017 (arXiv:1608.03983) for the cosine, Goyal et al. 2017
    (arXiv:1706.02677) for the warmup; `LinearLR` and then `CosineAnnealingLR` of torch are the
    same.
    """

    kind: Literal["warmup_cosine"] = "warmup_cosine"
    warmup: int = Field(default=0, ge=0)
    """The number of steps before the whole rate."""
    total: int | None = Field(default=None, ge=1)
    """The number of steps after which the rate would be the final one; None: those of the
    experiment."""
    final: float = Field(default=0.0, ge=0, le=1)
    """The last rate, as a part of the optimizer's."""

    def factor(self, step: int, steps: int) -> float:
        """What the optimizer's rate is multiplied by in a step of an experiment of so many."""
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        passed = (step - self.warmup) / ((self.total or steps) - self.warmup)
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * passed)) / 2

    def check(self, optimizer: AnyOptimizer, steps: int) -> None:
        """Checks that it is a schedule of so many steps with this optimizer.

        Raises:
            ValueError: it is not; the text says what would be.
        """
        _check_reads_rates(optimizer)
        if self.total is not None and self.total < steps:
            raise ValueError(
                f"schedule: WarmupCosine is at its end after total={self.total} steps, and there "
                f"are steps={steps}; leave total out, or give {steps} or more"
            )
        if self.warmup >= (self.total or steps):
            raise ValueError(
                f"schedule: warmup={self.warmup} leaves none of {self.total or steps} steps for "
                f"the cosine; give less"
            )

    def over(self, steps: int) -> Self:
        """The same, with what follows from the steps of an experiment said: of so many."""
        return self if self.total is not None else self.replace(total=steps)

    def at_rate(self, base: float, lr: float) -> Self:
        """The same where the optimizer has another rate, to which all here is relative."""
        return self


class StepFunction(Value):
    """A function of your own: in step t = 0, 1, ... the optimizer's rate times `function(t)`.

    It is called for the same step on every rank, and again after a resume, so that it must give the
    same each time; as the `lr_lambda` of torch's `LambdaLR`.

    Raises:
        ExperimentError: for step 0 it gives no number >= 0; or, in an experiment, for the last one.
    """

    kind: Literal["function"] = "function"
    function: OwnObject
    """step -> a number >= 0."""

    @model_validator(mode="after")
    def _gives_a_number(self) -> Self:
        if self.function.held is not None:
            self.factor(0)
        return self

    def factor(self, step: int) -> float:
        """What the optimizer's rate is multiplied by in a step."""
        try:
            factor = float(self.function.loaded(step))
        except OwnObjectError:
            raise
        except Exception as error:  # whatever the function raises
            why = f"{type(error).__name__}: {error}"
            raise OwnObjectError(f"schedule {self.function} of step {step}: {why}") from error
        if not 0 <= factor < math.inf:
            raise OwnObjectError(
                f"schedule {self.function} of step {step} is {factor}: it must be a number >= 0, "
                "by which the optimizer's rate is multiplied"
            )
        return factor

    def check(self, optimizer: AnyOptimizer, steps: int) -> None:
        """Checks that it is a schedule of so many steps with this optimizer."""
        _check_reads_rates(optimizer)
        if self.function.held is not None:
            self.factor(steps - 1)

    def over(self, steps: int) -> Self:
        """The same, with what follows from the steps of an experiment said, which is nothing."""
        return self

    def at_rate(self, base: float, lr: float) -> Self:
        """The same where the optimizer has another rate, to which all here is relative."""
        return self


def as_schedule(given: object) -> object:
    """A function, or "module:function", for the `StepFunction` of it."""
    if isinstance(given, str) and ":" in given:
        return StepFunction(function=given)
    if callable(given) and not isinstance(given, type):
        return StepFunction(function=given)
    return given


@dataclass(frozen=True)
class _Known:
    """The arguments of one of torch's: needed, possible, and which of them are rates."""

    needed: tuple[str, ...] = ()
    possible: tuple[str, ...] = ()
    rates: tuple[str, ...] = ()


_MOMENTUM = ("cycle_momentum", "base_momentum", "max_momentum")

KNOWN: Mapping[str, _Known] = {
    "StepLR": _Known(("step_size",), ("gamma",)),
    "MultiStepLR": _Known(("milestones",), ("gamma",)),
    "ConstantLR": _Known((), ("factor", "total_iters")),
    "LinearLR": _Known((), ("start_factor", "end_factor", "total_iters")),
    "ExponentialLR": _Known(("gamma",)),
    "PolynomialLR": _Known((), ("total_iters", "power")),
    "CosineAnnealingLR": _Known(("T_max",), ("eta_min",), ("eta_min",)),
    "CosineAnnealingWarmRestarts": _Known(("T_0",), ("T_mult", "eta_min"), ("eta_min",)),
    "CyclicLR": _Known(
        ("base_lr", "max_lr"),
        ("step_size_up", "step_size_down", "mode", "gamma", "scale_mode", *_MOMENTUM),
        ("base_lr", "max_lr"),
    ),
    "OneCycleLR": _Known(
        ("max_lr",),
        (
            *("total_steps", "epochs", "steps_per_epoch", "pct_start", "anneal_strategy"),
            *(*_MOMENTUM, "div_factor", "final_div_factor", "three_phase"),
        ),
        ("max_lr",),
    ),
}

_FUNCTION = "give the function itself, schedule=f, where f(step) is what the rate is multiplied by"
_SEVERAL = f"it takes other schedulers, of which an experiment has one; or {_FUNCTION}"
REFUSED = {
    "reducelronplateau": "it follows a metric, and rates are to be a function of the step alone, "
    "so that a run that goes on has those that it would have had",
    "lambdalr": _FUNCTION,
    "multiplicativelr": _FUNCTION,
    "sequentiallr": _SEVERAL,
    "chainedscheduler": _SEVERAL,
}
FUNCTIONS = ("scale_fn",)
"""Arguments of known ones that are functions."""

_COUNTS = (
    *("step_size", "T_max", "T_0", "total_steps", "epochs", "steps_per_epoch"),
    *("step_size_up", "step_size_down", "total_iters"),
)
_TOTAL_ITERS = 5
"""torch's default."""


class LRScheduler(Value):
    """A scheduler of `torch.optim.lr_scheduler`, by name and arguments.

        wb.LRScheduler("StepLR", step_size=30, gamma=0.1)
        wb.LRScheduler("OneCycleLR", max_lr=0.1)

    It is stepped once after each step of the run. Those that move momentum too do. `OneCycleLR` has
    the steps of the experiment, unless `total_steps`, or `epochs` and `steps_per_epoch`, say
    otherwise.

    Args:
        name: the name of its class.

    Raises:
        ExperimentError: there is none of this name, or it is not a function of the step alone; or
            an argument is missing or unknown.
    """

    model_config = ConfigDict(extra="allow")

    kind: Literal["lr_scheduler"] = "lr_scheduler"
    name: str
    """The class of `torch.optim.lr_scheduler`; given first, without its name."""

    def __init__(self, /, name: str, **arguments: Any) -> None:
        super().__init__(name=name, **arguments)

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        if self.name not in KNOWN:
            why = REFUSED.get(self.name.lower())
            said = f": {why}" if why else ""
            raise ValueError(
                f"no schedule {self.name!r}{said}; use WarmupCosine or one of {', '.join(KNOWN)}"
            )
        given, known = self.arguments, KNOWN[self.name]
        valid = (*known.needed, *known.possible)
        for name in given:
            if name not in valid:
                why = "is a function" if name in FUNCTIONS else "is no argument of it"
                raise ValueError(f"{self.name}: {name} {why}; valid are {', '.join(valid)}")
        if missing := [name for name in known.needed if name not in given]:
            raise ValueError(f"{self.name} needs {', '.join(missing)}")
        for name in _COUNTS:
            value = given.get(name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{self.name}: {name} must be an integer >= 1, got {value!r}")
        # As they are read from TOML again, which has no None and no tuples.
        extra = self.__pydantic_extra__ or {}
        extra.clear()
        extra.update({n: list(v) if isinstance(v, tuple) else v for n, v in given.items()})
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """What torch's takes beside the optimizer."""
        return {name: v for name, v in (self.model_extra or {}).items() if v is not None}

    def check(self, optimizer: AnyOptimizer, steps: int) -> None:
        """Checks that it is a schedule of so many steps with this optimizer.

        Raises:
            ValueError: it is not; the text says what would be.
        """
        _check_reads_rates(optimizer)
        given = self.over(steps).arguments
        if self.name == "OneCycleLR":
            total = given.get("total_steps")
            if total is None:
                parts = {n: given[n] for n in ("epochs", "steps_per_epoch") if n in given}
                if len(parts) < 2:
                    ((name, value),) = parts.items()
                    raise ValueError(
                        f"schedule: OneCycleLR has {name}={value} alone, and takes epochs with "
                        f"steps_per_epoch; give both, total_steps={steps}, or none of the three: "
                        "it then has the experiment's steps"
                    )
                total = math.prod(parts.values())
            if total < steps:
                raise ValueError(
                    f"schedule: OneCycleLR is at its end after {total} steps, and there are "
                    f"steps={steps}; give total_steps={steps} or more"
                )
        self._check_does_not_end_at_0(steps)
        if "cycle_momentum" in KNOWN[self.name].possible and given.get("cycle_momentum", True):
            self._check_momentum(optimizer)

    def over(self, steps: int) -> Self:
        """The same, with what follows from the steps of an experiment said: of so many."""
        given, names = self.arguments, ("total_steps", "epochs", "steps_per_epoch")
        if self.name != "OneCycleLR" or any(name in given for name in names):
            return self
        return type(self)(self.name, **given, total_steps=steps)

    def at_rate(self, base: float, lr: float) -> Self:
        """The same where the optimizer has another rate: rates here keep their ratio to it."""
        arguments = self.arguments
        for name in KNOWN[self.name].rates:
            value = arguments.get(name)
            if isinstance(value, Sequence):
                arguments[name] = [at_rate(one, base, lr) for one in value]
            elif value is not None:
                arguments[name] = at_rate(value, base, lr)
        return type(self)(self.name, **arguments)

    def _check_does_not_end_at_0(self, steps: int) -> None:
        """Whoever falls to 0 stays there, and all steps behind move nothing."""
        given = self.arguments
        falls = {
            "PolynomialLR": given.get("power", 1.0) != 0,
            "LinearLR": given.get("end_factor", 1) == 0,
        }
        total = given.get("total_iters", _TOTAL_ITERS)
        if falls.get(self.name) and total < steps:
            said = "" if "total_iters" in given else ", which is torch's default"
            raise ValueError(
                f"schedule: {self.name} is at 0 after total_iters={total} steps{said}, and there "
                f"are steps={steps}; give total_iters={steps} or more"
            )

    def _check_momentum(self, optimizer: AnyOptimizer) -> None:
        """Whoever has no momentum would get some, and does not remember any."""
        remedy = f"{self.name} moves momentum unless it has cycle_momentum=False"
        for one in optimizer.parted:
            options = one.options
            if "betas" not in options and not options.get("momentum"):
                raise ValueError(f"schedule: {remedy}, and {type(one).__name__} has none here")
        for name in ("base_momentum", "max_momentum"):
            value = self.arguments.get(name, 0.5)
            if not all(0 < one < 1 for one in (value if isinstance(value, list) else [value])):
                raise ValueError(f"schedule: {name} must be between 0 and 1, got {value}")


def _check_reads_rates(optimizer: AnyOptimizer) -> None:
    if isinstance(optimizer, Rprop):
        raise ValueError(
            "schedule: Rprop takes the learning rate for the size of its first step and finds all "
            "others itself, so that a schedule would do nothing; leave it out"
        )


AnySchedule = WarmupCosine | LRScheduler | StepFunction

RateSchedule = Annotated[
    Annotated[AnySchedule, Field(discriminator="kind")],
    by_name(
        "schedule",
        {"warmup_cosine": WarmupCosine},
        "LRScheduler(name, ...) and a function of the step",
        refused=REFUSED,
    ),
    BeforeValidator(as_schedule),
]
