"""What a run computes in, and what its losses are scaled by where that is fp16.

fp16 has the range of 6e-8 to 65504. Gradients of activations are often smaller than that, and are
lost; so the backward pass begins with the loss times a scale, and gradients of weights, which are
fp32, are divided by it before they are used. Where some gradient is then no number, the scale was
too large: the step updates nothing, on any rank, and the next one has a smaller scale.

Source: Micikevicius et al. 2018 (arXiv:1710.03740); the rules of `torch.amp.GradScaler`.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from workbench.plan.experiment.sync import OwnStrategy, Sync, Synchronous
from workbench.plan.value import Value

Precision = Literal["fp32", "bf16", "fp16", "fp64"]
_OF_TORCH = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float64": "fp64",
    "double": "fp64",
}


def as_precision(given: object) -> object:
    """The name of a precision in any case, and torch's types and their names, for the precision."""
    name = str(given).lower().removeprefix("torch.")
    return _OF_TORCH.get(name, name if isinstance(given, str) else given)


HALVES: tuple[Precision, ...] = ("bf16", "fp16")
"""Those that are computed by autocast: in 16 bits, with weights and sums of gradients in fp32."""

LARGEST_SCALE = 2.0**127  # of fp32, in which the scale is kept
Scale = Annotated[float, Field(gt=0, le=LARGEST_SCALE, allow_inf_nan=False)]


class LossScale(Value):
    """A loss scale that follows the gradients, by the rules of `torch.amp.GradScaler`.

    A step whose gradients overflow updates nothing, and the scale shrinks; after so many updates
    in a row it grows. Both it and their count are part of a checkpoint.

    Raises:
        ExperimentError: a field has a value with which the scale cannot follow.
    """

    init_scale: Scale = 2.0**16
    """The scale of the first step."""
    growth_factor: float = Field(default=2.0, gt=1, allow_inf_nan=False)
    """What the scale is multiplied by after `growth_interval` updates in a row."""
    backoff_factor: float = Field(default=0.5, gt=0, lt=1)
    """What the scale is multiplied by when a gradient is no number."""
    growth_interval: int = Field(default=2000, ge=1, lt=2**31)
    """The number of updates in a row after which the scale grows."""

    @model_validator(mode="after")
    def _has_a_least(self) -> Self:
        if self.init_scale < LEAST_SCALE:
            raise ValueError(
                f"init_scale must be at least {LEAST_SCALE:g}, the least scale that a run goes on "
                f"with, got {self.init_scale:g}"
            )
        return self


LEAST_SCALE = 1e-4
"""A run whose scale has shrunk below this has diverged: its gradients are numbers at no scale.

Source: the default of fairseq's `--min-loss-scale`.
"""


def check_scaled(precision: Precision, given: object, sync: Sync) -> None:
    """Checks that a loss scale has a use, and that a step of fp16 can be skipped.

    Args:
        precision: the precision of the experiment.
        given: its loss scale, if any.
        sync: its strategy.

    Raises:
        ValueError: it cannot; the text says why, and what is valid.
    """
    if precision != "fp16":
        if given is not None:
            raise ValueError(
                f"loss_scale lifts gradients into the range of fp16, and precision {precision!r} "
                "has a range that needs none; leave it out, or set precision='fp16'"
            )
        return
    valid = "it is valid with Synchronous and ParameterServer; precision='bf16' with all strategies"
    if isinstance(sync, OwnStrategy):
        raise ValueError(
            "precision: a step of fp16 whose gradients overflow is skipped on all ranks, and what "
            f"{sync.title} keeps of it, a strategy of one's own, is not known; {valid}"
        )
    if sync.timing.of_weights:
        raise ValueError(
            "precision: a step of fp16 whose gradients overflow is skipped on all ranks, and under "
            f"{sync.title} each steps by itself; {valid}"
        )
    if sync.timing.late:
        raise ValueError(
            "precision: the scale of fp16 follows the gradients of each step before the next, and "
            f"under {sync.title} they are late; {valid}"
        )
    if isinstance(sync, Synchronous) and sync.per_round:
        raise ValueError(
            "precision: a step of fp16 whose gradients overflow is skipped as a whole, and with "
            "per_round weights behind the gather have stepped before; it is valid with "
            "per_round=False"
        )
    _, codec = sync.summing
    if codec is not None:
        raise ValueError(
            "precision: gradients of fp16 travel scaled, and are infinite where they overflow, "
            f"which codec {codec.name!r} cannot tell; leave the codec out, or set precision='bf16'"
        )
