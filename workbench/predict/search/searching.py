"""The plan with the least predicted step time that fits, and how far any other could be below it.

    1  All plans are laid out as the paths of a trellis (`trellis.py`), with costs whose sum is a
       lower bound of the predicted step time and memory (`costs.py`, `bounds.py`).
    2  The plans that are cheapest at the prices by which the bound is tightened, and the presets
       that the bound does not rule out, are predicted in full.
    3  Further plans follow in the order of their bound. When the next bound is no less than the
       best prediction, that one is proven to be the best of all.

Small models are searched until the proof is there; of large ones the best found so far is given
when the time is over, with the bound reached: the gap is certified, against predicted step time.

Computing layers again only costs time, and is done only where the limit asks for it. Rounds save
memory too, and hide a gather behind what they compute.
"""

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from workbench.plan.experiment import Synchronous
from workbench.plan.plan import Plan
from workbench.plan.tail import Rounds, RoundsError
from workbench.predict.batches import micro_batches
from workbench.predict.duration import load_seconds
from workbench.predict.search.bounds import Found, Relaxation, Terms
from workbench.predict.search.costs import StepCosts
from workbench.predict.search.following import Following
from workbench.predict.search.judge import Judge, Judged
from workbench.predict.search.laying import trellis_of
from workbench.predict.search.limit import MemoryLimitError, shown
from workbench.predict.search.question import Question
from workbench.predict.search.reasons import reasons_of
from workbench.predict.search.result import SearchResult
from workbench.predict.search.subsets import cheapest_sums
from workbench.predict.search.trellis import Trellis

# As many plans are searched to the end, however long it takes.
ENUMERABLE = 4096
# Of a search among more plans, seconds after which no further plan is predicted.
PATIENCE = 0.6
_SHRINKS = 6
_PARTED: tuple[Rounds, ...] = ("B/K", "B")
_FRONT = 6


class Searching:
    """One search, as far as it has come.

    Args:
        question: what is asked.
        began: when, by `time.perf_counter`.
    """

    def __init__(self, question: Question, began: float) -> None:
        self.question, self.began = question, began
        self.judge = Judge(question.experiment, question.machine, question.limit)
        self.costs = StepCosts(question.experiment, question.machine, question.weights)
        self.trellis = self._laid()
        self.able = sum(map(question.may_recompute, question.graph.layers))
        # Bounds count with all that may save memory, plans are made with what is certain to.
        self.all = Relaxation(self.trellis, self._terms(parts=True), question.limit)

    def result(self) -> SearchResult:
        """Searches.

        Raises:
            MemoryLimitError: no plan fits.
        """
        tightest = self.all.tightest()
        leanest = self.all.leanest()
        if leanest.memory <= self.question.limit:
            self._candidates()
        if self.judge.best is None:
            self._lean(leanest)
        bound = self._prove(tightest.mix, tightest.price)
        best = self.judge.best
        if best is None:
            raise self._refusal(leanest)
        return SearchResult(
            plan=best.plan,
            prediction=best.prediction,
            bound=min(bound, best.step_time),
            seconds=time.perf_counter() - self.began,
            memory_limit=self.question.limit,
            judged=len(self.judge),
            plans=self.question.plans,
            _why=lambda: reasons_of(self.question, self.trellis, tightest, best.plan),
            _pareto=self._front,
        )

    def _laid(self) -> Trellis:
        question = self.question
        following = Following(question.graph, question.options)
        return trellis_of(question.graph, following, question.options, self.costs)

    def _terms(self, *, parts: bool) -> Terms:
        """Of the bounds; with `parts` for layers in as many rounds as there could be."""
        question, layers = self.question, self.question.graph.layers
        machine, sync = question.machine, question.experiment.sync
        links = [machine.within] if machine.across is None else [machine.within, machine.across]
        free = (1 - min(link.busy for link in links)) / machine.slowdown
        apart = isinstance(sync, Synchronous) and not sync.per_round
        most = max(question.sizes) if parts and question.rounds else 1
        behind = self.costs.tailable if most > 1 else frozenset[str]()
        return Terms(
            fixed=self._fixed(),
            slowed=1 - free,
            apart=apart,
            rounds=question.rounds and self._hides(),
            recompute=tuple(question.may_recompute(layer) for layer in layers),
            parts=tuple(most if layer.name in behind else 1 for layer in layers),
        )

    def _fixed(self) -> float:
        """Seconds of loading, of agreeing, and of what every step costs besides."""
        experiment, speeds = self.question.experiment, self.costs.speeds
        rows = np.sum(micro_batches(experiment), axis=0)
        sample = int(np.prod(self.question.graph.input_shape)) * self.costs.itemsizes["input"]
        seconds = load_seconds(rows * sample, speeds) + speeds.each("step_s")
        world = self.question.world_size
        status = speeds.meeting(range(world)).all_reduce((2 + world) * 8, "auto", beside=False)
        return float(self.question.weights @ seconds) + status.seconds

    def _hides(self) -> bool:
        """Whether a gather can run beside a tail in rounds: not in memory that all share."""
        sizes = (k for k in self.question.sizes if k > 1)
        meetings = [self.costs.speeds.meeting(range(k)) for k in sizes]
        return any(not meeting.memory or len(meeting.hosts) > 1 for meeting in meetings)

    def _candidates(self) -> None:
        """Judges presets and the cheapest plans, as far as their bounds are below the best."""
        found = list(self.all.seen())
        for preset in self._presets():
            path = self.trellis.path(preset.layers)
            if path is not None:
                found.append(self.all.found(path, 0.0, 0.0))
        for one in sorted(found, key=lambda one: one.least_seconds):
            if one.least_seconds < self.judge.seconds:
                self.judge.judge(self.question.plan(one.choices))
        if self.judge.best is not None:
            self._judge_rounds(self.judge.best.plan)
        if self.judge.tight:
            self._fit()

    def _judge_rounds(self, plan: Plan) -> list[Judged]:
        """Judges a plan in the rounds that it can run in."""
        if not self.question.rounds:
            return []
        try:
            if plan.tail is None:
                return []
        except RoundsError:
            return []
        return [self.judge.judge(plan.with_rounds(rounds)) for rounds in _PARTED]

    def _presets(self) -> Iterator[Plan]:
        graph, world = self.question.graph, self.question.world_size
        yield Plan.data_parallel(graph, world)
        for k in self.question.sizes:
            if k > 1:
                yield Plan.hybrid(graph, world, k)

    def _fit(self) -> None:
        """Looks for plans that fit: first leaner ones, then with layers computed again."""
        terms, limit = self._terms(parts=False), float(self.question.limit)
        none = replace(terms, recompute=(False,) * len(terms.recompute))
        bases = [self.all.at(0.0, 0.0).best]
        for _ in range(_SHRINKS):
            some = Relaxation(self.trellis, none, limit)
            if some.leanest().memory > limit:
                break
            some.tightest()
            fitting = [one for one in some.seen() if one.memory <= limit] or [some.leanest()]
            bases.append(min(fitting, key=lambda one: one.least_seconds))
            judged = self.judge.judge(self.question.plan(bases[-1].choices))
            if judged.peak_bytes <= self.question.limit:
                break
            self._judge_rounds(judged.plan)
            limit -= judged.peak_bytes - self.question.limit
        if self.question.recompute:
            for base in (bases[0], *bases[:0:-1]):
                if base.least_seconds < self.judge.seconds:
                    self._again(base)
                if self._late() and self.judge.best is not None:
                    return

    def _again(self, base: Found) -> None:
        """Looks for the least part of a plan that must be computed again for it to fit."""
        segments = self._segments()

        def fits(part: int) -> bool:
            again = [name for segment in segments[:part] for name in segment]
            judged = self.judge.judge(self.question.plan(base.choices, again))
            return judged.peak_bytes <= self.question.limit

        few, many = 0, len(segments)  # so many do not suffice, so many may
        if not fits(many):
            return
        while few + 1 < many:
            part = (few + many) // 2
            few, many = (few, part) if fits(part) else (part, many)

    def _segments(self) -> list[list[str]]:
        """All layers that may be computed again, in about the square root of their number."""
        layers = self.question.graph.layers
        able = [layer.name for layer in layers if self.question.may_recompute(layer)]
        length = max(2, round(len(able) ** 0.5))
        # The last of each is left out, so that segments are held one after the other.
        return [able[first : first + length - 1] for first in range(0, len(able), length)]

    def _lean(self, leanest: Found) -> None:
        """Judges what needs little memory, until something fits."""
        lean = Relaxation(self.trellis, self._terms(parts=False)).leanest()
        choices = [leanest.choices, lean.choices, *(dict(p.layers) for p in self._presets())]
        for again in self._agains():
            for chosen in choices:
                if self.trellis.path(chosen) is None:
                    continue
                plan = self.question.plan(chosen, again)
                self.judge.judge(plan)
                self._judge_rounds(plan)
                if self.judge.best is not None:
                    return
            if self._late():
                return

    def _agains(self) -> Iterator[list[str]]:
        """All layers in segments, all in one, none."""
        segments = self._segments() if self.question.recompute else []
        if segments:
            yield [name for segment in segments for name in segment]
            layers = self.question.graph.layers
            yield [layer.name for layer in layers if self.question.may_recompute(layer)]
        yield []

    def _refusal(self, leanest: Found) -> MemoryLimitError:
        lean = self.judge.leanest
        assert lean is not None
        least = min(int(leanest.memory), lean.peak_bytes)
        limit, plan = self.question.limit, lean.plan
        return MemoryLimitError(
            f"memory_limit {shown(limit)}: the leanest plan found for {plan.graph.source.name} on "
            f"{plan.world_size} ranks needs {shown(lean.peak_bytes)} ({lean.peak_bytes:,} bytes), "
            f"and every plan at least {shown(least)}; "
            f"the error's `plan` is that plan. Valid are a larger limit, more ranks, or a smaller "
            f"batch than {self.question.experiment.batch_size}",
            plan,
            lean.peak_bytes,
            least,
        )

    def _late(self) -> bool:
        count = self.question.plans * (2**self.able if self.judge.tight else 1)
        if count <= ENUMERABLE:
            return False
        return time.perf_counter() - self.began > PATIENCE

    def _prove(self, mix: float, price: float) -> float:
        """Judges plans in the order of their bounds; gives the bound of all that are left."""
        priced = self.all.at(mix, price)
        terms, limit = self.all.terms, self.all.limit
        for cost, path in priced.paths.in_order():
            bound = priced.bound(cost, terms, limit)
            if bound >= self.judge.seconds:
                return self.judge.seconds
            self._settle(path)
            if self._late():  # perhaps before this one was settled
                return bound
        return self.judge.seconds

    def _settle(self, path: list[int]) -> None:
        """Finds the best that can be made of one choice of schemes."""
        base = self.all.found(path, 0.0, 0.0)
        if base.least_seconds >= self.judge.seconds:
            return
        plain = self.judge.judge(self.question.plan(base.choices))
        ways = [plain, *self._judge_rounds(plain.plan)]
        if min(one.step_time for one in ways) >= self.judge.seconds:
            return
        for again, more in cheapest_sums(self.all.forward(path)):
            if base.whole + more >= self.judge.seconds or self._late():
                return
            plan = self.question.plan(base.choices, again)
            self.judge.judge(plan)
            self._judge_rounds(plan)

    def _front(self) -> tuple[Judged, ...]:
        """The judged plans, and some for smaller limits."""
        best, terms = self.judge.best, self._terms(parts=False)
        assert best is not None
        low = Relaxation(self.trellis, terms).leanest().memory
        plans = []
        for part in range(1, _FRONT):
            limit = low + (best.peak_bytes - low) * part / _FRONT
            some = Relaxation(self.trellis, terms, limit)
            some.tightest()
            fitting = [one for one in some.seen() if one.memory <= limit]
            for one in sorted(fitting, key=lambda one: one.least_seconds)[:1]:
                plans.append(self.question.plan(one.choices, one.again))
        return self.judge.front(plans)
