"""The time of conversions between layouts."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from workbench.plan.placement.flow import crossings
from workbench.plan.placement.placement import Conversion, Layout
from workbench.predict.search.trellis import Floats, Readings
from workbench.predict.time.duration import Speeds, conversion_seconds
from workbench.program.rows import Rows


class PassSeconds(NamedTuple):
    """Seconds of the forward and of the backward pass."""

    forward: float
    backward: float


# The distinct rows of passes, and the number of passes with each.
Passes = list[tuple[Rows, int]]


class ConversionCosts:
    """The time of any conversion, in all passes of a step.

    Args:
        speeds: the devices and links of all ranks.
        weights: the weight of each rank in the mean of times [ranks].
        passes: the rows of a step's passes.
    """

    def __init__(self, speeds: Speeds, weights: Floats, passes: Passes) -> None:
        self.speeds, self.weights, self.passes = speeds, weights, passes
        self._chains: dict[Hashable, list[tuple[Conversion, ...]]] = {}
        self._crossed: dict[tuple[Conversion, int, bool], PassSeconds] = {}

    def of(self, step: Conversion, width: int, learns: bool) -> PassSeconds:
        """Seconds of a conversion in a step's passes, the mean over ranks.

        Args:
            step: the conversion.
            width: the bytes of an element.
            learns: whether a gradient comes back.
        """
        key = (step, width, learns)
        known = self._crossed.get(key)
        if known is None:
            known = self._crossed[key] = self._taken(step, width, learns)
        return known

    def steps(
        self,
        source: Layout,
        readings: Readings,
        shape: tuple[int, ...],
        per_sample: int,
        ends: Layout | None,
    ) -> list[Conversion]:
        """The conversions of a value; readers whose conversions start alike share them.

        Args:
            source: the layout in which the value is produced.
            readings: the layouts in which it is read.
            shape: the shape of one sample.
            per_sample: the rows of dimension 0 for each sample.
            ends: the layout in which the model returns the value; None: it does not.
        """
        chains: list[tuple[Conversion, ...]] = []
        for target in {layout for layout, _ in readings}:
            summands = tuple(sorted(sums for layout, sums in readings if layout == target))
            chains += self._chain(source, target, summands, shape, per_sample)
        if ends is not None:
            chains += self._chain(source, ends, (False,), shape, per_sample)
        if len(chains) == 1:
            return list(chains[0])
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

    def _taken(self, step: Conversion, width: int, learns: bool) -> PassSeconds:
        forward = backward = 0.0
        for rows, times in self.passes:
            crossed = conversion_seconds(step, rows, width, self.speeds)
            forward += times * self._mean(crossed.forward_s)
            if crossed.forward is not None:
                forward += times * self._mean(crossed.forward.seconds)
            if learns:
                backward += times * self._mean(crossed.backward_s)
            if learns and crossed.backward is not None:
                backward += times * self._mean(crossed.backward.seconds)
        return PassSeconds(forward, backward)

    def _mean(self, seconds: Floats) -> float:
        return float(self.weights @ seconds)


def passes_of(batches: Sequence[tuple[int, ...]]) -> Passes:
    return [(Rows(rows), batches.count(rows)) for rows in dict.fromkeys(batches)]
