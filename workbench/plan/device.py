"""What computes: how long a layer takes on it."""

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from workbench.plan.experience import Estimate, Experience, Rates
from workbench.plan.sample import Sample
from workbench.plan.value import MachineValue
from workbench.plan.work import Work

_KEPT = 2**16  # estimates


class Device(MachineValue):
    """What one rank computes on."""

    name: str
    kind: Literal["cpu", "cuda"]
    memory_bytes: int = Field(gt=0)
    bandwidth: float = Field(gt=0)
    """Bytes per second of memory, streaming, as attained."""
    flops: dict[str, Annotated[float, Field(gt=0)]] = Field(min_length=1)
    """Floating-point operations per second of matrix products as attained, by precision."""
    call_s: float = Field(default=0.0, ge=0)
    """Overhead of one operation, as the host starts it."""
    update_s_per_byte: dict[str, float] = Field(default_factory=dict)
    """Seconds for each byte of parameters, by the optimizer's kind."""
    coding_s_per_byte: dict[str, float] = Field(default_factory=dict)
    """Seconds to encode and decode each byte of a gradient, by the codec's name."""
    load_s_per_byte: float = Field(default=0.0, ge=0)
    """Seconds for each byte of a step's images."""
    recomputed_s: float = Field(default=0.0, ge=0)
    """What a layer that is computed again costs besides: keeping track of what it saves."""
    step_s: float = Field(default=0.0, ge=0)
    """What every step costs besides."""
    samples: tuple[Sample, ...] = ()
    source: str = ""
    """Where the figures come from."""

    def seconds(self, work: Work) -> Estimate:
        """How long a layer takes, from the samples where there are any of its kind.

        Estimates are kept, so that asking again costs next to nothing.
        """
        known = self._known.get(work)
        if known is None:
            if len(self._known) >= _KEPT:
                self._known.clear()
            known = self._known[work] = self._experience.estimate(work)
        return known

    @cached_property
    def _known(self) -> dict[Work, Estimate]:
        return {}

    @cached_property
    def _experience(self) -> Experience:
        return Experience(self.samples, Rates(self.flops, self.bandwidth, self.call_s))

    def __hash__(self) -> int:
        return hash((self.name, self.memory_bytes, self.bandwidth, len(self.samples)))

    def __getstate__(self) -> dict[Any, Any]:
        state = super().__getstate__()
        fields = type(self).model_fields
        kept = {name: value for name, value in state["__dict__"].items() if name in fields}
        return {**state, "__dict__": kept}
