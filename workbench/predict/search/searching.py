"""The plan with the least predicted step time that fits, and how far any other could be below it.

    1  All plans are laid out as the paths of a trellis (`trellis.py`), with costs whose sum is a
       lower bound of the predicted step time and memory (`costs.py`, `bounds.py`).
    2  The plans that are cheapest at the mixes by which the bound is tightened, and the presets
       that the bound does not rule out, are predicted in full.
    3  Where a memory limit binds, plans that fit are looked for, and a bound on them
       (`squeezing.py`); a limit below the least memory of all plans is refused before that.
    4  Further plans follow in the order of their bound. When the next bound is no less than the
       best prediction, that one is proven to be the best of all.

Small models are searched until the proof is there; of large ones the best found so far is given
when it is near enough or the time is over, with the bound reached: the gap is certified, against
predicted step time.

Computing layers again only costs time, and is done only where the limit asks for it. Rounds save
memory too, and hide a gather behind what they compute.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np

from workbench.plan.experiment import Synchronous
from workbench.plan.plan import Plan
from workbench.plan.tail import Rounds, RoundsError
from workbench.predict.memory.resident import STAGING_BYTES
from workbench.predict.search.bounds import Relaxation, Terms
from workbench.predict.search.costs import StepCosts
from workbench.predict.search.following import Following
from workbench.predict.search.judge import Judge, Judged
from workbench.predict.search.laden_costs import LadenCosts
from workbench.predict.search.laying import trellis_of
from workbench.predict.search.limit import MemoryLimitError, refusal
from workbench.predict.search.question import Question
from workbench.predict.search.reasons import reasons_of
from workbench.predict.search.result import SearchResult
from workbench.predict.search.squeezing import Squeezing
from workbench.predict.search.subsets import cheapest_sums
from workbench.predict.search.trellis import Trellis
from workbench.predict.time.duration import load_seconds
from workbench.program.hosts import Hosts
from workbench.program.rows import micro_batches

# As many plans are searched to the end, however long it takes.
ENUMERABLE = 4096
# Of a search among more plans: as near as this the best found so far is given, at once, or when
# as many seconds are over.
_SURE, _NEAR, PATIENCE = 0.002, 0.01, 0.6
_LEAST_SECONDS = 0.6  # to find what memory every plan needs
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
        self.worked = time.thread_time()  # limits are for work, whoever else is at work
        self.judge = Judge(question.experiment, question.machine, question.limit)
        parts = [k for k in question.sizes if k > 1] if question.rounds else []
        self.costs = StepCosts(question.experiment, question.machine, question.weights, parts)
        following = Following(question.graph, question.options)
        self.trellis = trellis_of(question.graph, following, question.options, self.costs)
        self.able = [question.may_recompute(layer) for layer in question.graph.layers]
        self.all = Relaxation(self.trellis, self._terms())

    def result(self) -> SearchResult:
        """Searches.

        Raises:
            MemoryLimitError: no plan fits.
        """
        tightest = self.all.tightest()
        bound = self.all.bound(tightest)
        self._candidates(bound)
        if self._enumerable or not self.judge.tight:
            bound = self._prove(tightest.mix)
        if self.judge.tight and not self._enumerable:
            bound = max(bound, self._squeezed())
        best = self.judge.best
        if best is None:  # all have been judged
            raise self._refusal(float("inf"))
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

    def _squeezed(self) -> float:
        """A bound on the plans that fit, of which it looks for the best.

        Raises:
            MemoryLimitError: none is found.
        """
        squeezing, until = self.squeezing(self.question.limit, self.judge), self._until
        self._lean()
        least = 0.0
        if self.judge.best is None:
            least = squeezing.least(min(until, time.thread_time() + _LEAST_SECONDS))
        if least <= self.question.limit:
            squeezing.search(until)
        if self.judge.best is None:
            raise self._refusal(least)
        return squeezing.bound

    def squeezing(self, limit: float, judge: Judge) -> Squeezing:
        """The same search under another limit."""
        return Squeezing(
            replace(self.question, limit=int(limit)),
            self._laden,
            self.costs,
            self.all.terms,
            self._resident(),
            judge,
        )

    @cached_property
    def _laden(self) -> Trellis:
        """The trellis with what memory and rounds cost too."""
        return self.trellis.priced(LadenCosts(self.costs))

    def _terms(self) -> Terms:
        """Of the bounds."""
        question = self.question
        machine, sync = question.machine, question.experiment.sync
        links = [machine.within] if machine.across is None else [machine.within, machine.across]
        free = (1 - min(link.busy for link in links)) / machine.slowdown
        apart = isinstance(sync, Synchronous) and not sync.per_round
        return Terms(
            fixed=self._fixed(),
            slowed=1 - free,
            apart=apart,
            rounds=question.rounds and self._hides(),
            parts=self.costs.parts,
            lasting=not isinstance(sync, Synchronous) or not sync.per_round,
        )

    def _resident(self) -> float:
        """Bytes that every rank holds besides weights: its rows, and what it stages."""
        experiment, world = self.question.experiment, self.question.world_size
        rows = np.sum(micro_batches(experiment), axis=0)
        sample = float(np.prod(self.question.graph.input_shape)) * self.costs.itemsizes["input"]
        hosts = Hosts.of(world, self.question.machine.ranks_per_host)
        mates = hosts.mates([range(world)]) > 1
        groups = 2  # of gradients and of control
        return float((rows * sample + groups * STAGING_BYTES * mates).mean())

    def _fixed(self) -> float:
        """Seconds of loading, of agreeing, and of what every step costs besides."""
        experiment, speeds = self.question.experiment, self.costs.speeds
        rows = np.sum(micro_batches(experiment), axis=0)
        sample = int(np.prod(self.question.graph.input_shape)) * self.costs.itemsizes["input"]
        seconds = load_seconds(rows * sample, speeds) + speeds.each("step_s")
        world = self.question.world_size
        status = speeds.meeting(range(world)).all_reduce((3 + world) * 8, "auto", beside=False)
        return float(self.question.weights @ seconds) + status.seconds

    def _hides(self) -> bool:
        """Whether a gather can run beside a tail in rounds: not in memory that all share."""
        sizes = (k for k in self.question.sizes if k > 1)
        meetings = [self.costs.speeds.meeting(range(k)) for k in sizes]
        return any(not meeting.memory or len(meeting.hosts) > 1 for meeting in meetings)

    def _candidates(self, bound: float) -> None:
        """Judges presets and the cheapest plans, as far as their bounds are below the best.

        Args:
            bound: of all plans.
        """
        found = list(self.all.seen())
        for preset in self._presets():
            path = self.trellis.path(preset.layers)
            if path is not None:
                found.append(self.all.found(path))
        for one in sorted(found, key=lambda one: one.least_seconds):
            if one.least_seconds < self.judge.seconds and not self._enough(bound):
                self.judge.judge(self.question.plan(one.choices))
        if self.judge.best is not None and not self._enough(bound):
            self._judge_rounds(self.judge.best.plan)

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

    def _lean(self) -> None:
        """Judges presets with layers computed again, until something fits."""
        if not self.question.recompute or self.judge.best is not None:
            return
        able = [layer.name for layer in self.question.graph.layers if self._may(layer.name)]
        length = max(2, round(len(able) ** 0.5))
        again = [name for index, name in enumerate(able) if (index + 1) % length]
        for preset in self._presets():
            if self.trellis.path(preset.layers) is not None:
                plan = self.question.plan(preset.layers, again)
                self.judge.judge(plan)
                self._judge_rounds(plan)

    def _may(self, name: str) -> bool:
        return self.question.may_recompute(self.question.graph[name])

    def _refusal(self, bytes_: float) -> MemoryLimitError:
        lean = self.judge.leanest
        assert lean is not None
        batch_size = self.question.experiment.batch_size
        return refusal(self.question.limit, lean.plan, lean.peak_bytes, bytes_, batch_size)

    @property
    def _enumerable(self) -> bool:
        """Whether all plans can be tried."""
        ways = 2 ** sum(self.able) if self.judge.tight else 1
        return self.question.plans * ways <= ENUMERABLE

    @property
    def _until(self) -> float:
        """When the time is over, by `time.thread_time`."""
        return self.worked + self.question.seconds

    def _enough(self, bound: float) -> bool:
        """Whether no further plan is predicted, once none can take less than so many seconds."""
        if self._enumerable or self.judge.best is None:
            return False
        now, gap = time.thread_time(), 1 - bound / self.judge.seconds
        return gap <= _SURE or now > self._until or (gap <= _NEAR and now > self.worked + PATIENCE)

    def _prove(self, mix: float) -> float:
        """Judges plans in the order of their bounds; gives the bound of all that are left."""
        priced = self.all.at(mix)
        for cost, path in priced.paths.in_order():
            bound = cost + self.all.terms.fixed
            if bound >= self.judge.seconds:
                return self.judge.seconds
            if self._enough(bound):
                return bound
            self._settle(path, bound)
            if self._enough(bound):  # perhaps before this one was settled
                return bound
        return self.judge.seconds

    def _settle(self, path: list[int], bound: float) -> None:
        """Finds the best that can be made of one choice of schemes."""
        base = self.all.found(path)
        if base.least_seconds >= self.judge.seconds:
            return
        plain = self.judge.judge(self.question.plan(base.choices))
        ways = [plain, *self._judge_rounds(plain.plan)]
        if min(one.step_time for one in ways) >= self.judge.seconds:
            return
        for again, more in cheapest_sums(self.all.forward(path, self.able)):
            if base.whole + more >= self.judge.seconds or self._enough(bound):
                return
            plan = self.question.plan(base.choices, again)
            self.judge.judge(plan)
            self._judge_rounds(plan)

    def _front(self) -> tuple[Judged, ...]:
        """The judged plans, and some for smaller limits."""
        best = self.judge.best
        assert best is not None
        squeezing = self.squeezing(best.peak_bytes, self.judge)
        low = squeezing.least(time.thread_time() + PATIENCE)
        for part in range(1, _FRONT):
            limit = int(low + (best.peak_bytes - low) * part / _FRONT)
            judge = Judge(self.question.experiment, self.question.machine, limit)
            self.squeezing(limit, judge).search(time.thread_time() + PATIENCE)
            self.judge.take(judge)
        return self.judge.front()
