"""What an exchange of gradients costs: counts, and the constants of a network that multiply them.

    l_comm = rounds α + received β + added γ + calls S

Linear in the constants, so that they can be fitted. Source: Pipe-SGD (Li et al. 2018,
arXiv:1811.03619), sec. 4, for the symbols.
"""

from dataclasses import dataclass, fields, replace
from typing import Self

from workbench.plan.errors import MachineError
from workbench.plan.link import Link


@dataclass(frozen=True)
class Terms:
    """How often each constant counts on the rank, or the link, that is busy longest.

    Attributes:
        rounds: exchanges that follow each other (α).
        received: bytes that pass the busiest link one way (β).
        added: bytes that are added to others (γ).
        calls: collectives (S).
        encoded: bytes that a rank encodes, counted as they were before.
        decoded: bytes that a rank decodes, counted as they are afterwards.
        pieces: parts in which it does both.
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

        What is paid for each collective is paid as often.
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
        bandwidth: 1 / β, in bytes per second one way.
        latency_s: α, of a message.
        reduction_s_per_byte: γ, of adding up.
        synchronisation_s: S, of a collective.

    Raises:
        MachineError: a bandwidth that is not positive, or a negative time.
    """

    bandwidth: float
    latency_s: float = 0.0
    reduction_s_per_byte: float = 0.0
    synchronisation_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise MachineError(
                f"Network: bandwidth is a positive number of bytes/s, got {self.bandwidth}"
            )
        for name in ("latency_s", "reduction_s_per_byte", "synchronisation_s"):
            if not getattr(self, name) >= 0:
                raise MachineError(f"Network: {name} is 0 or more, got {getattr(self, name)}")

    @classmethod
    def of(cls, link: Link) -> Self:
        """A machine's link, whose latency has all that a collective waits for."""
        return cls(link.bandwidth, link.latency_s, link.reduction_s_per_byte)

    def seconds(self, terms: Terms) -> float:
        """Of an exchange, coding aside."""
        return (
            terms.rounds * self.latency_s
            + terms.received / self.bandwidth
            + terms.added * self.reduction_s_per_byte
            + terms.calls * self.synchronisation_s
        )


@dataclass(frozen=True)
class Coding:
    """What a codec costs a rank (γ_codec); nothing unless said.

    Attributes:
        encode_s_per_byte: of what is encoded, counted as it was before.
        decode_s_per_byte: of what is decoded, counted as it is afterwards.
        piece_s: of every part that is encoded or decoded, whatever its size: in a ring, of a hop.

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
        """Of an exchange."""
        return (
            terms.encoded * self.encode_s_per_byte
            + terms.decoded * self.decode_s_per_byte
            + terms.pieces * self.piece_s
        )


FREE = Coding()
