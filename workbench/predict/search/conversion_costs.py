"""What conversions cost, all at once and in rounds."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from workbench.plan.layout import Conversion, Layout
from workbench.plan.routing import crossings, returned
from workbench.predict.duration import Speeds, conversion_seconds
from workbench.predict.rows import Rows
from workbench.predict.search.trellis import Floats, Readings


class Ways(NamedTuple):
    """Seconds, one way and the other."""

    forward: float
    backward: float

    def plus(self, other: "Ways") -> "Ways":
        return Ways(self.forward + other.forward, self.backward + other.backward)


# The rows of passes that differ, and how many there are of each.
Passes = list[tuple[Rows, int]]


class ConversionCosts:
    """Of any conversion.

    Args:
        speeds: of all ranks.
        weights: of each rank in the mean of times.
        passes: of a step.
        rounds: for each size of groups, the passes of a tail in rounds.
    """

    def __init__(
        self, speeds: Speeds, weights: Floats, passes: Passes, rounds: Sequence[Passes]
    ) -> None:
        self.speeds, self.weights = speeds, weights
        self.passes, self.rounds = passes, rounds
        self._chains: dict[Hashable, list[tuple[Conversion, ...]]] = {}
        self._crossed: dict[tuple[Conversion, int, bool, bool], list[Ways]] = {}

    def of(self, step: Conversion, width: int, learns: bool, tails: bool) -> list[Ways]:
        """Seconds of a conversion, and where it can be in a tail, in rounds of each size."""
        key = (step, width, learns, tails)
        known = self._crossed.get(key)
        if known is None:
            every = (self.passes, *(self.rounds if tails else ()))
            known = [self._in(passes, step, width, learns) for passes in every]
            self._crossed[key] = known
        return known

    def steps(
        self,
        source: Layout,
        readings: Readings,
        shape: tuple[int, ...],
        per_sample: int,
        *,
        ends: bool,
    ) -> list[Conversion]:
        """The conversions of a value; readers whose conversions start alike share them.

        Args:
            source: where it lies.
            readings: of those who read it.
            shape: one sample's.
            per_sample: rows of dimension 0 for each sample.
            ends: whether the model returns it.
        """
        chains: list[tuple[Conversion, ...]] = []
        for target in {layout for layout, _ in readings}:
            summands = tuple(sorted(sums for layout, sums in readings if layout == target))
            chains += self._chain(source, target, summands, shape, per_sample)
        if ends:
            chains += self._chain(source, returned(source, shape), (False,), shape, per_sample)
        prefixes = {chain[: end + 1] for chain in chains for end in range(len(chain))}
        return [prefix[-1] for prefix in prefixes]

    def _chain(
        self,
        source: Layout,
        target: Layout,
        summands: tuple[bool, ...],
        shape: tuple[int, ...],
        per_sample: int,
    ) -> list[tuple[Conversion, ...]]:
        key = (source, target, summands, shape, per_sample)
        if key not in self._chains:
            self._chains[key] = crossings(source, target, summands, shape, per_sample)
        return self._chains[key]

    def _in(self, passes: Passes, step: Conversion, width: int, learns: bool) -> Ways:
        forward = backward = 0.0
        for rows, times in passes:
            crossed = conversion_seconds(step, rows, width, self.speeds)
            forward += times * self._mean(crossed.forward_s)
            if crossed.forward is not None:
                forward += times * self._mean(crossed.forward.seconds)
            if learns:
                backward += times * self._mean(crossed.backward_s)
            if learns and crossed.backward is not None:
                backward += times * self._mean(crossed.backward.seconds)
        return Ways(forward, backward)

    def _mean(self, seconds: Floats) -> float:
        return float(self.weights @ seconds)


def passes_of(batches: Sequence[tuple[int, ...]]) -> Passes:
    return [(Rows(rows), batches.count(rows)) for rows in dict.fromkeys(batches)]


def more_of(plain: Ways, others: Sequence[Ways], count: int) -> tuple[float, ...]:
    """What each of the others takes more, one way and the other; nothing where there are none."""
    every = others or [plain] * count
    return tuple(more for way in every for more in (way[0] - plain[0], way[1] - plain[1]))
