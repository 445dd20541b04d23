"""Seconds of an iteration for every synchronisation strategy, on one network, in closed form.

With l_up, l_for and l_back the times of update, forward and backward pass, l_comp = l_for + l_back,
and l_comm that of exchanging the gradient:

    D-Sync, PS-Sync            l_up + l_comp + l_comm
    D-Sync, L overlapped calls l_up + l_for + max(l_back + l_comm/L, l_back/L + l_comm)
    Pipe-SGD                   max(l_up + l_comp, l_comm), of any width K >= 2
    Pipe-SGD, no limits        (l_up + l_comp + l_comm) / K

Source: Pipe-SGD (Li et al. 2018, arXiv:1811.03619), sec. 4, of which only the abstract was
available to us: D-Sync and Pipe-SGD are recalled, the limit of one compute unit and one network is
also derived, as its throughput. The overlapped calls are derived: L equal parts that pass two
stages, backward and network, one after another.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil
from types import MappingProxyType
from typing import Any

import numpy as np

from workbench.plan.collective.codec import AnyCodec
from workbench.plan.experiment.sync import AnySync, ParameterServer, Synchronous, warm
from workbench.plan.extension.user_object import Own
from workbench.plan.io.errors import ExperimentError, MachineError
from workbench.predict.closed_form.exchanges import (
    FLAT,
    FREE,
    Coding,
    Network,
    Terms,
    hierarchical,
    run_dry,
)

ONCE = Synchronous(algorithm="ring", bucket_bytes=2**62)
"""D-Sync of Pipe-SGD: one ring all-reduce of the whole gradient after the backward pass."""


@dataclass(frozen=True)
class Compute:
    """The compute of a worker in an iteration.

    Attributes:
        update_s: l_up, the seconds of the update.
        forward_s: l_for, the seconds of the forward pass, loading included.
        backward_s: l_back, the seconds of the backward pass.

    Raises:
        MachineError: a negative time, or none at all.
    """

    update_s: float
    forward_s: float
    backward_s: float

    def __post_init__(self) -> None:
        if min(self.update_s, self.forward_s, self.backward_s) < 0 or self.seconds <= 0:
            raise MachineError(f"times of an iteration are positive, got {self}")

    @property
    def seconds(self) -> float:
        """l_up + l_comp, in seconds."""
        return self.update_s + self.forward_s + self.backward_s


@dataclass(frozen=True)
class TimingModel:
    """Pipe-SGD's timing models, sec. 4, for the values of `Experiment.sync`.

    It has one compute time and one network for all workers; the simulation in `predict` knows
    layers, buckets and unequal ranks.

    Attributes:
        workers: p, the number of workers.
        gradient_bytes: n, the bytes of the gradient in fp32.
        compute: the compute of one iteration on one worker.
        network: the network between workers, or between their hosts.
        coding: the cost of each codec, by its name; one without an entry is free.
        ranks_per_host: the ranks on a host, for "hierarchical".
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
        """The model with other values of some fields, `bandwidth` (bytes/s) among them."""
        if "bandwidth" in fields:
            fields["network"] = replace(self.network, bandwidth=fields.pop("bandwidth"))
        return replace(self, **fields)

    def communication_s(self, sync: AnySync = ONCE) -> float:
        """l_comm: seconds of one iteration's exchange if nothing else runs, coding included.

        Raises:
            ExperimentError: an exchange without a closed form.
        """
        name, codec, calls = self._exchange(sync)
        seconds = self._seconds(name, codec, calls)
        return seconds / sync.timing.every

    def coding_s(self, sync: AnySync) -> float:
        """The part of l_comm in which a rank encodes and decodes, in seconds."""
        name, codec, calls = self._exchange(sync)
        return 0.0 if codec is None else self._coding_s(codec, self._flat(name, codec, calls))

    def step_s(self, sync: AnySync = ONCE) -> float:
        """Seconds of one iteration in the steady state."""
        seconds, timing = self.communication_s(sync), sync.timing
        if timing.late:
            return pipelined_s(self.compute, seconds)
        if timing.of_weights:
            return synchronous_s(self.compute, seconds, 1)
        whole = synchronous_s(self.compute, seconds * timing.every, self._exchange(sync)[2])
        return (whole + (timing.every - 1) * self.compute.seconds) / timing.every

    def total_s(self, sync: AnySync, iterations: int) -> float:
        """Seconds of a run: a pipeline's fill and drain included, and its synchronous warm-up."""
        timing = sync.timing
        early = min(timing.warmup, iterations)
        total = early * self.step_s(warm(sync)) if early else 0.0
        if early == iterations:
            return total
        if not timing.late:
            return total + (iterations - early) * self.step_s(sync)
        late = pipelined_total_s(self.compute, self.communication_s(sync), iterations - early)
        return total + late

    def r(self, sync: AnySync = ONCE) -> float:
        """The ratio r = l_comm / (l_up + l_comp)."""
        return ratio_r(self.compute, self.communication_s(sync))

    def gain_bound(self, sync: AnySync = ONCE) -> float:
        """The largest speed-up of a pipeline over D-Sync with this exchange: `gain_bound(r)`."""
        return gain_bound(self.r(sync))

    def bandwidth_for(self, r: float, sync: AnySync = ONCE) -> float:
        """The bandwidth, in bytes/s, at which `r` has this value.

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

    def _exchange(self, sync: AnySync) -> tuple[str | Own, AnyCodec | None, int]:
        """(algorithm, codec, L): the exchange, and in how many collectives it is done."""
        calls = max(1, ceil(self.gradient_bytes / sync.bucket_bytes))
        if isinstance(sync, ParameterServer):
            return "parameter_server", None, calls
        algorithm, codec = sync.summing
        name = "ring" if algorithm in AS_RING or sync.timing.of_weights else algorithm
        return name, codec, 1 if sync.timing.late else calls

    def _seconds(self, name: str | Own, codec: AnyCodec | None, calls: int) -> float:
        if name == "hierarchical" and codec is None and self.within is not None:
            levels = hierarchical(self.workers, self.ranks_per_host, self.gradient_bytes)
            inner, outer = (terms.in_calls(calls) for terms in levels)
            return self.within.seconds(inner) + self.network.seconds(outer)
        terms = self._flat(name, codec, calls)
        coding = 0.0 if codec is None else self._coding_s(codec, terms)
        return self.network.seconds(terms) + coding

    def _flat(self, name: str | Own, codec: AnyCodec | None, calls: int) -> Terms:
        if isinstance(name, Own):
            return run_dry(name, self.workers, self.gradient_bytes, codec).in_calls(calls)
        if name not in FLAT:
            raise ExperimentError(
                f"algorithm {name!r} has a closed form without a codec, and where a network "
                "`within` hosts is given"
            )
        return FLAT[name](self.workers, self.gradient_bytes, codec).in_calls(calls)

    def _coding_s(self, codec: AnyCodec, terms: Terms) -> float:
        return self.coding.get(codec.name, FREE).seconds(terms)


def synchronous_s(compute: Compute, communication_s: float, calls: int = 1) -> float:
    """Seconds of an iteration of D-Sync or PS-Sync, its gradient in `calls` overlapped parts."""
    ready = max(
        compute.backward_s + communication_s / calls, compute.backward_s / calls + communication_s
    )
    return compute.update_s + compute.forward_s + ready


def pipelined_s(compute: Compute, communication_s: float) -> float:
    """Seconds of an iteration of Pipe-SGD: the slower of compute and network, which never waits.

    Two iterations in flight keep it busy, so that no width above 2 is faster.
    """
    return max(compute.seconds, communication_s)


def unlimited_s(compute: Compute, communication_s: float, width: int) -> float:
    """Seconds of an iteration of Pipe-SGD with a compute unit and a network for each in flight."""
    return (compute.seconds + communication_s) / width


def pipelined_total_s(compute: Compute, communication_s: float, iterations: int) -> float:
    """Seconds of a whole Pipe-SGD run, from the first iteration's begin to the last gradient.

    The pipeline fills in the first iteration and drains after the last.
    """
    steady = pipelined_s(compute, communication_s)
    return compute.seconds + communication_s + (iterations - 1) * steady


def ratio_r(compute: Compute, communication_s: float) -> float:
    """l_comm / (l_up + l_comp): below 1 a pipeline is bound by compute, above by the network."""
    return communication_s / compute.seconds


def gain_bound(r: float) -> float:
    """(1 + r) / max(1, r): the largest speed-up of a pipeline over D-Sync with the same exchange.

    At most 2, at r = 1. More can only come from a smaller l_comm, by a codec, or from comparing
    with another exchange. Derived.
    """
    return (1 + r) / max(1.0, r)


AS_RING = ("auto", "backend")
"""Algorithms that are left to the library: what gloo and nccl do for large gradients is a ring."""

_POINTS = 200

_SAME = 1e-9  # relative: closed forms that meet in max(...) meet exactly, but for rounding


@dataclass(frozen=True)
class Range:
    """The bandwidths, in bytes/s, between which one strategy is the fastest."""

    name: str
    low: float
    high: float


def fastest(model: TimingModel, systems: Mapping[str, AnySync]) -> str:
    """The name of the fastest strategy; of equally fast ones the first."""
    seconds = {name: model.step_s(sync) for name, sync in systems.items()}
    least = min(seconds.values())
    return next(name for name, value in seconds.items() if value <= least * (1 + _SAME))


def where_fastest(
    model: TimingModel, systems: Mapping[str, AnySync], low: float, high: float
) -> tuple[Range, ...]:
    """The ranges of bandwidth from `low` to `high`, ascending, with the fastest strategy of each.

    Args:
        model: the timing model, whose own bandwidth is ignored.
        systems: the strategies by name, the preferred ones first: they win where several are
            equally fast.
        low: the lowest bandwidth, in bytes/s, positive.
        high: the highest bandwidth, in bytes/s.
    """
    points = np.geomspace(low, high, _POINTS)
    winners = [fastest(model.at(bandwidth=point), systems) for point in points]
    ranges, begin = [], low
    for (left, before), (right, behind) in pairwise(zip(points, winners, strict=True)):
        if before != behind:
            end = _boundary(model, systems, before, left, right)
            ranges.append(Range(before, begin, end))
            begin = end
    return (*ranges, Range(winners[-1], begin, high))


def _boundary(
    model: TimingModel, systems: Mapping[str, AnySync], winner: str, left: float, right: float
) -> float:
    """The bandwidth at which `winner`, fastest at `left` and not at `right`, is overtaken."""
    while right > left * (1 + _SAME):
        middle = (left * right) ** 0.5
        if fastest(model.at(bandwidth=middle), systems) == winner:
            left = middle
        else:
            right = middle
    return float(right)
