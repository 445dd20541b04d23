"""Things as numbers, so that they are cheap to compare and to add up."""

from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Generic, TypeVar

import numpy as np

from workbench.predict.search.space.trellis import Cost, Floats, Integers

T = TypeVar("T", bound=Hashable)


class Numbers(Generic[T]):
    """Equal values have equal numbers, so that states are cheap to compare."""

    def __init__(self, *first: T) -> None:
        self.values: list[T] = []
        self._of: dict[T, int] = {}
        for value in first:
            self.of(value)

    def of(self, value: T) -> int:
        """The number of a value."""
        number = self._of.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


class Table:
    """Costs by their numbers."""

    def __init__(self) -> None:
        self._costs: Floats = np.zeros((0, 0))
        self._count = 0

    def add(self, cost: Cost) -> tuple[int, ...]:
        """The number of a cost."""
        if self._count == len(self._costs):
            more = np.zeros((max(1024, len(self._costs)), len(cost)))
            self._costs = more if not len(self._costs) else np.concatenate([self._costs, more])
        self._costs[self._count] = cost
        self._count += 1
        return (self._count - 1,)

    def summed(self, numbers: Sequence[tuple[int, ...]]) -> Floats:
        """The sums of the costs of these numbers."""
        counts = np.array([len(some) for some in numbers], dtype=np.int64)
        every = self._costs[np.fromiter(chain.from_iterable(numbers), dtype=np.int64)]
        found: Floats = np.add.reduceat(every, np.cumsum(counts) - counts, axis=0)
        return found


def distinct(rows: Integers) -> tuple[Integers, Integers]:
    """(index of one of each kind of row, for each row the number of its kind)."""
    code = np.zeros(len(rows), dtype=np.int64)
    for column in rows.T:
        if len(code) and int(code.max() + 1) * int(column.max() + 1) >= 2**62:
            code = np.unique(code, return_inverse=True)[1]
        code = code * (column.max(initial=0) + 1) + column
    _, first, which = np.unique(code, return_index=True, return_inverse=True)
    return first, which
