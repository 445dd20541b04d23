"""A strategy on ranks, looked at step by step; and the same in plain torch, in one process.

The loop here knows nothing of programs, buckets or groups: it has a copy of the model for each
replica, and calls the strategy's own methods where `Strategy` says that they are called.
"""

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.comm.groups.world import RankConfig, World
from workbench.model.tracing.inputs import called_whole
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.sync import Strategy
from workbench.plan.placement.placement import Shard, apportion
from workbench.plan.plans.plan import Plan
from workbench.train.checkpoint.saver import Saver, parts
from workbench.train.data.datasets import open_for
from workbench.train.data.feed import listed, rows_of_step
from workbench.train.optimizer.state import entry
from workbench.train.run.loop import agree
from workbench.train.run.rank import RankState, group_specs_of
from workbench.train.run.reshard import under

_CLOSE = 1e-9

Rows = tuple[tuple[str, str, str, str, int, int, int], ...]
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Observed:
    """What one rank saw.

    Attributes:
        digests: the digest of its weights after each step in which replicas are to be equal; else
            "".
        goes_on: whether a run that resumed from a checkpoint left the same bits as the run that
            wrote it; and, where gradients are exchanged, whether that run left the same weights as
            one without checkpoints.
        resharded: whether the pieces under another plan were of the same weights and states.
    """

    traffic: tuple[Rows, ...]
    digests: tuple[str, ...]
    weights: Mapping[str, Any]
    goes_on: bool
    resharded: bool


def observed(
    config: RankConfig,
    experiment: Experiment,
    weights: Path,
    directory: Path,
    cut: str,
    saved_after: int,
) -> Observed:
    """Trains under a plan that has all weights on each rank; every rank calls it."""
    with World.open(config) as world:
        groups = world.groups(group_specs_of(experiment.plan))

        def started(resume: Path | None = None) -> RankState:
            return RankState.start(experiment, world, groups, weights, resume)

        state, traffic, digests = started(), list[Rows](), list[str]()
        for step in range(experiment.steps):
            world.recorder.reset()
            _step(state, step)
            state.strategy.rest()
            traffic.append(tuple(row.counts for row in world.recorder.rows()))
            digests.append(_digest(state) if state.strategy.is_settled else "")
        found = _ended(state)

        state = started()
        _steps(state, range(saved_after))
        state.strategy.settle()
        saver = Saver(directory, state.everyone)
        strategy = state.strategy
        part, files = parts(
            saved_after,
            state.model,
            state.updater,
            in_flight=strategy.in_flight,
            residuals=strategy.residuals,
        )
        saver.begin(saved_after, part, files, experiment)
        saver.finish()
        _steps(state, range(saved_after, experiment.steps))
        went_on, resumed = _ended(state), started(saver.newest)
        _steps(resumed, range(saved_after, experiment.steps))
        again = _ended(resumed)
        saver.close()

        state = started()
        _steps(state, range(saved_after))
        state.strategy.settle()
        before = _remembered(state)
        after = under(state, Plan.from_toml(cut), saved_after)
        resharded = _are_pieces(after, before)
        after.stepper.feed.close()
    goes_on = all(torch.equal(again[name], tensor) for name, tensor in went_on.items())
    if not experiment.sync.timing.of_weights:
        both = zip(went_on.values(), found.values(), strict=True)
        goes_on &= all(torch.allclose(a, b, rtol=_CLOSE, atol=_CLOSE) for a, b in both)
    listed = {name: tensor.tolist() for name, tensor in found.items()}
    return Observed(tuple(traffic), tuple(digests), listed, goes_on, resharded)


def _steps(state: RankState, steps: range) -> None:
    for step in steps:
        _step(state, step)


def _step(state: RankState, step: int) -> None:
    result = state.stepper.run(step)
    agree(state.everyone, result.loss, False, result.blocked_s)
    state.stepper.update()


def _ended(state: RankState) -> Weights:
    state.strategy.settle()
    state.stepper.feed.close()
    return {name: piece.detach().clone() for name, piece in state.model.pieces().items()}


def _digest(state: RankState) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for piece in state.model.pieces().values():
        digest.update(piece.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def _remembered(state: RankState) -> Weights:
    """This rank's pieces of weights, and of what is remembered of each element."""
    known = state.updater.remembered
    names = {entry(kind, name) for name in known for kind in known[name].elements}
    held = state.updater.state(names)
    pieces = state.model.pieces() | {name: held[name] for name in names if name in held}
    return {name: piece.detach().clone() for name, piece in pieces.items()}


def _are_pieces(state: RankState, whole: Weights) -> bool:
    found = _remembered(state)
    for name, piece in found.items():
        placed = state.model.placements[name.split("/", 2)[-1]]
        expected = whole[name]
        if isinstance(placed.placement, Shard):
            span = placed.placement.span(state.world.rank % placed.group_size)
            expected = expected.narrow(placed.placement.dim, *span)
        if not torch.equal(piece, expected):
            return False
    return True


def in_one_process(experiment: Experiment, module: nn.Module) -> Weights:
    """The weights in the end, by the strategy's methods and plain torch alone; SGD, fp64."""
    return _Replicas(experiment, module).trained()


class _Replicas:
    def __init__(self, experiment: Experiment, module: nn.Module) -> None:
        self.experiment, self.timing = experiment, experiment.sync.timing
        self.strategy: Strategy = experiment.sync.strategy
        world = experiment.plan.world_size if self.timing.of_weights else 1
        self.copies = [deepcopy(module).double() for _ in range(world)]
        options = experiment.optimizer.options
        self.optimizers = [torch.optim.SGD(m.parameters(), **options) for m in self.copies]
        self.states = self._begun()
        self.flying: deque[tuple[list[Tensor], list[Tensor]]] = deque()
        self.added: list[Tensor] = []
        self.since = [0] * world
        self.data = open_for(experiment.plan.graph, experiment.data, "train")

    def trained(self) -> Weights:
        """All steps, and the averaging that a run ends with."""
        for step in range(self.experiment.steps):
            if step == self.timing.warmup:
                self.states = self._begun()
            if self.timing.of_weights:
                self._on_weights(step)
            else:
                self._on_gradients(step)
        if any(self.since):
            self._average(keeps_state=True)
        return {name: p.detach() for name, p in self.copies[0].named_parameters()}

    def _begun(self) -> list[dict[str, Tensor]]:
        return [
            {
                kind: p.clone() if first == "weight" else torch.full_like(p, first)
                for kind, first in self.timing.remembers.items()
            }
            for p in (each.detach() for each in self.copies[0].parameters())
        ]

    def _gradients(self, model: nn.Module, order: Tensor) -> list[Tensor]:
        """Those of a sum over rows."""
        inputs, targets = self.data.batch(order)
        batch = [x.double() if x.is_floating_point() else x for x in listed(inputs)]
        scores = called_whole(model, self.experiment.plan.graph.inputs, batch)
        loss = F.cross_entropy(scores, targets, reduction="sum")
        return list(torch.autograd.grad(loss, list(model.parameters())))

    def _order(self, step: int) -> Tensor:
        samples, size = len(self.data), self.experiment.batch_size
        return rows_of_step(samples, size, self.experiment.seed, step)

    @torch.no_grad()
    def _ruled(self, step: int, index: int, grads: list[Tensor], then: list[Tensor]) -> None:
        """Moves the weights of one copy."""
        parameters = list(self.copies[index].parameters())
        warm = step < self.timing.warmup
        for p, grad, at, state in zip(parameters, grads, then, self.states, strict=True):
            given = grad.clone()
            if self.timing.adjusts and not warm:
                given = self.strategy.gradient(step, given, p.detach(), at, state)
            p.grad = given.clone()
        self.optimizers[index].step()

    def _on_gradients(self, step: int) -> None:
        (model,), timing, order = self.copies, self.timing, self._order(step)
        grads = [g / len(order) for g in self._gradients(model, order)]
        now = [p.detach() for p in model.parameters()]
        then = [p.clone() for p in now]
        if step < timing.warmup:
            self._ruled(step, 0, grads, now)
            return
        if timing.late:
            self.flying.append((grads, then))
            if len(self.flying) <= timing.late:
                return
            grads, then = self.flying.popleft()
        if timing.adds_up:
            added = self.added or [torch.zeros_like(g) for g in grads]
            self.added = [a + g for a, g in zip(added, grads, strict=True)]
            if (step + 1) % timing.every:
                return
            grads, self.added = self.added, []
        self._ruled(step, 0, grads, then if timing.keeps_weights else now)

    def _on_weights(self, step: int) -> None:
        order, world = self._order(step), len(self.copies)
        rows = apportion(len(order), (1,) * world)
        every = [
            self._gradients(model, own)
            for model, own in zip(self.copies, order.split(list(rows)), strict=True)
        ]
        warm = step < self.timing.warmup
        sums = [sum(of) / len(order) for of in zip(*every, strict=True)]
        for index, (own, count) in enumerate(zip(every, rows, strict=True)):
            grads = sums if warm else [g / max(1, count) for g in own]
            self._ruled(step, index, grads, [p.detach() for p in self.copies[index].parameters()])
        if warm:
            return
        self.since = [a + b for a, b in zip(self.since, rows, strict=True)]
        if (step + 1) % self.timing.every == 0:
            self._average(keeps_state=False)
            self._correct(step)

    @torch.no_grad()
    def _average(self, *, keeps_state: bool) -> None:
        for several in zip(*(model.parameters() for model in self.copies), strict=True):
            self._mean([p.detach() for p in several])
            states = [o.state[p] for o, p in zip(self.optimizers, several, strict=True)]
            buffers = [s["momentum_buffer"] for s in states if s.get("momentum_buffer") is not None]
            if self.timing.momentum == "average" and buffers:
                self._mean(buffers)
            elif self.timing.momentum == "reset" and not keeps_state:
                for state in states:
                    state.clear()
        self.since = [0] * len(self.since)

    def _mean(self, tensors: Sequence[Tensor]) -> None:
        total = sum(self.since)
        mean = torch.stack([t * (n / total) for t, n in zip(tensors, self.since, strict=True)])
        for tensor in tensors:
            tensor.copy_(mean.sum(0))

    @torch.no_grad()
    def _correct(self, step: int) -> None:
        if not self.timing.corrects:
            return
        for index, several in enumerate(zip(*(m.parameters() for m in self.copies), strict=True)):
            mean = several[0].detach().clone()
            found = self.strategy.averaged(step, mean, self.states[index]).clone()
            for p in several:
                p.copy_(found)


Piece = tuple[str, Any, tuple[int, int, int] | None]
"""A weight's name, this rank's values, and (dim, start, length) of them; None: all."""


def cut_weights(config: RankConfig, experiment: Experiment, weights: Path) -> list[Piece]:
    """This rank's weights in the end, under any plan; every rank calls it."""
    found: list[Piece] = []
    with World.open(config) as world:
        groups = world.groups(group_specs_of(experiment.plan))
        state = RankState.start(experiment, world, groups, weights, None)
        _steps(state, range(experiment.steps))
        placements = state.model.placements
        for name, piece in _ended(state).items():
            placed, span = placements[name], None
            if isinstance(placed.placement, Shard):
                index = world.rank % placed.group_size
                span = (placed.placement.dim, *placed.placement.span(index))
            found.append((name, piece.tolist(), span))
    return found
