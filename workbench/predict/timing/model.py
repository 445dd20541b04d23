"""Seconds of an iteration under every step strategy, on one network, in closed form."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from types import MappingProxyType
from typing import Any

from workbench.plan.codec import Codec
from workbench.plan.errors import ExperimentError, MachineError
from workbench.plan.sync import LocalSGD, ParameterServer, Pipelined, Sync, Synchronous
from workbench.predict.timing.exchanges import FLAT, hierarchical
from workbench.predict.timing.iterations import (
    Compute,
    pipelined_s,
    pipelined_total_s,
    ratio_r,
    synchronous_s,
)
from workbench.predict.timing.terms import FREE, Coding, Network, Terms

AS_RING = ("auto", "backend")
"""Algorithms that are left to the library: what gloo and nccl do for large gradients is a ring."""

ONCE = Synchronous(algorithm="ring", bucket_bytes=2**62)
"""D-Sync of Pipe-SGD: one ring all-reduce of the whole gradient after the backward pass."""


@dataclass(frozen=True)
class TimingModel:
    """Pipe-SGD's models, sec. 4, for values of `Experiment.sync`.

    It knows one worker's compute and one network, both the same for all; the schedule simulator of
    `predict` knows layers, buckets and unequal ranks.

    Attributes:
        workers: p.
        gradient_bytes: n, of fp32.
        compute: of one iteration on one worker.
        network: between workers, or their hosts.
        coding: what each codec costs, by its name; one that is not there is taken as free.
        ranks_per_host: for "hierarchical".
        within: the network within a host, for "hierarchical".

    Raises:
        MachineError: no workers or bytes, or hosts with several ranks and no network within them.
    """

    workers: int
    gradient_bytes: float
    compute: Compute
    network: Network
    coding: Mapping[str, Coding] = field(default_factory=lambda: MappingProxyType({}))
    ranks_per_host: int = 1
    within: Network | None = None

    def __post_init__(self) -> None:
        if self.workers < 1 or not self.gradient_bytes > 0:
            raise MachineError(
                "a timing model has 1 or more workers and a gradient of more than 0 bytes, got "
                f"{self.workers} and {self.gradient_bytes}"
            )
        if self.ranks_per_host < 1 or (self.ranks_per_host > 1 and self.within is None):
            raise MachineError(
                f"{self.ranks_per_host} ranks_per_host need a network `within` a host"
            )

    def at(self, **fields: Any) -> "TimingModel":
        """The same with other values of some fields, `bandwidth` (bytes/s) among them."""
        if "bandwidth" in fields:
            fields["network"] = replace(self.network, bandwidth=fields.pop("bandwidth"))
        return replace(self, **fields)

    def communication_s(self, sync: Sync = ONCE) -> float:
        """l_comm: of one iteration's exchange if nothing else runs, coding included.

        Raises:
            ExperimentError: an exchange without a closed form.
        """
        name, codec, calls = self._exchange(sync)
        seconds = self._seconds(name, codec, calls)
        return seconds / sync.every if isinstance(sync, LocalSGD) else seconds

    def coding_s(self, sync: Sync) -> float:
        """The part of l_comm in which a rank encodes and decodes."""
        name, codec, calls = self._exchange(sync)
        return 0.0 if codec is None else self._coding_s(codec, self._flat(name, codec, calls))

    def step_s(self, sync: Sync = ONCE) -> float:
        """Of one iteration in the steady state."""
        seconds = self.communication_s(sync)
        if _is_late(sync):
            return pipelined_s(self.compute, seconds)
        calls = 1 if isinstance(sync, LocalSGD) else self._exchange(sync)[2]
        return synchronous_s(self.compute, seconds, calls)

    def total_s(self, sync: Sync, iterations: int) -> float:
        """Of a run: a pipeline's fill and drain included, and its synchronous warm-up."""
        if not isinstance(sync, Pipelined) or sync.width == 1:
            return iterations * self.step_s(sync)
        early, late = min(sync.warmup, iterations), max(0, iterations - sync.warmup)
        warm = Synchronous(
            algorithm=sync.algorithm, codec=sync.codec, bucket_bytes=sync.bucket_bytes
        )
        total = early * self.step_s(warm)
        if late:
            total += pipelined_total_s(self.compute, self.communication_s(sync), late)
        return total

    def r(self, sync: Sync = ONCE) -> float:
        """l_comm / (l_up + l_comp)."""
        return ratio_r(self.compute, self.communication_s(sync))

    def bandwidth_for(self, r: float, sync: Sync = ONCE) -> float:
        """The bandwidth, in bytes/s, at which `r` is as given.

        Raises:
            MachineError: latency, additions and coding alone take longer than that.
        """
        fixed = self.at(bandwidth=float("inf")).communication_s(sync)
        left = r * self.compute.seconds - fixed
        if not left > 0:
            raise MachineError(
                f"r = {r:g} is {r * self.compute.seconds:.3g} s of communication, and all but the "
                f"transfer takes {fixed:.3g} s"
            )
        transfer = self.at(bandwidth=1.0).communication_s(sync) - fixed
        return transfer / left

    def _exchange(self, sync: Sync) -> tuple[str, Codec | None, int]:
        """What is exchanged how, and L, in how many calls."""
        calls = max(1, ceil(self.gradient_bytes / sync.bucket_bytes))
        match sync:
            case LocalSGD():
                return "ring", None, calls
            case ParameterServer():
                return "parameter_server", None, calls
            case Synchronous() | Pipelined():
                name = "ring" if sync.algorithm in AS_RING else sync.algorithm
                return name, sync.codec, 1 if _is_late(sync) else calls

    def _seconds(self, name: str, codec: Codec | None, calls: int) -> float:
        if name == "hierarchical" and codec is None and self.within is not None:
            levels = hierarchical(self.workers, self.ranks_per_host, self.gradient_bytes)
            inner, outer = (terms.in_calls(calls) for terms in levels)
            return self.within.seconds(inner) + self.network.seconds(outer)
        terms = self._flat(name, codec, calls)
        coding = 0.0 if codec is None else self._coding_s(codec, terms)
        return self.network.seconds(terms) + coding

    def _flat(self, name: str, codec: Codec | None, calls: int) -> Terms:
        if name not in FLAT:
            raise ExperimentError(
                f"algorithm {name!r} has a closed form without a codec, and where a network "
                "`within` hosts is given"
            )
        return FLAT[name](self.workers, self.gradient_bytes, codec).in_calls(calls)

    def _coding_s(self, codec: Codec, terms: Terms) -> float:
        return self.coding.get(codec.name, FREE).seconds(terms)


def _is_late(sync: Sync) -> bool:
    return isinstance(sync, Pipelined) and sync.width > 1
