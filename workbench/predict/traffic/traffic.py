"""What every collective of a step brings to each rank: calls, messages, bytes; exact.

The rows are those of the workbench's recorder, which counts what a rank receives.
"""

from dataclasses import dataclass

from workbench.program.collective_call import Phase, Purpose


@dataclass(frozen=True)
class Collective:
    """All calls of one collective in a step, on all ranks.

    Attributes:
        op: "all_gather", "reduce_scatter", "all_to_all", "all_reduce", "reduce" or "broadcast".
        layer: for which it is.
        phase: of the step.
        purpose: of its groups.
        groups: the ranks that take part together.
        calls: on each rank of the world.
        messages: non-empty pieces that each rank receives.
        bytes: their size.
        every: steps from one to the next; 1: it is in every step.
    """

    op: str
    layer: str
    phase: Phase
    purpose: Purpose
    groups: tuple[tuple[int, ...], ...]
    calls: tuple[int, ...]
    messages: tuple[int, ...]
    bytes: tuple[int, ...]
    every: int = 1


@dataclass(frozen=True)
class Traffic:
    """The collectives of one step.

    Attributes:
        collectives: in the order of the step.
    """

    collectives: tuple[Collective, ...]

    def received_bytes(self, rank: int) -> float:
        """Of one rank, in a step; what comes every few steps counts its part."""
        return sum(c.bytes[rank] / c.every for c in self.collectives)

    @property
    def most_received_bytes(self) -> float:
        """Of the rank that receives most."""
        return max(self.received_bytes(rank) for rank in range(self.world_size))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.collectives[0].bytes)

    def rows(
        self, rank: int, step: int | None = None
    ) -> tuple[tuple[str, str, str, str, int, int, int], ...]:
        """(group, op, layer, phase, calls, messages, bytes) of one rank, as a recorder has them.

        Args:
            rank: which.
            step: of which step, since local SGD's averaging is not in every one; None: of one
                that has all of them.
        """
        found: list[tuple[str, str, str, str, int, int, int]] = []
        for one in self.collectives:
            ranks = next(group for group in one.groups if rank in group)
            name = f"{one.purpose}({','.join(map(str, ranks))})"
            counts = (one.calls[rank], one.messages[rank], one.bytes[rank])
            due = step is None or (step + 1) % one.every == 0
            if one.calls[rank] and due:
                found.append((name, one.op, one.layer, one.phase, *counts))
        return tuple(found)
