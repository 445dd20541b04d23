"""The costs of each choice in memory and in rounds, behind the columns of time of `costs.py`.

    resident    bytes of parameters and buffers, gradients that stay, and the optimizer's state
    beside      bytes that only this layer saves for its backward pass
    output      bytes of its output, if it saves that
    first       bytes of its first input, as it reads it
    second      bytes of its second input
    converted   bytes of the first input if it is read in another layout than produced
    other       bytes of the second input if so
    transient   bytes of gradients and workspace alive at once in its backward pass
    space       the part of these for activations' gradients and workspace
    arrived     the part of these for activations' gradients
    made        bytes of its weights' gradients made in addition to those of earlier rounds
    settled     bytes of its weights' gradients alive from its backward pass on
    entries     how many layouts of groups values are read in that were own rows
    over        the sum of the sizes of those groups
    apart       1 where the layer reads a group's rows, 0 where it reads its own
    added up    seconds to add its weights' gradients to those of the round before
    parted      seconds to add up the gradients of several readers; not in rounds, where their tail
                begins with the value

and then, for each size k of groups, the further seconds of rounds "B/K" over k, forward and
backward, and those of rounds "B": each round works on fewer rows, and has its own overhead.

When each of these is held is described in `recompute.py`. They count only under a tight limit.
"""

from collections.abc import Sequence

from workbench.plan.graph.graph import Layer
from workbench.plan.placement.layer_plan import LayerPlan
from workbench.plan.placement.placement import ROWS, Conversion, Layout
from workbench.predict.search.bounds.conversion_costs import PassSeconds
from workbench.predict.search.bounds.costs import TIMES, StepCosts
from workbench.predict.search.space.trellis import Cost, Readings

RESIDENT = TIMES
BESIDE, OUTPUT, FIRST, SECOND, CONVERTED, OTHER, TRANSIENT, SPACE, ARRIVED, MADE = range(7, 17)
SETTLED, ENTRIES, OVER, APART, ADDED_UP, PARTED, ROUNDS = range(17, 24)
"""The first of the columns of rounds."""


class MemoryCosts:
    """The costs of one step in time, memory and rounds.

    Args:
        times: the costs in time.
    """

    def __init__(self, times: StepCosts) -> None:
        self.times = times
        self._nothing = (0.0,) * (ROUNDS + 2 * len(times.rounds))
        self._plain = (0.0,) * (2 * len(times.rounds))
        self._crossed: dict[tuple[Conversion, int, bool], list[PassSeconds]] = {}

    def layer(self, layer: Layer, choice: LayerPlan | None, read: Layout, given: Layout) -> Cost:
        """The cost of computing a layer, its weights, their gradients and what it saves."""
        times = self.times
        alone = times.alone(layer, choice, read, given)
        of_weights = times.weights_of(layer, alone)
        room = times.footprints.of(layer, choice, read, given, alone)
        more = self._plain
        if layer.name in times.tailable:
            plain = times.computing(alone, layer, times.passes)
            others = [times.computing(alone, layer, passes) for passes in times.rounds]
            more = _more(plain, others)
        count = sum(often for _, often in times.passes)
        last = of_weights.settled, 0.0, 0.0, float(read != ROWS), count * of_weights.added, 0.0
        return *times.layer(layer, choice, read, given), of_weights.held, *room, *last, *more

    def converted(self, layer: Layer, name: str, read: Layout) -> Cost:
        """The cost of an input that is read in another layout than it was produced in."""
        cost = list(self._nothing)
        slots = self.times.footprints.slots(layer)
        if layer.name in self.times.learns and name in slots:
            place = CONVERTED + slots.index(name)
            cost[place] = self.times.footprints.read(layer, name, read)
        return tuple(cost)

    def value(self, name: str, source: Layout, readings: Readings, carried: bool) -> Cost:
        """The cost of a layer's output: its conversions, and the loss if the model returns it."""
        times = self.times
        if times.shape(name)[1] == 0:
            return self._nothing
        groups = {read.group_size for read, _ in readings if read != ROWS}
        over = groups - {source.group_size}
        entries = float(len(over)), float(sum(over))
        nothing = (0.0,) * (ENTRIES - TIMES)
        more = self._plain
        if name in times.tailable or name in times.before_tails:
            more = self._more_of(name, times.steps(name, source, readings, carried))
        if name in times.graph.outputs:
            plain = times.loss(name, source, times.passes)
            losses = [times.loss(name, source, passes) - plain for passes in times.rounds]
            more = _added(more, [loss for loss in losses for _ in range(2)])
        cost = times.value(name, source, readings, carried)
        parted = times.added(name, source, readings) if name in times.before_tails else 0.0
        return *cost, *nothing, *entries, 0.0, 0.0, parted, *more

    def alike(self, name: str) -> object:
        """The key of `StepCosts.alike`."""
        return self.times.alike(name)

    def _more_of(self, name: str, steps: Sequence[Conversion]) -> tuple[float, ...]:
        """The further seconds of a value's conversions in rounds of each size."""
        times, found = self.times, self._plain
        width, learns = times.itemsizes[name], times.comes_back(name)
        for step in steps:
            if step.source == ROWS and name in times.before_tails:
                continue  # beside a tail, rounds need not take more
            key = (step, width, learns)
            if key not in self._crossed:
                self._crossed[key] = [
                    times.conversions.within(passes, step, width, learns) for passes in times.rounds
                ]
            plain = times.conversions.of(step, width, learns)
            found = _added(found, _more(plain, self._crossed[key]))
        return found


def _more(plain: PassSeconds, others: Sequence[PassSeconds]) -> tuple[float, ...]:
    """The further seconds of each of the others, forward and backward."""
    return tuple(more for way in others for more in (way[0] - plain[0], way[1] - plain[1]))


def _added(some: Sequence[float], more: Sequence[float]) -> tuple[float, ...]:
    return tuple(one + other for one, other in zip(some, more, strict=True))
