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

    ring                  2(p-1) α + 2(p-1)/p nβ + (p-1)/p nγ + S
    direct                2 α      + 2(p-1)/p nβ + (p-1)/p nγ + S
    halving-doubling      2 log2(p) α + 2(p-1)/p nβ + (p-1)/p nγ + S
    recursive doubling    log2(p) (α + nβ + nγ) + S
    parameter server      2 α      + 2(p-1) nβ + (p-1) nγ + S
    hierarchical          direct within each host, and of the hosts through their wires

A codec reduces β's bytes, not γ's: what was decoded is added. In all of these but the last two each
byte is encoded once and decoded (2p-1)/p times by a rank, in 3p-1 pieces of n/p: what it sends in
the reduce-scatter, its own sum, which it decodes like every other rank, and the others' sums. A
server decodes what all others send, and encodes once for them.

They hold where everything divides; `workbench.predict.traffic.collective_costs` has the bytes where
it does not. Direct has as many messages as the ring, all at once: their overhead on a rank is in
its α.

Sources: Pipe-SGD (Li et al. 2018, arXiv:1811.03619), sec. 4, for ring and parameter server: its
body was not available to us, the formulas are recalled, and the ring's is Patarasuk and Yuan's
(2009, doi:10.1016/j.jpdc.2008.09.002) but for S. Thakur, Rabenseifner and Gropp 2005,
doi:10.1177/1094342005051521, for the others; direct: MiMatrix (Chen et al. 2018,
arXiv:1802.02326); two levels: Goyal et al. 2017, arXiv:1706.02677, sec. 4.1.

The seconds are these counts times the constants of a network:

    l_comm = rounds α + received β + added γ + calls S

linear in the constants, so that they can be fitted. Source: Pipe-SGD (Li et al. 2018,
arXiv:1811.03619), sec. 4, for the symbols.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from math import ceil, log2
from types import MappingProxyType
from typing import Any, Self

import numpy as np

from workbench.plan.collective.algorithm import dry_run
from workbench.plan.collective.codec import AnyCodec
from workbench.plan.experiment.sync import AnySync, ParameterServer, Synchronous, warm
from workbench.plan.extension.user_object import Own
from workbench.plan.io.errors import ExperimentError, MachineError
from workbench.plan.io.units import bandwidth_of
from workbench.plan.machine.device import Link


@dataclass(frozen=True)
class Terms:
    """The counts of each constant, on the rank or link that is busy longest.

    Attributes:
        rounds: successive exchanges (α).
        received: bytes that pass the busiest link one way (β).
        added: bytes that are added to others (γ).
        calls: collectives (S).
        encoded: bytes that a rank encodes, as counted before encoding.
        decoded: bytes that a rank decodes, as counted after decoding.
        pieces: pieces that are encoded or decoded.
    """

    rounds: float = 0.0
    received: float = 0.0
    added: float = 0.0
    calls: float = 0.0
    encoded: float = 0.0
    decoded: float = 0.0
    pieces: float = 0.0

    def __add__(self, other: "Terms") -> "Terms":
        mine, theirs = (
            [getattr(terms, field.name) for field in fields(self)] for terms in (self, other)
        )
        return Terms(*(a + b for a, b in zip(mine, theirs, strict=True)))

    def in_calls(self, count: int) -> "Terms":
        """The same bytes in `count` equal collectives, one after another: L of Pipe-SGD, sec. 4.

        The cost of a collective is paid for each of them.
        """
        return replace(
            self,
            rounds=count * self.rounds,
            calls=count * self.calls,
            pieces=count * self.pieces,
        )


@dataclass(frozen=True)
class Network:
    """The constants of a network.

    Attributes:
        bandwidth: 1 / β, in bytes per second one way; may be given as text, "10gbit".
        latency_s: α, the seconds of a message.
        reduction_s_per_byte: γ, the seconds to add up a byte.
        synchronisation_s: s, the seconds of a collective.

    Raises:
        MachineError: a bandwidth that is not positive, or a negative time.
    """

    bandwidth: float
    latency_s: float = 0.0
    reduction_s_per_byte: float = 0.0
    synchronisation_s: float = 0.0

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "bandwidth", bandwidth_of(self.bandwidth))
        except ValueError as error:
            raise MachineError(f"Network: {error}") from None
        if not self.bandwidth > 0:
            raise MachineError(
                f"Network: bandwidth is a positive number of bytes/s, got {self.bandwidth}"
            )
        for name in ("latency_s", "reduction_s_per_byte", "synchronisation_s"):
            if not getattr(self, name) >= 0:
                raise MachineError(f"Network: {name} is 0 or more, got {getattr(self, name)}")

    @classmethod
    def of(cls, link: Link) -> Self:
        """The constants of a machine's link, whose latency contains S."""
        return cls(link.bandwidth, link.latency_s, link.reduction_s_per_byte)

    def seconds(self, terms: Terms) -> float:
        """Seconds of an exchange without coding."""
        return (
            terms.rounds * self.latency_s
            + terms.received / self.bandwidth
            + terms.added * self.reduction_s_per_byte
            + terms.calls * self.synchronisation_s
        )


@dataclass(frozen=True)
class Coding:
    """The cost of a codec on a rank (γ_codec); free by default.

    Attributes:
        encode_s_per_byte: seconds to encode a byte, as counted before encoding.
        decode_s_per_byte: seconds to decode a byte, as counted after decoding.
        piece_s: seconds for every piece that is encoded or decoded, whatever its size.

    Raises:
        MachineError: a negative time.
    """

    encode_s_per_byte: float = 0.0
    decode_s_per_byte: float = 0.0
    piece_s: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            if not getattr(self, each.name) >= 0:
                raise MachineError(
                    f"Coding: {each.name} is 0 or more, got {getattr(self, each.name)}"
                )

    def seconds(self, terms: Terms) -> float:
        """Seconds of an exchange's coding."""
        return (
            terms.encoded * self.encode_s_per_byte
            + terms.decoded * self.decode_s_per_byte
            + terms.pieces * self.piece_s
        )


FREE = Coding()


ITEM_BYTES = 4  # gradients are added up in fp32

Exchange = Callable[[int, float, AnyCodec | None], Terms]


def ratio(codec: AnyCodec | None, length: float) -> float:
    """Bytes that are sent for a byte of fp32, where `length` values are encoded together."""
    if codec is None:
        return 1.0
    values = max(1, ceil(length))
    return codec.encoded_bytes(values) / (ITEM_BYTES * values)


def ring(workers: int, nbytes: float, codec: AnyCodec | None = None) -> Terms:
    """The counts of a ring all-reduce, in which a rank receives only from the one before it."""
    return _in_segments(workers, nbytes, codec, rounds=2 * (workers - 1))


def direct(workers: int, nbytes: float, codec: AnyCodec | None = None) -> Terms:
    """The counts of a direct all-reduce, which has two rounds for any number of workers."""
    return _in_segments(workers, nbytes, codec, rounds=2)


def halving_doubling(workers: int, nbytes: float, codec: AnyCodec | None = None) -> Terms:
    """The counts of an all-reduce by recursive halving and doubling over a power of two of workers.

    The other workers are folded in: two rounds more, and for the busiest link the whole gradient
    more.
    """
    power = 2 ** (workers.bit_length() - 1)
    terms = _in_segments(power, nbytes, codec, rounds=2 * log2(power))
    if workers == power:
        return terms
    once = ratio(codec, nbytes / ITEM_BYTES) * nbytes
    coded = 2 * nbytes if codec else 0.0
    pieces = 4 if codec else 0
    return terms + Terms(2, once, nbytes, 0, coded, coded, pieces)


def run_dry(own: Own, workers: int, nbytes: float, codec: AnyCodec | None = None) -> Terms:
    """The counts of an algorithm of a person's own: of the longest chains of what it exchanges.

    Raises:
        OwnObjectError: it cannot be loaded, or its ranks do not fit together.
    """
    if workers == 1:
        return Terms()
    found = dry_run(own, ceil(nbytes / ITEM_BYTES), ITEM_BYTES, workers, codec)
    counts, longest = zip(found.encoded, found.decoded, found.pieces, strict=True), found.longest
    encoded, decoded, pieces = max(counts, key=sum)
    added = longest.additions * ITEM_BYTES
    coded = encoded * ITEM_BYTES, decoded * ITEM_BYTES, pieces
    return Terms(longest.rounds, longest.bytes, added, 1, *coded)


def recursive_doubling(workers: int, nbytes: float, codec: AnyCodec | None = None) -> Terms:
    """The counts of an all-reduce in which pairs swap all that they have, at distances 1, 2, 4, ...

    Raises:
        ExperimentError: the number of workers is no power of two.
    """
    if workers & (workers - 1):
        raise ExperimentError(f"recursive doubling needs 2, 4, 8, ... workers, got {workers}")
    rounds = log2(workers)
    swapped, part = rounds * nbytes, ratio(codec, nbytes / ITEM_BYTES)
    coded = swapped if codec else 0.0
    pieces = 2 * rounds if codec else 0.0
    calls = float(workers > 1)
    return Terms(rounds, swapped * part, swapped, calls, coded, coded, pieces)


def parameter_server(workers: int, nbytes: float, codec: AnyCodec | None = None) -> Terms:
    """The counts of a reduce to one worker and a broadcast; its link carries all gradients."""
    if workers == 1:
        return Terms()
    others, part = workers - 1, ratio(codec, nbytes / ITEM_BYTES)
    carried, added = 2 * others * nbytes * part, others * nbytes
    if codec is None:
        return Terms(2, carried, added, 1)
    # The others encode before it decodes; then it encodes, and they decode with it.
    return Terms(2, carried, added, 1, 2 * nbytes, others * nbytes + nbytes, workers + 2)


def hierarchical(workers: int, ranks_per_host: int, nbytes: float) -> tuple[Terms, Terms]:
    """The counts of an all-reduce on two levels: (within a host, across hosts).

    The ranks of a host share one network link, and each sends its part of the gradient through it,
    so that 2(m-1)/m n bytes cross it with m hosts.

    Raises:
        ExperimentError: the hosts would have unequal numbers of workers.
    """
    if workers % ranks_per_host:
        raise ExperimentError(f"{workers} workers do not fill hosts of {ranks_per_host}")
    hosts = workers // ranks_per_host
    within = direct(ranks_per_host, nbytes)
    if hosts == 1:
        return within, Terms()
    crossing, own = 2 * (hosts - 1) / hosts * nbytes, nbytes / ranks_per_host
    rounds = 1 if hosts == 2 else 2
    return within, Terms(rounds, crossing, (hosts - 1) / hosts * own, 1)


FLAT: Mapping[str, Exchange] = MappingProxyType(
    {
        "ring": ring,
        "direct": direct,
        "halving_doubling": halving_doubling,
        "recursive_doubling": recursive_doubling,
        "parameter_server": parameter_server,
    }
)
"""The algorithms without hosts, by name: functions of (workers, gradient bytes, codec)."""


def _in_segments(workers: int, nbytes: float, codec: AnyCodec | None, *, rounds: float) -> Terms:
    """The counts of a reduce-scatter and an all-gather of p segments."""
    if workers == 1:
        return Terms()
    segment = nbytes / workers
    moved = (workers - 1) * segment
    received = 2 * moved * ratio(codec, segment / ITEM_BYTES)
    if codec is None:
        return Terms(rounds, received, moved, 1)
    decoded = (2 * workers - 1) * segment
    return Terms(rounds, received, moved, 1, nbytes, decoded, 3 * workers - 1)


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
