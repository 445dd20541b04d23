"""What one process computes, in plain torch: the loop that every split run is held against.

It shares no code with the library. A module, torch's own optimizer and loss, and the batches of
every step as tensors, in the order of their rows; that is all. Three things are not in a plain
loop, since they are what a run is asked for: micro-batches, draws that are a function of their
place (`draws.py`), and batch norms that see the rows of their own ranks only.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tests.oracle.draws import Draws, Place

Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Batch:
    """The rows of one step, in global order.

    Attributes:
        inputs: [rows, *sample].
        labels: [rows].
        ranks: rows of each rank, for each micro-batch; only local batch norms depend on it.
    """

    inputs: Tensor
    labels: Tensor
    ranks: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Task:
    """What to compute.

    Attributes:
        optimizer: of the parameters, torch's own.
        loss: mean over the rows, of what the module returns.
        batches: of every step.
        test: inputs and labels to evaluate on.
        test_batch: rows of a batch of the evaluation.
        precision: "fp64", "fp32" or "bf16" (autocast; weights in fp32).
        accumulate: micro-batches of a step; a batch is cut evenly, the first ones larger.
        seed: of draws.
        draws: the layers that draw, in order, with the places of what they draw (`Draws`).
        local: for each batch norm that sees some ranks' rows only, the ranks that see theirs
            together; empty: all see all.
        merged: steps after which the running statistics of local batch norms become one.
        late: steps by which gradients are late.
        warmup: steps of which none is late.
    """

    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    loss: Loss
    batches: Sequence[Batch]
    test: tuple[Tensor, Tensor]
    test_batch: int
    precision: str = "fp64"
    accumulate: int = 1
    seed: int = 0
    draws: Mapping[str, Sequence[Place]] = field(default_factory=dict)
    local: Mapping[str, int] = field(default_factory=dict)
    merged: frozenset[int] = frozenset()
    late: int = 0
    warmup: int = 0


@dataclass(frozen=True)
class Step:
    """After one step: copies.

    Attributes:
        outputs: of the last micro-batch.
        loss: mean over the batch.
        gradients: before the update; None where there is none.
        weights: after the update.
        buffers: after the update.
        state: of the optimizer, by parameter.
        evaluation: loss and accuracy on the test rows.
    """

    outputs: tuple[Tensor, ...]
    loss: float
    gradients: dict[str, Tensor | None]
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    state: dict[str, dict[str, Tensor]]
    evaluation: tuple[float, float]


def train(module: nn.Module, task: Task) -> list[Step]:
    """Trains the module in place."""
    module.train()
    parameters = dict(module.named_parameters())
    optimizer = task.optimizer([p for p in parameters.values() if p.requires_grad])
    draws = Draws(module, task.draws, task.seed)
    norms = LocalNorms(module, task.local)
    waiting: list[dict[str, Tensor | None]] = []
    found = []
    for index, batch in enumerate(task.batches):
        optimizer.zero_grad()
        loss, outputs = _step(module, task, batch, index, draws, norms)
        gradients = {name: _copy(p.grad) for name, p in parameters.items()}
        waiting.append(gradients)
        late = 0 if index < task.warmup else task.late
        if index - late >= (task.warmup if late else 0):
            for name, parameter in parameters.items():
                parameter.grad = _copy(waiting[index - late][name])
            optimizer.step()
        if index in task.merged:
            norms.merge()
        found.append(
            Step(
                outputs,
                loss,
                gradients,
                {name: p.detach().clone() for name, p in parameters.items()},
                {name: b.detach().clone() for name, b in module.named_buffers()},
                {
                    name: {key: value.clone() for key, value in optimizer.state[p].items()}
                    for name, p in parameters.items()
                    if p in optimizer.state
                },
                evaluate(module, task),
            )
        )
    return found


def _step(
    module: nn.Module, task: Task, batch: Batch, index: int, draws: Draws, norms: "LocalNorms"
) -> tuple[float, tuple[Tensor, ...]]:
    """Gradients of the mean over the batch; the loss, and the last micro-batch's outputs."""
    count, total, first = len(batch.labels), 0.0, 0
    outputs: Any = ()
    size, more = divmod(count, task.accumulate)
    sizes = [size + 1] * more + [size] * (task.accumulate - more)
    for turn, rows in enumerate(filter(None, sizes)):
        inputs = batch.inputs[first : first + rows].to(_dtype(task))
        labels = batch.labels[first : first + rows]
        draws.start(index, first)
        norms.ranks = batch.ranks[turn] if batch.ranks else ()
        with draws, _autocast(task):
            outputs = module(inputs)
        loss = task.loss(outputs, labels) * (rows / count)
        loss.backward()
        total += loss.item()
        first += rows
    return total, tuple(output.detach().clone() for output in as_tuple(outputs))


def evaluate(module: nn.Module, task: Task) -> tuple[float, float]:
    """Mean loss and accuracy of the first output, in evaluation mode; the module is left as it was.

    Evaluations are not autocast.
    """
    module.eval()
    inputs, labels = task.test
    loss, hits = 0.0, 0
    with torch.no_grad():
        for first in range(0, len(labels), task.test_batch):
            some = labels[first : first + task.test_batch]
            logits = as_tuple(module(inputs[first : first + task.test_batch].to(_dtype(task))))[0]
            loss += F.cross_entropy(logits, some, reduction="sum").item()
            hits += int((logits.argmax(1) == some).sum())
    module.train()
    return loss / len(labels), hits / len(labels)


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    """What a module returns, as a tuple of tensors."""
    if isinstance(outputs, Tensor):
        return (outputs,)
    values = outputs.values() if isinstance(outputs, dict) else outputs
    return tuple(value for value in values if value is not None)


class LocalNorms:
    """Batch norms that normalize the rows of each group of ranks by themselves, one after another.

    Every group has running statistics of its own. `merge` makes of them their mean, weighted with
    the rows that each has seen since the last time.

    Args:
        module: whose batch norms to change.
        groups: ranks that see their rows together, by path.
    """

    def __init__(self, module: nn.Module, groups: Mapping[str, int]) -> None:
        self.ranks: tuple[int, ...] = ()
        self.norms = {path: module.get_submodule(path) for path in groups}
        self.own: dict[str, dict[int, list[Tensor]]] = {path: {} for path in groups}
        self.seen: dict[str, dict[int, int]] = {path: {} for path in groups}
        for path, norm in self.norms.items():
            norm.forward = self._forward(path, norm, groups[path], norm.forward)  # type: ignore[method-assign]

    def _forward(self, path: str, norm: Any, k: int, plain: Callable[[Tensor], Tensor]) -> Any:
        assert isinstance(norm, _BatchNorm)

        def forward(x: Tensor) -> Tensor:
            if not norm.training:
                return plain(x)
            per_sample = x.shape[0] // sum(self.ranks)
            groups = [self.ranks[first : first + k] for first in range(0, len(self.ranks), k)]
            counts = [sum(group) * per_sample for group in groups]
            tracking = norm.running_mean is not None
            if tracking:
                norm.num_batches_tracked.add_(1)
            parts = []
            for group, part in enumerate(x.split(counts)):
                if len(part) == 0:
                    continue
                mean, var, factor = None, None, 0.0
                if tracking:
                    if group not in self.own[path]:
                        start = [norm.running_mean.clone(), norm.running_var.clone()]
                        self.own[path][group], self.seen[path][group] = start, 0
                    mean, var = self.own[path][group]
                    self.seen[path][group] += len(part)
                    factor = norm.momentum
                    if factor is None:
                        factor = 1.0 / float(norm.num_batches_tracked)
                args = (norm.weight, norm.bias, True, factor, norm.eps)
                parts.append(F.batch_norm(part, mean, var, *args))
            return torch.cat(parts)

        return forward

    @torch.no_grad()
    def merge(self) -> None:
        """Makes the statistics of all groups one: in the module, and where they go on from."""
        for path, norm in self.norms.items():
            own, seen = self.own[path], self.seen[path]
            if not own:
                continue
            total = sum(seen.values())
            for index, name in enumerate(("running_mean", "running_var")):
                merged = sum(own[group][index] * (seen[group] / total) for group in own)
                getattr(norm, name).copy_(merged)
            own.clear()
            seen.clear()


def _autocast(task: Task) -> Any:
    return torch.autocast("cpu", torch.bfloat16) if task.precision == "bf16" else nullcontext()


def _dtype(task: Task) -> torch.dtype:
    return torch.float64 if task.precision == "fp64" else torch.float32


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()
