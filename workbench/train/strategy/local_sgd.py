"""Local steps, and parameters averaged every few of them.

A parameter that lies over groups of k ranks sees the rows of its rank's group (k = 1: the
rank's own). With n_g rows in group g and n = sum of n_g,

    local step    gradient of the rank's loss, a sum over rows / n, times n / n_g
    averaging     w = sum over g of (m_g / m) w_g,  m_g the rows of g since the last averaging

so that one local step and an averaging is the step with the mean gradient over all n rows. For
equal parts these are the factors of SplitBrain's table (a sum over k rounds divided by k).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.comm.all_reduce import start_all_reduce
from workbench.comm.groups.group import Group
from workbench.layers.cut_model import CutModel
from workbench.plan.placement.placement import shard_group
from workbench.program.buckets import Bucket
from workbench.program.instructions import (
    Adjust,
    Average,
    Correct,
    Instruction,
    Rescale,
    Update,
    ZeroGrad,
)
from workbench.program.step import RankProgram
from workbench.train.optimizer.optimizer import Updater
from workbench.train.optimizer.state import forget
from workbench.train.step.state import OutOfOrder, StepFunction, Strategy


@dataclass(frozen=True)
class Mean:
    """What one group averages."""

    tensors: Sequence[Tensor]
    part: float
    group: Group


@torch.no_grad()
def average(means: Sequence[Mean], bucket_bytes: int) -> None:
    """Replaces tensors by their weighted means over groups, bitwise equal on all ranks.

    A rank receives 2 (k-1)/k of their bytes, k the group's size. Beside them it needs the room of
    the largest bucket of all groups, in which all of a dtype take turns.
    """
    buckets = [
        (bucket, mean)
        for mean in means
        if mean.group.size > 1
        for bucket in _bucketed(mean.tensors, bucket_bytes)
    ]
    rooms = _rooms([bucket for bucket, _ in buckets])
    for bucket, mean in buckets:
        sizes = [tensor.numel() for tensor in bucket]
        flat = rooms[bucket[0].dtype][: sum(sizes)]
        places = [
            piece.view_as(tensor) for piece, tensor in zip(flat.split(sizes), bucket, strict=True)
        ]
        for tensor, place in zip(bucket, places, strict=True):
            torch.mul(tensor, mean.part, out=place)
        start_all_reduce(flat, mean.group, layer="parameters").wait()
        for tensor, place in zip(bucket, places, strict=True):
            tensor.copy_(place)


def _bucketed(tensors: Sequence[Tensor], bucket_bytes: int) -> list[list[Tensor]]:
    """Tensors of one dtype together, in their order; empty ones are left out."""
    buckets: list[list[Tensor]] = []
    opened: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        bucket = opened.get(tensor.dtype, [])
        if not bucket:
            buckets.append(bucket)
        bucket.append(tensor)
        full = sum(t.nbytes for t in bucket) >= bucket_bytes
        opened[tensor.dtype] = [] if full else bucket
    return buckets


def _rooms(buckets: Sequence[Sequence[Tensor]]) -> dict[torch.dtype, Tensor]:
    """For each dtype, as much memory as its largest bucket takes."""
    most: dict[torch.dtype, int] = {}
    for first, *others in buckets:
        numel = first.numel() + sum(tensor.numel() for tensor in others)
        most[first.dtype] = max(numel, most.get(first.dtype, 0))
    like = {bucket[0].dtype: bucket[0] for bucket in buckets}
    return {dtype: like[dtype].new_empty(numel) for dtype, numel in most.items()}


class LocalStrategy(Strategy):
    """Each rank (or shard group) by itself, until the next averaging."""

    def __init__(self, program: RankProgram, model: CutModel, updater: Updater) -> None:
        super().__init__(program)
        experiment = program.program.experiment
        self.momentum = experiment.sync.timing.momentum
        self._bucket_bytes: int = experiment.sync.bucket_bytes
        self.model, self.updater = model, updater
        self._parameters = model.trainable()
        nobody = (0,) * model.plan.world_size
        self._since = nobody  # rows of each rank since the last averaging
        self._before = nobody  # and in the interval before, until all is settled

    def bound(self, instruction: Instruction) -> StepFunction:
        match instruction:
            case ZeroGrad():
                return lambda _: self._zero_grad()
            case Rescale():
                return lambda run: self._rescale(run.rows)
            case Update():
                return lambda run: self._step(run.step)
            case Average():
                return lambda _: self._average(self.momentum == "average")
            case Adjust(names):
                return lambda run: self._adjust(names, run.step)
            case Correct():
                return lambda run: self._correct(run.step)
        return super().bound(instruction)

    def reducing(self, buckets: Sequence[Bucket]) -> StepFunction:
        raise OutOfOrder("local steps sum no gradients")

    def _step(self, step: int) -> None:
        self.updater.begin(step)
        self.updater.step()

    def _zero_grad(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def _rescale(self, rows: tuple[int, ...]) -> None:
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            seen = self._seen(rows, self.model.placements[name].group_size)
            if seen:  # without rows the gradient is zero
                parameter.grad.mul_(sum(rows) / seen)
        self._since = tuple(a + b for a, b in zip(self._since, rows, strict=True))

    def _adjust(self, names: Sequence[str], step: int) -> None:
        assert self.updater.rules is not None
        named = {name: self._parameters[name].grad for name in names}
        self.updater.rules.adjust(step, {n: grad for n, grad in named.items() if grad is not None})

    def _correct(self, step: int) -> None:
        assert self.updater.rules is not None
        self.updater.rules.correct(step)

    def settle(self) -> None:
        """An averaging in which even momentum to be kept is averaged."""
        if any(self._since):
            self._average(self.momentum != "reset")
        elif self.momentum == "keep" and any(self._before):
            self._mean(self._state(), self._before)
        self._before = (0,) * len(self._before)

    @property
    def is_settled(self) -> bool:
        return not any(self._since)

    def _average(self, with_state: bool) -> None:
        tensors = [(name, p.detach()) for name, p in self._parameters.items()]
        self._mean(tensors + (self._state() if with_state else []), self._since)
        if self.momentum == "reset":
            forget(self.updater.optimizer, self.updater.value)
        self._before, self._since = self._since, (0,) * len(self._since)

    def _mean(self, tensors: list[tuple[str, Tensor]], rows: tuple[int, ...]) -> None:
        """Averages tensors, named by the parameter as which they lie, weighted by rows."""
        placements = self.model.placements
        means = []
        for k in sorted({placements[name].group_size for name, _ in tensors}):
            mine = [tensor for name, tensor in tensors if placements[name].group_size == k]
            part = self._seen(rows, k) / sum(rows)
            means.append(Mean(mine, part, self.model.replica_group(k)))
        average(means, self._bucket_bytes)

    def _state(self) -> list[tuple[str, Tensor]]:
        """What the optimizer remembers of each element."""
        found, state = [], self.updater.optimizer.state
        for name, parameter in self._parameters.items():
            held = state.get(parameter, {})
            kept = self.updater.values[name].remembers.elements
            found += [(name, held[kind]) for kind in kept if kind in held]
        return found

    def _seen(self, rows: tuple[int, ...], group_size: int) -> int:
        """Of these rows, how many this rank's group of `group_size` ranks has."""
        return sum(rows[rank] for rank in shard_group(self.model.context.rank, group_size))
