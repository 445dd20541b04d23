"""Executes the program of a step on one rank, instruction by instruction.

Each instruction is bound once to what it calls: passes (`passes.py`), or the strategy. Two things
are left to torch. A backward pass runs as a whole, and a sum of gradients that the list has inside
of one begins when autograd has left the last gradient of its bucket, so far as the list permits.
Where the list says that the ranks agree, a step is over for as long as they do.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from workbench.comm.groups.world import World
from workbench.layers.cut_model import CutModel
from workbench.plan.experiment.experiment import Experiment
from workbench.program.buckets import Bucket
from workbench.program.instructions import (
    Agree,
    Backward,
    Instruction,
    Load,
    Reduce,
    Section,
    Weigh,
    turn_of,
)
from workbench.program.rows import micro_batches
from workbench.program.step import RankProgram
from workbench.train.data.datasets import Dataset
from workbench.train.data.feed import Feed, MicroBatch
from workbench.train.step.loss import StepLoss, step_loss
from workbench.train.step.passes import Passes, Precision
from workbench.train.step.state import StepFunction, StepState, Strategy

Batches = tuple[tuple[int, ...], ...]
"""For each micro-batch, the rows of each rank."""


@dataclass(frozen=True)
class StepResult:
    """What one step did, before its gradients are applied.

    Attributes:
        seconds: the time from the first row's loading until the ranks are to agree.
        outputs: the outputs of the last micro-batch, as the plan's flow lays them.
    """

    loss: float
    samples: int
    seconds: float
    blocked_s: float
    batches: tuple[MicroBatch, ...]
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class _Bound:
    """A rank's instructions, bound to what they call: up to the agreement, and behind it."""

    listed: RankProgram
    rows: tuple[int, ...]
    before: tuple[StepFunction, ...]
    behind: tuple[StepFunction, ...]


class Stepper:
    def __init__(
        self,
        experiment: Experiment,
        model: CutModel,
        strategy: Strategy,
        data: Dataset,
        world: World,
        dtype: torch.dtype,
        loss: StepLoss = step_loss,
    ) -> None:
        self.experiment, self.model, self.strategy = experiment, model, strategy
        self.world, self.dtype = world, dtype
        precision = _precision(experiment, world.device)
        self.passes = Passes(model, precision, loss, strategy.scaling)
        self._batches: dict[int, Batches] = {}
        self._known: dict[Batches, _Bound] = {}
        self.feed = Feed(experiment, data, world.rank, world.device, dtype, self._rows)
        self._bound(0, self._rows(experiment.batch_size))
        self._waiting: tuple[StepState, _Bound] | None = None

    def run(self, step: int, batches: tuple[MicroBatch, ...] = ()) -> StepResult:
        """Executes a step until the ranks are to agree on it.

        It leaves in every `grad` what the update is to see: for synchronous steps, the gradient of
        the mean loss over the global batch.

        Args:
            batches: what to run on, this rank's rows of each micro-batch; none: what the data set
                has for this step.
        """
        started, blocked = time.perf_counter(), self.world.recorder.blocked_s
        rows = tuple(batch.rows for batch in batches)
        if not batches:
            rows = self._rows(self.feed.samples(step))
        bound = self._bound(step, rows)
        run = StepState(step, bound.rows, sum(bound.rows), batches)
        for action in bound.before:
            action(run)
        self._waiting = run, bound
        seconds = time.perf_counter() - started
        blocked_s = self.world.recorder.blocked_s - blocked
        found = StepResult(run.loss, run.samples, seconds, blocked_s, run.batches, run.outputs)
        run.batches, run.outputs = (), ()
        return found

    def update(self) -> None:
        """Executes what the program lists behind the agreement: the weights move.

        They do not where gradients of a scaled loss are no numbers: what follows is left out.

        Raises:
            RuntimeError: no step waits for that.
        """
        if self._waiting is None:
            raise RuntimeError("no step has been run that waits for its update")
        (run, bound), self._waiting = self._waiting, None
        for action in bound.behind:
            action(run)
            if not run.updates:
                return

    def _load(self, run: StepState) -> None:
        if not run.batches:
            with self.world.excused():
                run.batches = self.feed.take(run.step)

    def _rows(self, count: int) -> Batches:
        if count not in self._batches:
            self._batches[count] = tuple(micro_batches(self.experiment, count))
        return self._batches[count]

    def _bound(self, step: int, batches: Batches) -> _Bound:
        self.strategy = self.strategy.at(step)
        listed = self.strategy.program
        known = self._known.get(batches)
        if known is None or known.listed is not listed:
            program = listed
            if batches != listed.program.ranks.batches:
                program = replace(listed.program, batches=batches).of(listed.rank)
            before, behind = bind(program, self.passes, self.strategy, self._load)
            rows = tuple(map(sum, zip(*batches, strict=True)))
            known = self._known[batches] = _Bound(listed, rows, before, behind)
        return known


def bind(
    program: RankProgram, passes: Passes, strategy: Strategy, load: StepFunction
) -> tuple[tuple[StepFunction, ...], tuple[StepFunction, ...]]:
    """What a rank does at the instructions of its program: up to the agreement, and behind it."""
    sections = program.program.sections
    computing, expected = passes.listed(program.program), _Expected(program)
    last = {section.on.micro_batch: section for section in sections if section.on is not None}
    before, behind = list[StepFunction | None](), list[StepFunction | None]()
    actions, begun = before, -1
    for section in sections:
        on = section.on
        if on is None:
            for is_sum, together in groupby(section.numbered, lambda each: _is_sum(each[1])):
                if is_sum:
                    numbers, sums = zip(*together, strict=True)
                    actions.append(_in_turn(strategy.reducing(expected.at(numbers)), *sums))
                    continue
                for _, instruction in together:
                    match instruction:
                        case Load():
                            actions.append(load)
                        case Weigh():
                            actions.append(passes.weigh)
                        case Agree():
                            actions = behind
                        case _:
                            actions.append(_in_turn(strategy.bound(instruction), instruction))
            continue
        if on.micro_batch > begun:
            begun = on.micro_batch
            actions.append(computing.begin(begun))
        match section.kind:
            case "prefetch":
                actions.append(computing.prefetch(on))
            case "forward":
                actions.append(computing.forward(on))
            case "loss":
                actions.append(computing.loss(on))
            case "backward":
                expect = strategy.expecting(*expected.within(section))
                actions.append(_in_turn(expect, *expected.reduces))
                actions.append(computing.backward(on))
        if section is last[on.micro_batch]:
            actions.append(computing.end(on.micro_batch))
    return tuple(filter(None, before)), tuple(filter(None, behind))


def _is_sum(instruction: Instruction) -> bool:
    return isinstance(instruction, Reduce)


def _in_turn(action: StepFunction | None, *instructions: Instruction) -> StepFunction | None:
    """An action, only in the steps in which its instructions are executed; all in the same ones."""
    every = max(map(turn_of, instructions), default=1)
    if action is None or every == 1:
        return action
    return lambda run: action(run) if (run.step + 1) % every == 0 else None


class _Expected:
    def __init__(self, program: RankProgram) -> None:
        order = {bucket.names: place for place, bucket in enumerate(program.buckets)}
        made = defaultdict[str, list[int]](list)
        self.reduces = [one for one in program.program.instructions if isinstance(one, Reduce)]
        self._behind: list[tuple[int, int, Bucket]] = []
        self._at: dict[int, Bucket] = {}
        self._final: list[tuple[int, str]] = []
        for index, one in enumerate(program.program.instructions):
            if isinstance(one, Backward) and one.operation.layer is not None:
                for weight in one.operation.layer.weights:
                    made[weight.name].append(index)
            elif isinstance(one, Reduce) and (part := program.part_of(one)) is not None:
                bucket, after = part
                if after < 0:
                    self._at[index] = bucket
                    continue
                self._behind.append((after, order[bucket.names], bucket))
                for name in bucket.names:
                    self._final += [(max(i for i in made[name] if i <= after), name)]
        self._behind.sort(key=lambda one: one[:2])

    def at(self, indices: Sequence[int]) -> list[Bucket]:
        """Those that begin at their own places in the list."""
        return [self._at[index] for index in indices if index in self._at]

    def within(self, section: Section) -> tuple[set[str], list[Bucket]]:
        """The last gradients that a section leaves, and the sums that begin in it."""
        inside = range(section.first, section.first + len(section.instructions))
        names = {name for index, name in self._final if index in inside}
        return names, [bucket for after, _, bucket in self._behind if after in inside]


def _precision(experiment: Experiment, device: torch.device) -> Precision:
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    if experiment.half:
        return partial(torch.autocast, device.type, halves[experiment.precision])
    return nullcontext
