"""What each choice costs in memory and in rounds, behind the columns of time of `costs.py`.

    resident    bytes of parameters and buffers, gradients that stay, and the optimizer's state
    beside      bytes that the layer keeps for its backward pass and that no other layer sees
    output      bytes of its output, where it keeps that itself
    first       bytes of the first value that it reads, as it reads it
    second      bytes of the second one
    converted   the same of the first one where it is read in another layout than it was given
    other       the same of the second one
    transient   bytes of gradients and workspace that are there at once in its backward pass
    space       of these, activations' gradients and workspace
    arrived     of these, activations' gradients
    made        bytes of gradients of its weights that are made beside those of earlier rounds
    settled     bytes of gradients of its weights that are there from its backward pass on
    entries     in how many layouts of groups values are read that lay in own rows
    over        the size of those groups, added up
    apart       1 where the layer reads a group's rows, 0 where it reads its own
    added up    seconds to add its weights' gradients to those of the round before
    parted      seconds to add up the gradients of several readers; not in rounds, where their tail
                begins with the value

and then, for each size k of groups, seconds that rounds "B/K" over k take more, one way and the
other, and those that rounds "B" do: each of them works on fewer rows, and begins anew.

When each of these is held is said in `recompute.py`. They count only where a memory limit binds.
"""

from collections.abc import Sequence

from workbench.plan.choice import LayerPlan
from workbench.plan.graph import Layer
from workbench.plan.layout import ROWS, Conversion, Layout
from workbench.predict.search.bounds.conversion_costs import PassSeconds
from workbench.predict.search.bounds.costs import TIMES, StepCosts
from workbench.predict.search.space.trellis import Cost, Readings

RESIDENT = TIMES
BESIDE, OUTPUT, FIRST, SECOND, CONVERTED, OTHER, TRANSIENT, SPACE, ARRIVED, MADE = range(7, 17)
SETTLED, ENTRIES, OVER, APART, ADDED_UP, PARTED, ROUNDS = range(17, 24)
"""The first of the columns of rounds."""


class MemoryCosts:
    """Costs of one step in time, memory and rounds.

    Args:
        times: the costs in time.
    """

    def __init__(self, times: StepCosts) -> None:
        self.times = times
        self._nothing = (0.0,) * (ROUNDS + 2 * len(times.rounds))
        self._plain = (0.0,) * (2 * len(times.rounds))
        self._crossed: dict[tuple[Conversion, int, bool], list[PassSeconds]] = {}

    def layer(self, layer: Layer, choice: LayerPlan | None, read: Layout, given: Layout) -> Cost:
        """Of computing a layer and holding its weights, their gradients and what it keeps."""
        times = self.times
        alone = times.alone(layer, choice, read, given)
        placed = alone.flow.weights
        of_weights = times.of_weights.of(layer, placed)
        room = times.footprints.of(layer, choice, read, given, placed)
        more = self._plain
        if layer.name in times.tailable:
            plain = times.computing(alone, layer, times.passes)
            others = [times.computing(alone, layer, passes) for passes in times.rounds]
            more = _more(plain, others)
        count = sum(often for _, often in times.passes)
        last = of_weights.settled, 0.0, 0.0, float(read != ROWS), count * of_weights.added, 0.0
        return *times.layer(layer, choice, read, given), of_weights.held, *room, *last, *more

    def converted(self, layer: Layer, name: str, read: Layout) -> Cost:
        """Of what a layer reads in another layout than it was given."""
        cost = list(self._nothing)
        slots = self.times.footprints.slots(layer)
        if layer.name in self.times.learns and name in slots:
            place = CONVERTED + slots.index(name)
            cost[place] = self.times.footprints.read(layer, name, read)
        return tuple(cost)

    def value(self, name: str, source: Layout, readings: Readings, carried: bool) -> Cost:
        """Of a layer's output: its conversions, and the loss where the model returns it."""
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
        """As of `StepCosts`."""
        return self.times.alike(name)

    def _more_of(self, name: str, steps: Sequence[Conversion]) -> tuple[float, ...]:
        """What a value's conversions take more in rounds of each size."""
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
    """What each of the others takes more, one way and the other."""
    return tuple(more for way in others for more in (way[0] - plain[0], way[1] - plain[1]))


def _added(some: Sequence[float], more: Sequence[float]) -> tuple[float, ...]:
    return tuple(one + other for one, other in zip(some, more, strict=True))
