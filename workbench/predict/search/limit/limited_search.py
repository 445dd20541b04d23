"""The search for plans under a tight memory limit, with a lower bound on all that fit.

Two searches alternate over the same plans. One underestimates memory: its bound holds for all plans
that fit. The other lowers its limit by as much as the predictions of its own plans exceeded it, and
recomputes in short segments, so that the plans that it finds do fit.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from workbench.plan.placement.rounds import Rounds, RoundsError
from workbench.plan.plans.plan import Plan
from workbench.predict.prediction import predict
from workbench.predict.search.bounds.costs import StepCosts
from workbench.predict.search.bounds.relaxation import Terms
from workbench.predict.search.evaluation import EvaluatedPlan, Evaluator
from workbench.predict.search.limit.candidates import Candidate, Prices
from workbench.predict.search.limit.column_generation import BranchAndBound, ColumnGeneration
from workbench.predict.search.limit.memory_trellis import MemoryTrellis
from workbench.predict.search.limit.recompute import REACH, automaton_of, boundaries_of
from workbench.predict.search.question import Question
from workbench.predict.search.space.trellis import Stage, Trellis

_NEAR = 0.01  # plans that could be faster by less are not looked for
_IN_ROUNDS: tuple[Rounds, ...] = ("B/K", "B")
_LEANEST = 2  # of the plans that need little, so many are judged
_LENGTHS = (3, 6, 12, 24)  # of segments, in layers
_FIRST = 3  # of the plans that are found before there is a bound, so many are judged
_SHORT, _MOST_SHRINKS = 6, 8
_MANY = 30_000  # edges


class MemoryLimitedSearch:
    """A search for the fastest plan that fits a memory limit.

    Args:
        question: the arguments of the search.
        trellis: the trellis of all plans.
        costs: the costs in time that it was built with.
        terms: the terms that the bounds of time have in common.
        resident: the bytes that every rank holds with any plan.
        evaluator: the evaluator that predicts the plans that are found.
    """

    def __init__(
        self,
        question: Question,
        trellis: Trellis,
        costs: StepCosts,
        terms: Terms,
        resident: float,
        evaluator: Evaluator,
    ) -> None:
        self.question, self.trellis, self.costs = question, trellis, costs
        self.terms, self.resident, self.evaluator = terms, resident, evaluator
        layers = question.graph.layers
        self.recomputable = [question.may_recompute(layer) for layer in layers]
        self.boundaries = self._boundaries()
        self.variants = self._variants(self.recomputable)
        self.bound = 0.0
        self._repaired = set[tuple[tuple[int, ...], Rounds]]()

    def search(self, until: float) -> None:
        """Searches for plans that fit, until the bound is near or the time is over.

        Args:
            until: the time to stop at, by `time.thread_time`.
        """
        limit = self.question.limit
        bounding = self._branching(self.variants, limit, self.recomputable)
        plans = bounding.plans()
        # While some kind of rounds has not been looked at, there is no bound to speak of.
        first = list(_until(plans, lambda: bounding.bound > 0 or time.thread_time() > until))
        fitting = sorted((one for one in first if one.peak <= limit), key=lambda one: one.seconds)
        for candidate in fitting[:_FIRST]:
            self._excess(candidate, limit)
        for found in _round_robin(plans, self._feasible()):
            if found is not None:
                self._excess(found, limit)
            if bounding.bound >= self._enough() or time.thread_time() > until:
                break
        self.bound = bounding.bound

    def least(self, until: float) -> float:
        """The bytes that every plan needs at least; plans that need little are evaluated meanwhile.

        Args:
            until: the time to stop at, by `time.thread_time`.
        """
        # Rounds "B" need no less than "B/K".
        every = [ColumnGeneration(one, None) for one in self.variants if one.rounds != "B"]
        while time.thread_time() < until:
            one = min(every, key=lambda columns: columns.bound)
            if one.done or one.bound >= self._leanest:
                break
            one.step()
        found = [candidate for one in every for candidate in one.candidates]
        found.sort(key=lambda candidate: candidate.peak)
        for candidate in found[:_LEANEST]:
            self._evaluated(candidate)
        for candidate in found[:1]:
            self._shorter_segments(candidate)
        return min(columns.bound for columns in every)

    @property
    def _leanest(self) -> float:
        """The bytes of the evaluated plan that needs least."""
        lean = self.evaluator.leanest
        return float("inf") if lean is None else lean.peak_bytes

    def _shorter_segments(self, candidate: Candidate) -> None:
        """Evaluates the choices of a plan with recomputed segments of several lengths."""
        for length in _LENGTHS if self.question.recompute else ():
            layers = zip(self.question.graph.layers, self._in_segments(length), strict=True)
            recomputed = tuple(layer.name for layer, recomputable in layers if recomputable)
            self._evaluated(replace(candidate, recomputed=recomputed))

    def _evaluated(self, candidate: Candidate) -> EvaluatedPlan | None:
        """Evaluates a plan; None: it cannot run in its rounds."""
        try:
            plan = self.question.plan(candidate.plan, candidate.recomputed)
            plan = plan.with_rounds(candidate.rounds)
        except RoundsError:
            return None
        return self.evaluator.evaluate(plan)

    def _enough(self) -> float:
        """The seconds from which on a plan is too slow to be of interest."""
        return self.evaluator.seconds * (1 - _NEAR)

    def _excess(self, candidate: Candidate, limit: float) -> float:
        """Evaluates a plan; gives the bytes by which it exceeds the limit, though it should fit."""
        if candidate.peak > limit or candidate.seconds >= self.evaluator.seconds:
            return 0.0
        evaluated = self._evaluated(candidate)
        over = 0.0 if evaluated is None else evaluated.peak_bytes - self.question.limit
        if over > 0 and (candidate.path, candidate.rounds) not in self._repaired:
            self._repaired.add((candidate.path, candidate.rounds))
            self._repair(candidate)
        return over

    def _repair(self, candidate: Candidate) -> None:
        """Evaluates a plan that does not fit with more layers recomputed, as few as it takes."""
        layers = zip(self.question.graph.layers, self._in_segments(_SHORT), strict=True)
        more = [layer.name for layer, recomputable in layers if recomputable]

        def plan(count: int) -> Plan:
            recomputed = sorted({*candidate.recomputed, *more[:count]})
            return self.question.plan(candidate.plan, recomputed).with_rounds(candidate.rounds)

        low, high = 0, len(more) + 1
        while high - low > 1:
            middle = (low + high) // 2
            memory = predict(plan(middle), self.question.machine, self.question.experiment).memory
            fits = memory.peak_bytes <= self.question.limit
            low, high = (low, middle) if fits else (middle, high)
        if high <= len(more):
            self.evaluator.evaluate(plan(high))

    def _feasible(self) -> Iterator[Candidate | None]:
        """Plans for decreasing limits, until they fit."""
        recomputable = self._in_segments(_SHORT)
        variants = self._variants(recomputable)
        limit, known = float(self.question.limit), dict[int, list[Candidate]]()
        for _ in range(_MOST_SHRINKS):
            branching = self._branching(variants, limit, recomputable, known)
            over = 0.0
            for candidate in branching.plans():
                over = self._excess(candidate, limit)
                yield None
                if over > 0:
                    break
            if over <= 0:
                return
            limit -= over
            known = branching.found

    def _branching(
        self,
        variants: Sequence[MemoryTrellis],
        limit: float,
        recomputable: Sequence[bool],
        known: Mapping[int, list[Candidate]] | None = None,
    ) -> BranchAndBound:
        def refine(variant: MemoryTrellis, prices: Prices, limit: float) -> MemoryTrellis:
            edges = variant.below(self._enough(), prices, limit)
            return self._all_at_once(recomputable, edges, coarse=False)

        return BranchAndBound(variants, limit, self._enough, refine, known)

    def _variants(self, recomputable: Sequence[bool]) -> list[MemoryTrellis]:
        """All plans by their rounds, if only these layers may be recomputed."""
        edges = self.trellis.stages
        found = [self._all_at_once(recomputable, edges, coarse=True)]
        if self.terms.parts and self.boundaries:
            graph, footprints = self.question.graph, self.costs.footprints
            parted = automaton_of(graph, footprints, recomputable, self.boundaries)
            common = edges, self.trellis, parted, self.terms, self.resident
            for size in self.terms.parts:
                found += [MemoryTrellis(*common, rounds, size) for rounds in _IN_ROUNDS]
        return found

    def _all_at_once(
        self, recomputable: Sequence[bool], edges: Sequence[Stage], *, coarse: bool
    ) -> MemoryTrellis:
        graph, footprints = self.question.graph, self.costs.footprints
        many = sum(len(some.source) for some in edges) > _MANY
        automaton = automaton_of(graph, footprints, recomputable, reach=0 if many else REACH)
        common = edges, self.trellis, automaton, self.terms, self.resident
        return MemoryTrellis(*common, coarse=coarse and many)

    def _boundaries(self) -> dict[str, float]:
        """Values that a tail may begin after, and the bytes of their gradients."""
        graph, costs = self.question.graph, self.costs
        rows, found = float(np.mean(costs.passes[0][0].own)), {}
        for name in boundaries_of(graph, costs.before_tails):
            found[name] = 0.0
            if name in costs.learns:
                layer = graph[name]
                size = float(np.prod(layer.output_shape)) * costs.itemsizes[name]
                found[name] = rows * layer.rows * size
        return found

    def _in_segments(self, length: int) -> list[bool]:
        """Whether each layer may be recomputed, if no segment is to be much longer [layers]."""
        graph, recomputable, count = self.question.graph, list(self.recomputable), 0
        alone = set(boundaries_of(graph, set(graph.consumers)))
        for index, layer in enumerate(graph.layers):
            count += recomputable[index]
            if count > length and layer.name in alone:
                recomputable[index], count = False, 0
        return recomputable


def _until(every: Iterator[Candidate], over: Callable[[], bool]) -> Iterator[Candidate]:
    """The items up to the first after which a condition holds."""
    for one in every:
        yield one
        if over():
            return


def _round_robin(*every: Iterator[Candidate | None]) -> Iterator[Candidate | None]:
    """One item of each iterator in turn, until the first is exhausted."""
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
