"""Plans under a memory limit: a Lagrange multiplier on the peak, and a repair by recomputation.

A plan's memory is looked at in one backward pass, that of the layer where most is alive: what stays
from step to step, what the layers before save, the gradients of the layers behind, and what this
layer's own backward pass needs. At a price on these bytes a cheapest plan is a cheapest path of the
trellis, whose states also tell whether the layer before is recomputed: a recomputed layer saves
nothing but the inputs of its segment. At any price, that path's cost less the price of the limit is
a lower bound on all plans that fit; it is greatest where two paths cost the same, one that fits and
one that does not.

A plan that begins as the first of these paths, and goes on as the second from where there is room
for it on, is predicted in full, and by what that exceeds the limit, or leaves free, the room is
corrected. It recomputes in short segments, since a whole segment is alive in its backward pass.

All bytes are means over ranks, which no rank's peak can be below, and leave out what a plan may
share; so the bound holds for every plan, and is further off where the peak is elsewhere.

Source: Handler and Zang 1980, doi:10.1002/net.3230100403.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from workbench.plan.graph.graph import Graph, Layer
from workbench.plan.placement.layer_plan import LayerPlan
from workbench.plan.placement.placement import Layout
from workbench.predict.search.costs import LAYER, StepCosts
from workbench.predict.search.evaluation import Evaluator
from workbench.predict.search.footprint import Footprints
from workbench.predict.search.question import Question
from workbench.predict.search.relaxation import Terms, seconds_of
from workbench.predict.search.trellis import Cost, Floats, Readings, Stage, Trellis, Weighted

HELD, SETTLED, BESIDE, OUTPUT, FIRST, SECOND, CONVERTED, OTHER, TRANSIENT = range(9)
"""The bytes of each choice: what stays from step to step; gradients alive from the layer's backward
pass on; what only this layer saves; its output; its inputs as it reads them; the same, where it
reads them in another layout than they were produced in; what its backward pass needs beside."""

_MOMENTS, _HIGHER = 2, 1.002  # moments that are looked at, where more is alive by this factor
_MEETINGS, _CLOSE = 8, 1e-3  # a bound that rises by less is not worth another path
_LENGTHS, _NEAR = (16, 6, 24), 0.02  # of recomputed segments, until a plan is near the bound
_FILLS, _FULL = 4, 0.995  # memory of which less is free is full

Columns = tuple[int, ...]
# Of the layer before: it saves its own; a recomputed segment begins with it; or it is inside one.
_SAVED, _BEGUN, _INSIDE = range(3)
_STATES = 3
_SHORT = 6  # layers of a segment that is recomputed to repair a plan


class MemoryCosts:
    """The bytes of each choice, the mean over ranks, in the columns above."""

    def __init__(self, times: StepCosts) -> None:
        self.times = times

    def layer(self, layer: Layer, choice: LayerPlan | None, read: Layout, given: Layout) -> Cost:
        """The bytes of a layer's weights, of what it saves, and of its backward pass."""
        alone = self.times.alone(layer, choice, read, given)
        weights = self.times.weights_of(layer, alone)
        beside, output, first, second, transient = self.times.footprints.of(
            layer, choice, read, given, alone
        )
        return weights.held, weights.settled, beside, output, first, second, 0.0, 0.0, transient

    def converted(self, layer: Layer, name: str, read: Layout) -> Cost:
        """The bytes of an input that is read in another layout than it was produced in."""
        bytes_ = [0.0] * (TRANSIENT + 1)
        slots = self.times.footprints.slots(layer)
        if layer.name in self.times.learns and name in slots:
            bytes_[CONVERTED + slots.index(name)] = self.times.footprints.read(layer, name, read)
        return tuple(bytes_)

    def value(self, name: str, source: Layout, readings: Readings, carried: bool) -> Cost:
        """No bytes: a layer's output is among its own and its readers'."""
        return (0.0,) * (TRANSIENT + 1)

    def alike(self, name: str) -> object:
        """The key of `StepCosts.alike`."""
        return self.times.alike(name)


@dataclass(frozen=True)
class Saves:
    """Which columns of a layer's bytes are counted for it, so that each value is counted once.

    Attributes:
        takes_part: whether it has a backward pass.
        of_state: those that it saves, by the state before it.
        begins: those that are saved where a recomputed segment begins with it.
    """

    takes_part: bool
    of_state: tuple[Columns, ...] = ((), (), ())
    begins: Columns = ()


def saves_of(graph: Graph, footprints: Footprints) -> Iterator[Saves]:
    """What is counted for each layer, in order."""
    counted: dict[str, str] = {}  # by value, the layer for which it was counted
    before = ""
    needed = {
        root
        for layer in graph.layers
        for root, needs in zip(footprints.roots(layer), footprints.needs(layer), strict=True)
        if needs
    }
    for layer in graph.layers:
        if not (layer.rows > 0 and layer.name in footprints.learns):
            yield Saves(takes_part=False)
            continue
        of_state, begins = [[BESIDE, OUTPUT] for _ in range(_STATES)], list[int]()
        reads = zip(footprints.roots(layer), footprints.needs(layer), strict=True)
        for slot, (root, needs) in enumerate(reads):
            first, last = FIRST + slot, counted.get(root)
            if footprints.gives(root):
                if needs and last is None:  # it is known whether that was recomputed if just before
                    counted[root] = layer.name
                    of_state[_SAVED].append(CONVERTED + slot)
                    others = first if root == before else CONVERTED + slot
                    of_state[_BEGUN].append(others)
                    of_state[_INSIDE].append(others)
            elif root not in needed and last in (None, before):
                # Where the layer before begins a segment, this one does not.
                counted[root] = layer.name
                begins.append(first)
            elif needs and last is None:
                counted[root] = layer.name
                begins.append(first)
                for columns in of_state:
                    columns.append(first)
            elif needs and last == before:
                of_state[_INSIDE].append(first)
        before = layer.name
        yield Saves(
            True, (tuple(of_state[0]), tuple(of_state[1]), tuple(of_state[2])), tuple(begins)
        )


@dataclass(frozen=True)
class Recomputable:
    """A stage whose states tell whether the layer before it is recomputed, too.

    Attributes:
        stage: its edges; the place of each is that of an edge of the trellis.
        base: the edges of the trellis, with their seconds.
        recomputes: whether each edge recomputes the layer [edges].
        before: bytes that are alive in the backward pass of a later layer [edges].
        there: bytes that are alive in that of this layer [edges].
        behind: bytes that are alive in that of an earlier layer [edges].
    """

    stage: Stage
    base: Stage
    recomputes: Floats
    before: Floats
    there: Floats
    behind: Floats

    def seconds(self, mix: float, terms: Terms) -> Floats:
        """The mean of both bounds of an edge's time, as in `relaxation.py` [edges]."""
        again = (1 - mix) * self.recomputes * self.base.costs[self.stage.place, LAYER]
        return seconds_of(self.base, mix, terms)[self.stage.place] + again


def recomputable(base: Stage, held: Stage, saves: Saves, able: bool, last: bool) -> Recomputable:
    """The edges of a stage, each with the layer recomputed and not.

    Args:
        base: the edges with their seconds.
        held: the same edges with their bytes.
        saves: what is counted for the layer.
        able: whether it may be recomputed.
        last: whether it is the last one.
    """
    count, costs = len(base.source), held.costs
    kept, there, ways = [], [], list[tuple[int, int, bool]]()
    for before in range(_STATES):
        own = [*saves.of_state[before]]
        # In its segment a layer saves what does not come from outside, as it was made.
        begins = saves.begins if before == _SAVED else ()
        inside = [column for column in own if column not in (*begins, CONVERTED, OTHER)]
        if not saves.takes_part:
            ways.append((before, before, False))
        else:
            ways.append((before, _SAVED, False))
        kept.append(costs[:, own].sum(axis=1))
        there.append(costs[:, TRANSIENT])
        if saves.takes_part and able:
            ways.append((before, _BEGUN if before == _SAVED else _INSIDE, True))
            kept.append(costs[:, begins].sum(axis=1))
            there.append(costs[:, [TRANSIENT, *inside]].sum(axis=1))
    source = np.concatenate([_STATES * base.source + before for before, _, _ in ways])
    target = np.concatenate(
        [(base.target if last else _STATES * base.target + after) for _, after, _ in ways]
    )
    order = np.argsort(source, kind="stable")
    place = np.tile(np.arange(count), len(ways))[order]
    stage = Stage(
        _STATES * base.states,
        source[order],
        target[order],
        base.costs[:0],
        base.choice[place],
        place,
    )
    recomputes = np.repeat([float(again) for _, _, again in ways], count)[order]
    stays = costs[place, HELD]
    before_ = stays + np.concatenate(kept)[order]
    behind = stays + costs[place, SETTLED]
    return Recomputable(
        stage, base, recomputes, before_, before_ + np.concatenate(there)[order], behind
    )


@dataclass(frozen=True)
class Candidate:
    """A path, with lower bounds of its plan's time, and of its memory at one moment.

    Attributes:
        path: the edges of the stages, each recomputed or not.
        seconds: the mean of both bounds of its step time.
        bytes: the bytes that are alive at the moment.
    """

    path: tuple[int, ...]
    seconds: float
    bytes: float


class Meeting(NamedTuple):
    """Where a plan that fits and one that does not cost the same.

    Attributes:
        bound: the seconds that every plan that fits takes at least; infinite where none fits.
        price: the seconds that a byte costs there.
        fits: the plan that fits; None: no plan does.
        over: the plan that does not; None: there is no need for one.
    """

    bound: float
    price: float
    fits: Candidate | None
    over: Candidate | None


class Peak:
    """All plans, by their time and their memory in the backward pass of one layer.

    Args:
        stages: its stages, recomputed or not.
        mix: the share of the second bound of time.
        resident: the bytes that every rank holds with any plan.
        moment: the index of the layer.
    """

    def __init__(
        self,
        trellis: Trellis,
        stages: Sequence[Recomputable],
        terms: Terms,
        mix: float,
        resident: float,
        moment: int,
    ) -> None:
        self.trellis, self.terms, self.resident, self.moment = trellis, terms, resident, moment
        self.expanded = replace(trellis, stages=tuple(one.stage for one in stages))
        self.stages = stages
        self.known: list[Candidate] = []
        seconds = {id(one): one.seconds(mix, terms) for one in stages}
        self.seconds = [seconds[id(one)] for one in stages]
        self.bytes = [
            one.before if index < moment else one.there if index == moment else one.behind
            for index, one in enumerate(stages)
        ]

    def cheapest(self, price: float, of_time: float = 1.0) -> Candidate:
        """The plan that costs least.

        Args:
            price: the seconds that a byte costs.
            of_time: the price of a second: 0 where memory alone counts.
        """
        known: dict[tuple[int, int], Floats] = {}
        costs = []
        for seconds, bytes_ in zip(self.seconds, self.bytes, strict=True):
            key = (id(seconds), id(bytes_))
            if key not in known:
                known[key] = of_time * seconds + price * bytes_
            costs.append(known[key])
        candidate = self._of(Weighted(self.expanded, costs).best())
        self.known.append(candidate)
        return candidate

    def _of(self, path: Sequence[int]) -> Candidate:
        seconds, bytes_ = (
            sum(float(each[edge]) for each, edge in zip(column, path, strict=True))
            for column in (self.seconds, self.bytes)
        )
        return Candidate(tuple(path), seconds + self.terms.fixed, bytes_ + self.resident)

    def plan(self, candidate: Candidate) -> tuple[dict[str, LayerPlan], list[str]]:
        """(the choice of each layer that can be split, the layers that are recomputed)."""
        edges = list(zip(self.stages, candidate.path, strict=True))
        choices = self.trellis.choices([int(one.stage.place[edge]) for one, edge in edges])
        layers = zip(self.trellis.layers, edges, strict=True)
        return choices, [layer.name for layer, (one, edge) in layers if one.recomputes[edge]]

    def meet(self, limit: float, price: float = 0.0) -> Meeting:
        """The greatest bound on plans that fit, and the plans on both sides of it.

        Args:
            limit: the bytes that may be alive at the moment.
            price: a price near that of the bound; 0: it is not known.
        """
        if not self.known and price:
            self.cheapest(0.7 * price)
            self.cheapest(1.5 * price)
        fits, over = self._sides(limit)
        if over is None:
            self.cheapest(0.0)
        if fits is None:
            self.cheapest(1.0, 0.0)
        fits, over = self._sides(limit)
        if fits is None or over is None:
            return Meeting(np.inf if fits is None else fits.seconds, 0.0, fits, over)
        bound = over.seconds
        for _ in range(_MEETINGS):
            price = (fits.seconds - over.seconds) / (over.bytes - fits.bytes)
            one = self.cheapest(price)
            bound = max(bound, one.seconds + price * (one.bytes - limit))
            if bound >= (1 - _CLOSE) * (over.seconds + price * (over.bytes - limit)):
                break
            fits, over = (one, over) if one.bytes <= limit else (fits, one)
        return Meeting(bound, price, fits, over)

    def _sides(self, limit: float) -> tuple[Candidate | None, Candidate | None]:
        """The fastest known plan that fits, and the leanest one that does not."""
        fitting = [one for one in self.known if one.bytes <= limit]
        others = [one for one in self.known if one.bytes > limit]
        return (
            min(fitting, key=lambda one: one.seconds, default=None),
            min(others, key=lambda one: one.bytes, default=None),
        )

    def mixed(self, meeting: Meeting, room: float) -> Candidate | None:
        """The plan of a meeting that fits, and from where there is room for it on, the other one.

        Both cost the same at the price of the bound, and so does this, but for what it leaves free.
        """
        fits, over = meeting.fits, meeting.over
        if fits is None or over is None:
            return fits
        columns = zip(self.stages, self.bytes, fits.path, over.path, strict=True)
        rows = [
            (one.stage.target[edge] == one.stage.target[other], bytes_[edge], bytes_[other])
            for one, bytes_, edge, other in columns
        ]
        meets, begun, left = np.array(rows).T
        total = begun.cumsum() + left.sum() - left.cumsum() + self.resident
        places = np.flatnonzero((meets > 0) & (total <= room))
        if not len(places):
            return fits
        end = int(places[0]) + 1
        return self._of([*fits.path[:end], *over.path[end:]])

    def highest(self, candidate: Candidate) -> tuple[int, float]:
        """(the layer in whose backward pass most is alive, the bytes then)."""
        edges = list(zip(self.stages, candidate.path, strict=True))
        before, there, behind = (
            np.array([float(getattr(one, name)[edge]) for one, edge in edges])
            for name in ("before", "there", "behind")
        )
        levels = before.cumsum() - before + there + behind[::-1].cumsum()[::-1] - behind
        return int(levels.argmax()), float(levels.max()) + self.resident


class LimitedSearch:
    """A search for the fastest plan that fits a memory limit.

    Args:
        mix: the share of the second bound where the bound without a limit is tightest.
        resident: the bytes that every rank holds with any plan.
    """

    def __init__(
        self,
        question: Question,
        trellis: Trellis,
        costs: StepCosts,
        terms: Terms,
        mix: float,
        resident: float,
    ) -> None:
        self.question, self.trellis, self.terms, self.mix = question, trellis, terms, mix
        self.resident = resident
        self.able = tuple(question.may_recompute(layer) for layer in question.graph.layers)
        self._held = trellis.priced(MemoryCosts(costs)).stages
        self._saves = list(saves_of(question.graph, costs.footprints))
        self._peaks: dict[tuple[int, tuple[bool, ...]], Peak] = {}

    @cached_property
    def least(self) -> float:
        """The bytes that every plan needs at least."""
        least, moment = 0.0, len(self.able) - 1
        for _ in range(_MOMENTS):
            peak = self._peak(moment, self.able)
            lean = peak.cheapest(1.0, 0.0)
            least, (moment, _) = max(least, lean.bytes), peak.highest(lean)
        return least

    def search(self, limit: int, evaluator: Evaluator) -> float:
        """Evaluates plans that fit; returns the seconds that every such plan takes at least.

        Args:
            limit: the memory limit of a rank, in bytes.
            evaluator: the evaluator that predicts the plans that are found.
        """
        bound, best, moment, price, seen = 0.0, 0, len(self.able) - 1, 0.0, set[int]()
        while moment not in seen and len(seen) < _MOMENTS:
            seen.add(moment)
            peak = self._peak(moment, self.able)
            meeting = peak.meet(limit, price)
            if meeting.fits is None:
                return float("inf")
            if meeting.bound > bound:
                bound, best, price = meeting.bound, moment, meeting.price
            highest, level = peak.highest(meeting.fits)
            moment = highest if level > _HIGHER * limit else moment
        for length in _LENGTHS:
            if bound >= (1 - _NEAR) * evaluator.seconds:
                break
            self._fill(self._peak(best, self._in_segments(length)), limit, price, evaluator)
        return bound

    def _fill(self, peak: Peak, limit: int, price: float, evaluator: Evaluator) -> None:
        """Evaluates plans with as much memory as there is."""
        room = float(limit)
        for _ in range(_FILLS):
            candidate = peak.mixed(peak.meet(room, price), room)
            if candidate is None or candidate.seconds >= evaluator.seconds:
                return
            judged = evaluator.evaluate(self.question.plan(*peak.plan(candidate)))
            if _FULL * limit <= judged.peak_bytes <= limit:
                return
            room = candidate.bytes + limit - judged.peak_bytes

    def _peak(self, moment: int, able: tuple[bool, ...]) -> Peak:
        """All plans that recompute some layers, by their memory in a layer's backward pass."""
        if (moment, able) not in self._peaks:
            known: dict[tuple[object, ...], Recomputable] = {}
            stages = []
            rows = zip(self.trellis.stages, self._held, self._saves, able, strict=True)
            for index, (base, bytes_, saves, may) in enumerate(rows):
                key = (id(base), saves, may, index + 1 == len(able))
                if key not in known:
                    known[key] = recomputable(base, bytes_, saves, may, index + 1 == len(able))
                stages.append(known[key])
            common = self.terms, self.mix, self.resident
            self._peaks[moment, able] = Peak(self.trellis, stages, *common, moment)
        return self._peaks[moment, able]

    def _in_segments(self, length: int) -> tuple[bool, ...]:
        """Whether each layer may be recomputed, if no segment is to be much longer [layers]."""
        graph, able, count = self.question.graph, list(self.able), 0
        last = {name: readers[-1] for name, readers in graph.consumers.items() if readers}
        live = set(graph.sources) & last.keys()
        for index, layer in enumerate(graph.layers):
            live -= {name for name in layer.inputs if last[name] == layer.name}
            live |= {layer.name} & last.keys() if layer.rows else set()
            count += able[index]
            if count > length and live == {layer.name}:
                able[index], count = False, 0
        return tuple(able)
