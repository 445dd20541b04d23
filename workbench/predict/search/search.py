"""The search for the plan with the least predicted step time that fits, with a lower bound.

    1  All plans are the paths of a trellis, with costs whose sum is a lower bound of the predicted
       step time (`relaxation.py`).
    2  The plans that are cheapest at the mixes by which the bound is tightened, and the presets
       that the bound does not rule out, are predicted in full.
    3  Where a memory limit binds, plans that fit are looked for, and a bound on them
       (`memory_limit.py`); a limit below the least memory of all plans is refused before that.
    4  Further plans follow in the order of their bound. When the next bound is no less than the
       best prediction, that one is proven to be the best of all.

A table that embeds tokens and gives scores is held alike by both layers. So there is such a search
for each way to hold it, the one with the least bound first, and what it found bounds the others.

Small models are searched until the best plan is proven; for large ones the best plan so far is
returned once it is near enough, or no better one has been found for as long again, or the time is
over, with the lower bound: the gap is certified, against predicted step time.

Recomputing layers only costs time, and is done only where the limit requires it.

The bound is one of plans whose ranks have own rows between sharded layers, all at once. To divide
tokens instead (`Plan.shard_tokens`) moves as much; it is tried on what was found, and gains where a
batch has fewer rows than ranks. To run a tail in rounds may hide a gather; it is tried on what was
found, too.
"""

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

import numpy as np

from workbench.plan.experiment.experiment import Experiment, Optimizer, Synchronous
from workbench.plan.graph.graph import Graph, sample_bytes
from workbench.plan.machine.machine import Machine
from workbench.plan.placement.layer_plan import LayerPlan
from workbench.plan.placement.rounds import Rounds, RoundsError
from workbench.plan.plans.plan import Plan
from workbench.predict.memory.resident import STAGING_BYTES
from workbench.predict.search.choices import LocalPlacement, Pin, Shares
from workbench.predict.search.costs import StepCosts
from workbench.predict.search.evaluation import EvaluatedPlan, Evaluator, uncollected
from workbench.predict.search.memory_limit import LimitedSearch
from workbench.predict.search.question import Question, question_of
from workbench.predict.search.refusal import MemoryLimitError, bytes_of, refusal
from workbench.predict.search.relaxation import Relaxation, Terms
from workbench.predict.search.result import Reason, SearchResult, reasons_of
from workbench.predict.search.trellis import cheapest_sums, trellis_of
from workbench.predict.time.duration import load_seconds
from workbench.program.buckets import BYTES
from workbench.program.rows import HostLayout, micro_batches

# So many plans are searched completely, however long it takes.
ENUMERABLE = 4096
# Among more plans, the best one so far is returned within the first gap at once, and within the
# second gap after so many seconds; or so many seconds after the last find.
_SURE, _NEAR, PATIENCE, _IN_VAIN = 0.002, 0.01, 0.6, 0.4
_MOST_SECONDS = 10.0  # where nothing else was said
_IN_ROUNDS: tuple[Rounds, ...] = ("B/K", "B")
_FRONT = 6


class PlanSearch:
    """One search, with its state.

    Args:
        question: the arguments of the search.
        began: the time of its start, by `time.perf_counter`.
    """

    def __init__(self, question: Question, began: float) -> None:
        self.question, self.began = question, began
        self.worked = time.thread_time()  # limits are for work, whoever else is at work
        self.evaluator = Evaluator(question.experiment, question.machine, question.limit)
        self.costs = StepCosts(question.experiment, question.machine, question.weights)
        placement = LocalPlacement(question.graph, question.options)
        self.trellis = trellis_of(question.graph, placement, question.options, self.costs)
        self.recomputable = [question.may_recompute(layer) for layer in question.graph.layers]
        self.all = Relaxation(self.trellis, self._terms())

    def result(self) -> SearchResult:
        """Runs the search.

        Raises:
            MemoryLimitError: no plan fits.
        """
        parts = [self._under(way) for way in self.question.ways]
        parts.sort(key=lambda part: part.least_seconds)
        bound, refusals = float("inf"), list[MemoryLimitError]()
        for part in parts:
            part._first_plans()
        for part in parts:
            if part.least_seconds >= self.evaluator.seconds:
                break
            try:
                bound = min(bound, part.searched())
            except MemoryLimitError as error:
                refusals.append(error)
                if error.least <= self.question.limit:  # one that fits may be there
                    bound = min(bound, part.least_seconds)
        self._judge_tokens()
        self._judge_rounds()
        best = self.evaluator.best
        if best is None:
            raise min(refusals, key=lambda error: error.least)
        held = next(part for part in parts if part.trellis.path(best.plan.layers) is not None)
        return SearchResult(
            plan=best.plan,
            prediction=best.prediction,
            bound=min(bound, best.step_time),
            seconds=time.perf_counter() - self.began,
            memory_limit=self.question.limit,
            judged=len(self.evaluator),
            plans=self.question.plans,
            _why=lambda: held.reasons(parts, best.plan),
            _pareto=held._front,
        )

    def _under(self, way: Mapping[str, LayerPlan]) -> "PlanSearch":
        """The same search among the plans that hold tables in one way."""
        part = copy.copy(self)
        part.question = replace(self.question, ways=(way,))
        part.trellis = self.trellis.only(way)
        part.all = Relaxation(part.trellis, self.all.terms)
        return part

    @cached_property
    def least_seconds(self) -> float:
        """The seconds that every plan takes at least."""
        return self.all.bound(self.all.tightest())

    def searched(self) -> float:
        """Evaluates plans until one is good enough; returns a lower bound of all.

        Raises:
            MemoryLimitError: no plan fits.
        """
        bound = self.least_seconds
        if self._enumerable or not self.evaluator.tight:
            bound = self._prove(self.all.tightest().mix)
        if self.evaluator.tight and not self._enumerable:
            bound = max(bound, self._bound_under_limit())
        if self.evaluator.best is None:  # all have been judged
            raise self._refusal(float("inf"))
        return bound

    def reasons(self, parts: Sequence["PlanSearch"], plan: Plan) -> Mapping[str, Reason]:
        """Each layer's options, and what they would cost instead of those of a plan.

        Args:
            parts: the searches among the plans that hold tables in another way, and this one.
            plan: the plan that was found.
        """
        tightest = self.all.tightest()
        ways = [(part.question.ways[0], part.all.at(tightest.mix).paths.cheapest) for part in parts]
        return reasons_of(self.question, self.trellis, tightest, ways, plan)

    def _bound_under_limit(self) -> float:
        """Searches the plans that fit, and returns a lower bound on them.

        Raises:
            MemoryLimitError: no plan that fits was found.
        """
        bound = self._limited.search(self.question.limit, self.evaluator)
        for plan in self._lean_presets() if self.evaluator.best is None else ():
            self.evaluator.evaluate(plan)
        if self.evaluator.best is None:
            raise self._refusal(self._limited.least)
        return bound

    @cached_property
    def _limited(self) -> LimitedSearch:
        common = self.question, self.trellis, self.costs, self.all.terms
        return LimitedSearch(*common, self.all.tightest().mix, self._resident())

    def _terms(self) -> Terms:
        """The terms that the bounds have in common."""
        question = self.question
        machine, sync = question.machine, question.experiment.sync
        links = [machine.within] if machine.across is None else [machine.within, machine.across]
        free = (1 - min(link.busy for link in links)) / machine.slowdown
        apart = isinstance(sync, Synchronous) and not sync.per_round
        return Terms(fixed=self._fixed(), slowed=1 - free, apart=apart)

    def _resident(self) -> float:
        """Bytes that every rank holds besides weights: its rows, and its staging."""
        experiment, world = self.question.experiment, self.question.world_size
        rows = np.sum(micro_batches(experiment), axis=0)
        sample = sample_bytes(self.question.graph.inputs, BYTES[experiment.precision])
        machine = self.question.machine
        hosts = HostLayout.of(world, machine.ranks_per_host)
        mates = (hosts.mates([range(world)]) > 1) * (not machine.own_gpus)
        groups = 2  # of gradients and of control
        return float((rows * sample + groups * STAGING_BYTES * mates).mean())

    def _fixed(self) -> float:
        """Seconds of loading, of the status all-reduce, and of the fixed cost of every step."""
        experiment, speeds = self.question.experiment, self.costs.speeds
        rows = np.sum(micro_batches(experiment), axis=0)
        sample = sample_bytes(self.question.graph.inputs, BYTES[experiment.precision])
        seconds = load_seconds(rows * sample, speeds) + speeds.each("step_s")
        world = self.question.world_size
        status = speeds.topology(range(world)).all_reduce((3 + world) * 8, "auto", beside=False)
        return float(self.question.weights @ seconds) + status.seconds

    def _first_plans(self) -> None:
        """Evaluates presets and the cheapest plans, as far as their bounds are below the best."""
        bound, found = self.least_seconds, list(self.all.seen())
        for preset in self._presets():
            path = self.trellis.path(preset.layers)
            if path is not None:
                found.append(self.all.found(path))
        for one in sorted(found, key=lambda one: one.least_seconds):
            if one.least_seconds < self.evaluator.seconds and not self._enough(bound):
                self.evaluator.evaluate(self.question.plan(one.choices))

    def _judge_rounds(self) -> None:
        """Evaluates the best plan with its tail in rounds."""
        best = self.evaluator.best
        if best is not None:
            with suppress(RoundsError):
                for rounds in _IN_ROUNDS if best.plan.tail is not None else ():
                    self.evaluator.evaluate(best.plan.with_rounds(rounds))

    def _judge_tokens(self) -> None:
        """Evaluates the best plan with divided tokens; the presets too, where ranks lack rows."""
        layers, best = self.question.graph.layers, self.evaluator.best
        if best is None or not any(way.of_tokens for one in layers for way in one.propagations):
            return
        plans = [best.plan]
        if np.min(micro_batches(self.question.experiment)) == 0:
            plans += self._possible_presets()
        for plan in plans:
            divided = plan.with_shard_tokens()
            if divided.flow != plan.flow:
                self.evaluator.evaluate(divided)

    def _possible_presets(self) -> list[Plan]:
        """The presets whose choices are among those to consider."""
        return [plan for plan in self._presets() if self.trellis.path(plan.layers) is not None]

    def _presets(self) -> Iterator[Plan]:
        graph, world = self.question.graph, self.question.world_size
        yield Plan.data_parallel(graph, world)
        for k in self.question.sizes:
            if k > 1:
                yield Plan.hybrid(graph, world, k)

    def _lean_presets(self) -> list[Plan]:
        """The presets with most layers recomputed, in segments of equal length."""
        if not self.question.recompute:
            return []
        recomputable = [layer.name for layer in self.question.graph.layers if self._may(layer.name)]
        length = max(2, round(len(recomputable) ** 0.5))
        recomputed = [name for index, name in enumerate(recomputable) if (index + 1) % length]
        return [self.question.plan(p.layers, recomputed) for p in self._possible_presets()]

    def _may(self, name: str) -> bool:
        return self.question.may_recompute(self.question.graph[name])

    def _refusal(self, bytes_: float) -> MemoryLimitError:
        lean = self.evaluator.leanest
        assert lean is not None
        batch_size = self.question.experiment.batch_size
        return refusal(self.question.limit, lean.plan, lean.peak_bytes, bytes_, batch_size)

    @property
    def _enumerable(self) -> bool:
        """Whether all plans can be evaluated."""
        ways = 2 ** sum(self.recomputable) if self.evaluator.tight else 1
        return self.question.plans * ways <= ENUMERABLE

    @property
    def _until(self) -> float:
        """The end of the search, by `time.thread_time`."""
        return self.worked + (self.question.seconds or _MOST_SECONDS)

    def _enough(self, bound: float) -> bool:
        """Whether the search may end, given that no plan can take less than `bound` seconds."""
        if self._enumerable or self.evaluator.best is None:
            return False
        now, gap = time.thread_time(), 1 - bound / self.evaluator.seconds
        gained = self.evaluator.gained
        in_vain = now - gained > max(_IN_VAIN, gained - self.worked)
        near = gap <= _NEAR and now > self.worked + PATIENCE
        return gap <= _SURE or near or now > self._until or (in_vain and not self.question.seconds)

    def _prove(self, mix: float) -> float:
        """Evaluates plans in the order of their bounds; returns the bound of the others."""
        priced = self.all.at(mix)
        for cost, path in priced.paths.in_order():
            bound = cost + self.all.terms.fixed
            if bound >= self.evaluator.seconds:
                return self.evaluator.seconds
            if self._enough(bound):
                return bound
            self._settle(path, bound)
            if self._enough(bound):  # perhaps before this one was settled
                return bound
        return self.evaluator.seconds

    def _settle(self, path: list[int], bound: float) -> None:
        """Finds the best plan with one choice of schemes."""
        base = self.all.found(path)
        if base.least_seconds >= self.evaluator.seconds:
            return
        plain = self.evaluator.evaluate(self.question.plan(base.choices))
        if plain.step_time >= self.evaluator.seconds:
            return
        for recomputed, more in cheapest_sums(self.all.forward(path, self.recomputable)):
            if base.serial_s + more >= self.evaluator.seconds or self._enough(bound):
                return
            self.evaluator.evaluate(self.question.plan(base.choices, recomputed))

    def _front(self) -> tuple[EvaluatedPlan, ...]:
        """The evaluated plans on the Pareto front, and some for smaller limits."""
        best = self.evaluator.best
        assert best is not None
        low = self._limited.least
        for part in range(1, _FRONT):
            limit = int(low + (best.peak_bytes - low) * part / _FRONT)
            evaluator = Evaluator(self.question.experiment, self.question.machine, limit)
            self._limited.search(limit, evaluator)
            self.evaluator.take(evaluator)
        return self.evaluator.front()


def search(
    graph: Graph | Plan | Experiment,
    machine: Machine,
    experiment: Experiment | None = None,
    *,
    world_size: int | None = None,
    memory_limit: float | str | None = None,
    batch_size: int | None = None,
    optimizer: Optimizer | str | None = None,
    precision: str | None = None,
    pin: Mapping[str, Pin] | None = None,
    group_sizes: Sequence[int] | None = None,
    shares: Sequence[Shares] | bool = True,
    recompute: bool = True,
    time_limit: float | None = None,
    schemes: Sequence[object] = (),
) -> SearchResult:
    """Finds the plan with the least predicted step time under a memory limit of each rank.

    Args:
        graph: the model; or a plan or an experiment, whose model, number of ranks and mode of batch
            norm are meant.
        machine: the machine that it will run on: measured, or a preset.
        experiment: the experiment that runs it; its plan is ignored, except for its mode of batch
            norm. None: a step of momentum SGD with 32 samples for each rank.
        world_size: the number of ranks; None: that of the plan or the experiment that is given,
            else one for each of several devices of the machine.
        memory_limit: the bytes of a rank, or text such as "2GiB"; None: the devices' memory.
        batch_size: the samples of a step over all ranks, instead of the experiment's.
        optimizer: the optimizer, instead of the experiment's.
        precision: the precision, instead of the experiment's.
        pin: the choices that are fixed: a scheme or a LayerPlan by the name of a layer, or by a
            pattern such as "features.*", which means the matching layers that can be split.
        group_sizes: the group sizes to consider besides 1; None: all that divide the world.
        shares: the unequal shares to consider beside equal ones. True: by the speed of the
            machine's devices, where they differ. False: none.
        recompute: whether layers may be recomputed in the backward pass.
        time_limit: the seconds of work after which a search without a binding memory limit returns
            what it has; it ends before that once no plan can be faster by more than 1 %. None: 10
            seconds, and it ends, too, once it has found none that is faster by 0.2 % for as long
            again. A search under a binding memory limit takes a few seconds at most.
        schemes: schemes of your own to consider beside the built-in ones: objects or classes that
            extend `Scheme`, "module:attribute", or entry points of `workbench.schemes`. They are
            considered for convolutions, linear layers, attention and operations that follow their
            input whatever comes later; what they state is taken for the layer by itself, so that
            the bound holds for them as for the others.

    Raises:
        MemoryLimitError: no plan fits; it says how much memory one needs at least, and holds the
            leanest plan found.
        PlanError: no model or number of ranks; a pin, a group size or a limit that cannot be.
        MachineError: no machine, or one of another world size.
        ExperimentError: an experiment that cannot be predicted.
    """
    began = time.perf_counter()
    question = question_of(
        graph,
        machine,
        world_size,
        None if memory_limit is None else bytes_of(memory_limit),
        experiment=experiment,
        batch_size=batch_size,
        optimizer=optimizer,
        precision=precision,
        pin=pin,
        group_sizes=group_sizes,
        shares=shares,
        recompute=recompute,
        seconds=time_limit,
        schemes=schemes,
    )
    with uncollected():
        return PlanSearch(question, began).result()
