"""Large pieces in portions that fit into a staging slot."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Portion:
    """Some rows of a matrix, and of its columns the part from `part / parts` on."""

    rows: slice
    part: int
    parts: int

    def of(self, matrix: Tensor) -> Tensor:
        """A view of this portion of `matrix`, whatever its width."""
        width = matrix.shape[1]
        begin, end = width * self.part // self.parts, width * (self.part + 1) // self.parts
        return matrix[self.rows, begin:end]


def portions_of(rows: int, width: int, limit: int) -> list[Portion]:
    """Cuts a matrix into portions of at most `limit` elements, whole rows where they fit."""
    if width <= limit:
        step = limit // width
        return [Portion(slice(i, min(i + step, rows)), 0, 1) for i in range(0, rows, step)]
    parts = -(-width // limit)
    return [Portion(slice(i, i + 1), p, parts) for i in range(rows) for p in range(parts)]
