"""The cost of all-reducing a gradient of n bytes over p workers, by algorithm, in closed form.

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
from dataclasses import dataclass, fields, replace
from math import ceil, log2
from types import MappingProxyType
from typing import Self

from workbench.plan.collective.algorithm import dry_run
from workbench.plan.collective.codec import AnyCodec
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
        for field in fields(self):
            if not getattr(self, field.name) >= 0:
                raise MachineError(
                    f"Coding: {field.name} is 0 or more, got {getattr(self, field.name)}"
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
