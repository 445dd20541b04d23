"""What computes: how long a layer takes on it."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from pydantic import Field

from workbench.plan.errors import MachineError
from workbench.plan.value import Value
from workbench.plan.work import Work


@dataclass(frozen=True, slots=True)
class Estimate:
    """How long a layer takes.

    Attributes:
        forward_s: seconds of its forward pass.
        backward_s: of its backward pass.
        error: relative half width of the band around both in which 95 % are expected.
        source: "measured" at these rows, "interpolated" between other numbers of rows of the
            same layer shape, or "estimated" from other shapes or from the device's figures.
    """

    forward_s: float
    backward_s: float
    error: float
    source: Literal["measured", "interpolated", "estimated"]


class Sample(Value):
    """One measured layer shape."""

    _refusal: ClassVar[type[ValueError]] = MachineError

    kind: str
    key: str
    """As in `Work`."""
    precision: str
    rows: int = Field(ge=0)
    flops: float = Field(ge=0)
    bytes: float = Field(ge=0)
    forward_s: float = Field(ge=0)
    backward_s: float = Field(ge=0)
    error: float = Field(default=0.0, ge=0)
    """Relative half width of the 95 % confidence interval of forward and backward together."""


class Device(Value):
    """What one rank computes on."""

    _refusal: ClassVar[type[ValueError]] = MachineError

    name: str
    kind: Literal["cpu", "cuda"]
    memory_bytes: int = Field(gt=0)
    bandwidth: float = Field(gt=0)
    """Bytes per second of memory, streaming, as attained."""
    flops: dict[str, float]
    """Floating-point operations per second of matrix products as attained, by precision."""
    call_s: float = Field(default=0.0, ge=0)
    """Overhead of one operation, as the host starts it."""
    update_s_per_byte: dict[str, float] = Field(default_factory=dict)
    """Seconds for each byte of parameters, by the optimizer's kind."""
    load_s_per_byte: float = Field(default=0.0, ge=0)
    """Seconds for each byte of a step's images."""
    step_s: float = Field(default=0.0, ge=0)
    """What every step costs besides."""
    samples: tuple[Sample, ...] = ()
    source: str = ""
    """Where the figures come from."""

    def seconds(self, work: Work) -> Estimate:
        """How long a layer takes, from the samples where there are any of its kind."""
        known = self._estimates.get(work)
        if known is None:
            known = self._estimates[work] = self._estimate(work)
        return known

    @cached_property
    def _estimates(self) -> dict[Work, Estimate]:
        return {}

    def _estimate(self, work: Work) -> Estimate:
        rate = self.flops.get(work.precision) or max(self.flops.values())
        forward = self.call_s + max(work.flops / rate, work.bytes / self.bandwidth)
        backward = forward * (2 if work.weight_bytes else 1)
        return Estimate(forward, backward, 0.5, "estimated")
