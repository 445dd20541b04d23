"""What the layers of a cut model know about the batch in hand."""

import hashlib
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from workbench.plan.placement.placement import Shard


@dataclass
class BatchContext:
    """The rows that each rank of the world holds now; set before each forward pass.

    In a step that runs its tail in rounds, that is the whole batch for the head, and then one
    round's rows after the other.

    The one mutable thing that a cut model's layers share.

    Attributes:
        rank: this rank in the world.
        rows: the rows of the batch in hand on each rank of the world; a rank may have none.
        first_row: the index of rank 0's first row in the global batch of the step.
        seed: the seed of the experiment.
        step: the optimizer step that this batch is for.
        starts: the index of each rank's first row; None: rows lie in the order of the ranks.
    """

    rank: int
    rows: tuple[int, ...]
    first_row: int = 0
    seed: int = 0
    step: int = 0
    starts: tuple[int, ...] | None = None
    _groups: dict[tuple[int, int], Shard] = field(default_factory=dict, repr=False)

    def set(
        self,
        rows: tuple[int, ...],
        *,
        first_row: int = 0,
        step: int = 0,
        starts: tuple[int, ...] | None = None,
    ) -> None:
        """Announces the batch that the next forward pass is for.

        Args:
            rows: the rows of the batch on each rank of the world.
            first_row: the index of rank 0's first row in the global batch of the step.
            step: the optimizer step that the batch is for.
            starts: the index of each rank's first row; None: rows lie in the order of the ranks.

        Raises:
            ValueError: there is not one number of rows, or one start, for each rank.
        """
        if len(rows) != len(self.rows) or (starts is not None and len(starts) != len(rows)):
            given = len(rows) if starts is None else f"{len(rows)} and starts of {len(starts)}"
            raise ValueError(
                f"rank {self.rank}: rows of {given} ranks for a world of {len(self.rows)}"
            )
        self.rows, self.first_row, self.step, self.starts = rows, first_row, step, starts
        self._groups.clear()

    @property
    def global_rows(self) -> int:
        """Rows of all ranks together."""
        return sum(self.rows)

    def group_rows(self, group_size: int, per_sample: int = 1) -> Shard:
        """Returns how the rows of this rank's shard group lie over its members."""
        known = self._groups.get((group_size, per_sample))
        if known is None:
            first = self.rank - self.rank % group_size
            members = self.rows[first : first + group_size]
            known = Shard(0, tuple(rows * per_sample for rows in members))
            self._groups[group_size, per_sample] = known
        return known

    def indices(
        self, group_size: int, per_sample: int = 1, device: torch.device | None = None
    ) -> Tensor:
        """Returns where the rows of this rank's group stand in the global batch, int64 [rows]."""
        first = self.rank - self.rank % group_size
        starts = self.starts or tuple(accumulate(self.rows, initial=self.first_row))
        parts = [
            torch.arange(start * per_sample, (start + rows) * per_sample, device=device)
            for start, rows in list(zip(starts, self.rows, strict=False))[
                first : first + group_size
            ]
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def key(self, name: str, index: int = 0) -> int:
        """Returns 64 bits that depend on the seed, the step and a layer's name, and on no split."""
        further = f"#{index}" if index else ""
        content = f"{self.seed}/{self.step}/{name}{further}".encode()
        return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
