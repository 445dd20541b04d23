"""What the layers of a cut model know about the batch in hand."""

import hashlib
from dataclasses import dataclass, field

from workbench.plan.placement import Shard


@dataclass
class BatchContext:
    """The rows that each rank of the world holds now; set once before each forward pass.

    The one mutable thing that a cut model's layers share.

    Attributes:
        rank: this rank in the world.
        rows: rows of the batch in hand on each rank of the world; a rank may have none.
        first_row: index of rank 0's first row in the global batch of the step.
        seed: of the experiment.
        step: the optimizer step that this batch is for.
    """

    rank: int
    rows: tuple[int, ...]
    first_row: int = 0
    seed: int = 0
    step: int = 0
    _groups: dict[tuple[int, int], Shard] = field(default_factory=dict, repr=False)

    def set(self, rows: tuple[int, ...], *, first_row: int = 0, step: int = 0) -> None:
        """Announces the batch that the next forward pass is for."""
        if len(rows) != len(self.rows):
            raise ValueError(f"rows of {len(rows)} ranks for a world of {len(self.rows)}")
        self.rows, self.first_row, self.step = rows, first_row, step
        self._groups.clear()

    @property
    def global_rows(self) -> int:
        """Rows of all ranks together."""
        return sum(self.rows)

    def group_rows(self, group_size: int, per_sample: int = 1) -> Shard:
        """How the rows of this rank's shard group lie over its members."""
        known = self._groups.get((group_size, per_sample))
        if known is None:
            first = self.rank - self.rank % group_size
            members = self.rows[first : first + group_size]
            known = Shard(0, tuple(rows * per_sample for rows in members))
            self._groups[group_size, per_sample] = known
        return known

    def span(self, group_size: int) -> tuple[int, int]:
        """(first, count) in the global batch, of the rows that this rank's group holds."""
        first = self.rank - self.rank % group_size
        count = sum(self.rows[first : first + group_size])
        return self.first_row + sum(self.rows[:first]), count

    def key(self, name: str) -> int:
        """64 bits that depend on the seed, the step and a layer's name, and on no split."""
        content = f"{self.seed}/{self.step}/{name}".encode()
        return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
