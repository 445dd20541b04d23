"""Plans for a memory limit that binds, and how far any other that fits could be below them.

Two searches go side by side over the same plans. One counts memory as surely too little: its
bound holds for all plans that fit. The other lowers its limit by what the predictions of its own
plans have had beyond that, and parts what is computed again into short segments, so that what it
finds does fit.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from workbench.plan.plan import Plan
from workbench.plan.tail import Rounds, RoundsError
from workbench.predict.prediction import predict
from workbench.predict.search.bounds.costs import StepCosts
from workbench.predict.search.bounds.relaxation import Terms
from workbench.predict.search.evaluation import Judge, Judged
from workbench.predict.search.limit.branching import Branching
from workbench.predict.search.limit.candidates import Edges, Load, Prices, edges_of
from workbench.predict.search.limit.column_generation import Columns
from workbench.predict.search.limit.memory_trellis import Laden
from workbench.predict.search.limit.recompute import REACH, boundaries_of, keeping_of
from workbench.predict.search.question import Question
from workbench.predict.search.space.trellis import Trellis

_NEAR = 0.01  # plans that could be faster by less are not looked for
_PARTED: tuple[Rounds, ...] = ("B/K", "B")
_LEANEST = 2  # of the plans that need little, so many are judged
_LENGTHS = (3, 6, 12, 24)  # of segments, in layers
_FIRST = 3  # of the plans that are found before there is a bound, so many are judged
_SHORT, _MOST_SHRINKS = 6, 8
_MANY = 30_000  # edges


class Squeezing:
    """A search under a limit.

    Args:
        question: what is asked.
        trellis: of all plans.
        costs: that it was laid out with.
        terms: of the bounds of time.
        resident: bytes that every rank holds whatever the plan.
        judge: of the plans that are found.
    """

    def __init__(
        self,
        question: Question,
        trellis: Trellis,
        costs: StepCosts,
        terms: Terms,
        resident: float,
        judge: Judge,
    ) -> None:
        self.question, self.trellis, self.costs = question, trellis, costs
        self.terms, self.resident, self.judge = terms, resident, judge
        layers = question.graph.layers
        self.able = [question.may_recompute(layer) for layer in layers]
        self.boundaries = self._boundaries()
        self.edges = edges_of(trellis)
        self.every = self._laden(self.able, self.edges)
        self.bound = 0.0
        self._mended = set[tuple[tuple[int, ...], Rounds]]()

    def search(self, until: float) -> None:
        """Looks for plans that fit until the bound is near, or so much work is done.

        Args:
            until: by `time.thread_time`.
        """
        all_ = self._branching(self.every, self.question.limit, self.able)
        sure = all_.plans()
        # While some kind of rounds has not been looked at, there is no bound to speak of.
        first = list(_until(sure, lambda: all_.bound > 0 or time.thread_time() > until))
        first.sort(key=lambda load: load.seconds)
        for load in [load for load in first if load.peak <= self.question.limit][:_FIRST]:
            self._judged(load, self.question.limit)
        for found in _turns(sure, self._safe()):
            if found is not None:
                self._judged(found, self.question.limit)
            if all_.bound >= self._enough() or time.thread_time() > until:
                break
        self.bound = all_.bound

    def least(self, until: float) -> float:
        """Bytes that every plan needs at least; plans that need little are judged meanwhile.

        Args:
            until: by `time.thread_time`.
        """
        every = [Columns(laden, None) for laden in self.every if laden.rounds != "B"]  # needs more
        while time.thread_time() < until:
            one = min(every, key=lambda columns: columns.bound)
            if one.done or one.bound >= self._leanest:
                break
            one.step()
        loads = sorted((load for one in every for load in one.loads), key=lambda load: load.peak)
        for load in loads[:_LEANEST]:
            self.judged(load)
        for load in loads[:1]:
            self._shorter(load)
        return min(columns.bound for columns in every)

    @property
    def _leanest(self) -> float:
        """Bytes of the plan that needs least so far."""
        lean = self.judge.leanest
        return float("inf") if lean is None else lean.peak_bytes

    def _shorter(self, load: Load) -> None:
        """Judges the choices of a plan with segments of several lengths computed again."""
        for length in _LENGTHS if self.question.recompute else ():
            layers = zip(self.question.graph.layers, self._parted(length), strict=True)
            again = tuple(layer.name for layer, able in layers if able)
            self.judged(replace(load, again=again))

    def judged(self, load: Load) -> Judged | None:
        """What is predicted for a plan; None: it cannot run in its rounds."""
        try:
            plan = self.question.plan(load.plan, load.again).with_rounds(load.rounds)
        except RoundsError:
            return None
        return self.judge.judge(plan)

    def _enough(self) -> float:
        return self.judge.seconds * (1 - _NEAR)

    def _judged(self, load: Load, limit: float) -> float:
        """Bytes by which a plan that should fit does not."""
        if load.peak > limit or load.seconds >= self.judge.seconds:
            return 0.0
        judged = self.judged(load)
        over = 0.0 if judged is None else judged.peak_bytes - self.question.limit
        if over > 0 and (load.path, load.rounds) not in self._mended:
            self._mended.add((load.path, load.rounds))
            self._mend(load)
        return over

    def _mend(self, load: Load) -> None:
        """Judges a plan that does not fit, with as many more layers computed again as it takes."""
        layers = zip(self.question.graph.layers, self._parted(_SHORT), strict=True)
        more = [layer.name for layer, able in layers if able]

        def plan(count: int) -> Plan:
            again = sorted({*load.again, *more[:count]})
            return self.question.plan(load.plan, again).with_rounds(load.rounds)

        low, high = 0, len(more) + 1
        while high - low > 1:
            middle = (low + high) // 2
            memory = predict(plan(middle), self.question.machine, self.question.experiment).memory
            fits = memory.peak_bytes <= self.question.limit
            low, high = (low, middle) if fits else (middle, high)
        if high <= len(more):
            self.judge.judge(plan(high))

    def _safe(self) -> Iterator[Load | None]:
        """Plans for smaller and smaller limits, until they fit."""
        able = self._parted(_SHORT)
        every = self._laden(able, self.edges)
        limit, known = float(self.question.limit), dict[int, list[Load]]()
        for _ in range(_MOST_SHRINKS):
            branching = self._branching(every, limit, able, known)
            over = 0.0
            for load in branching.plans():
                over = self._judged(load, limit)
                yield None
                if over > 0:
                    break
            if over <= 0:
                return
            limit -= over
            known = branching.found

    def _branching(
        self,
        every: Sequence[Laden],
        limit: float,
        able: Sequence[bool],
        known: Mapping[int, list[Load]] | None = None,
    ) -> Branching:
        def finer(laden: Laden, prices: Prices, limit: float) -> Laden:
            edges = laden.below(self._enough(), prices, limit)
            return self._all_at_once(able, edges, rough=False)

        return Branching(every, limit, self._enough, finer, known)

    def _laden(self, able: Sequence[bool], edges: Sequence[Edges]) -> list[Laden]:
        found = [self._all_at_once(able, edges, rough=True)]
        if self.terms.parts and self.boundaries:
            graph, footprints = self.question.graph, self.costs.footprints
            parted = keeping_of(graph, footprints, able, self.boundaries)
            common = edges, self.trellis, parted, self.terms, self.resident
            for size in self.terms.parts:
                found += [Laden(*common, rounds, size) for rounds in _PARTED]
        return found

    def _all_at_once(self, able: Sequence[bool], edges: Sequence[Edges], *, rough: bool) -> Laden:
        graph, footprints = self.question.graph, self.costs.footprints
        many = sum(len(some.source) for some in edges) > _MANY
        keeping = keeping_of(graph, footprints, able, reach=0 if many else REACH)
        common = edges, self.trellis, keeping, self.terms, self.resident
        return Laden(*common, rough=rough and many)

    def _boundaries(self) -> dict[str, float]:
        """Values behind which a tail may begin, and the bytes of their gradients."""
        graph, costs = self.question.graph, self.costs
        rows, found = float(np.mean(costs.passes[0][0].own)), {}
        for name in boundaries_of(graph, costs.before_tails):
            found[name] = 0.0
            if name in costs.learns:
                layer = graph[name]
                size = float(np.prod(layer.output_shape)) * costs.itemsizes[name]
                found[name] = rows * layer.rows * size
        return found

    def _parted(self, length: int) -> list[bool]:
        """Who may be computed again, if no segment is to be much longer than this."""
        graph, able, count = self.question.graph, list(self.able), 0
        alone = set(boundaries_of(graph, set(graph.consumers)))
        for index, layer in enumerate(graph.layers):
            count += able[index]
            if count > length and layer.name in alone:
                able[index], count = False, 0
        return able


def _until(every: Iterator[Load], over: Callable[[], bool]) -> Iterator[Load]:
    """Of these, those that come before something is so."""
    for one in every:
        yield one
        if over():
            return


def _turns(*every: Iterator[Load | None]) -> Iterator[Load | None]:
    """One of each in turn, until the first has no more."""
    first, *others = every
    while True:
        for one in list(others):
            try:
                yield next(one)
            except StopIteration:
                others.remove(one)
        try:
            yield next(first)
        except StopIteration:
            return
