"""The rows that a rank computes with."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    """This rank's rows of one micro-batch.

    Attributes:
        rows: rows of every rank.
        first_row: index of rank 0's first row in the step's global batch.
        images: [own rows, *input_shape].
        labels: [own rows].
    """

    rows: tuple[int, ...]
    first_row: int
    images: Tensor
    labels: Tensor
