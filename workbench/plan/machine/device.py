"""A device: the time of a layer on it, from measurements of layer shapes."""

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from workbench.plan.machine.experience import Estimate, Experience, Rates, Sample
from workbench.plan.machine.link import Bandwidth
from workbench.plan.machine.work import Work
from workbench.plan.machine.workspace import Needed, Workspace
from workbench.plan.value import MachineValue

_KEPT = 2**16  # estimates


class Device(MachineValue):
    """The device that one rank computes on."""

    name: str
    """What it is called, for people."""
    kind: Literal["cpu", "cuda"]
    """The kind of processor."""
    memory_bytes: int = Field(gt=0)
    """The bytes of its memory."""
    bandwidth: Bandwidth
    """Attained bytes per second of streaming memory access."""
    flops: dict[str, Annotated[float, Field(gt=0)]] = Field(min_length=1)
    """Attained floating-point operations per second of matrix products, by precision."""
    call_s: float = Field(default=0.0, ge=0)
    """Seconds of overhead for one kernel launch."""
    update_s_per_byte: dict[str, float] = Field(default_factory=dict)
    """Seconds to update each byte of parameters, by the optimizer's kind."""
    coding_s_per_byte: dict[str, float] = Field(default_factory=dict)
    """Seconds to encode and decode each byte of a gradient, by the codec's name."""
    load_s_per_byte: float = Field(default=0.0, ge=0)
    """Seconds to load each byte of a step's images."""
    recomputed_s: float = Field(default=0.0, ge=0)
    """Seconds of overhead for each recomputed layer, which tracks what it saves."""
    step_s: float = Field(default=0.0, ge=0)
    """Seconds of the fixed cost of every step."""
    samples: tuple[Sample, ...] = ()
    """The times of layers that were measured on it."""
    workspaces: tuple[Workspace, ...] = ()
    """What kernels of layers take beside their tensors, as measured on it."""
    sharers: int = Field(default=1, ge=1)
    """The ranks that compute on it, where it is a GPU."""
    library_bytes: int = Field(default=0, ge=0)
    """The bytes that libraries keep there once they have computed, such as cuBLAS."""
    source: str = ""
    """The origin of the figures."""

    def seconds(self, work: Work) -> Estimate:
        """The time of a layer, from the samples where there are any of its kind.

        Estimates are cached.
        """
        known = self._known.get(work)
        if known is None:
            if len(self._known) >= _KEPT:
                self._known.clear()
            known = self._known[work] = self._experience.estimate(work)
        return known

    def workspace(self, work: Work) -> Needed | None:
        """What a layer's kernels take beside their tensors; None: it was not measured."""
        known = self._workspaces.get((work.key, work.precision))
        return None if known is None else known.at(work.rows)

    @cached_property
    def _workspaces(self) -> dict[tuple[str, str], Workspace]:
        return {(one.key, one.precision): one for one in self.workspaces}

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
