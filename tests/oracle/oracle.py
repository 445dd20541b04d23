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

from tests.oracle.draws import Draws, dims_of
from tests.oracle.one_row import read_right

Loss = Callable[[tuple[Tensor, ...], Tensor], Tensor]


@dataclass(frozen=True)
class Batch:
    """The rows of one step, in global order.

    Attributes:
        inputs: [rows, *sample].
        labels: [rows].
        ranks: rows of each rank, for each micro-batch; only local batch norms depend on it.
        test_ranks: rows of each rank, for each batch of the evaluation after it, one after the
            other.
    """

    inputs: Tensor
    labels: Tensor
    ranks: tuple[tuple[int, ...], ...] = ()
    test_ranks: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Task:
    """What to compute.

    Attributes:
        optimizer: of the parameters by name, torch's own.
        outputs: what is trained of what the module returns; the scores come first.
        loss: mean over the rows, of that.
        share: (labels of some rows, labels of all) -> what the mean over some counts in that over
            all; None: as many as they are, and evaluations report cross-entropy.
        ignored: the label that counts not in the accuracy; None: all do.
        batches: of every step.
        test: inputs and labels to evaluate on.
        precision: "fp64", "fp32", "bf16" or "fp16" (autocast; weights in fp32).
        scaler: arguments of torch's own GradScaler; None: losses are not scaled.
        skipped: steps that update nothing whatever their gradients, as they did elsewhere.
        accumulate: micro-batches of a step; a batch is cut evenly, the first ones larger.
        seed: of draws.
        draws: the layers that draw, in order, and how many tensors each draws (`Draws`).
        local: for each batch norm that sees some ranks' rows only, the ranks that see theirs
            together; empty: all see all.
        late: steps by which gradients are late.
        warmup: steps of which none is late.
        scheduler: of the optimizer, torch's own, stepped after each step; None: none.
        ema: decay of averaged weights, which evaluations use; None: there are none.
        clip_norm: of all gradients that are applied, together; None: any.
        clip_value: of each of their elements; None: any.
    """

    optimizer: Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer]
    outputs: Callable[[Any], tuple[Tensor, ...]]
    loss: Loss
    batches: Sequence[Batch]
    test: tuple[Tensor, Tensor]
    share: Callable[[Tensor, Tensor], float] | None = None
    ignored: int | None = None
    precision: str = "fp64"
    scaler: Mapping[str, Any] | None = None
    skipped: frozenset[int] = frozenset()
    accumulate: int = 1
    seed: int = 0
    draws: Mapping[str, int] = field(default_factory=dict)
    local: Mapping[str, int] = field(default_factory=dict)
    late: int = 0
    warmup: int = 0
    scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None
    ema: float | None = None
    clip_norm: float | None = None
    clip_value: float | None = None


@dataclass(frozen=True)
class Step:
    """After one step: copies.

    Attributes:
        outputs: of the last micro-batch.
        loss: mean over the batch.
        gradients: before the update, unscaled; None where there is none.
        weights: after the update.
        buffers: after the update.
        state: of the optimizer, by parameter.
        evaluation: loss and accuracy on the test rows.
        scale: of the loss, of the next step, and updates since it moved; None: there is none.
        skipped: whether nothing was updated.
    """

    outputs: tuple[Tensor, ...]
    loss: float
    gradients: dict[str, Tensor | None]
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    state: dict[str, dict[str, Tensor]]
    evaluation: tuple[float, float]
    scale: tuple[float, int] | None = None
    skipped: bool = False


@read_right()
def train(module: nn.Module, task: Task) -> list[Step]:
    """Trains the module in place."""
    module.train()
    parameters = dict(module.named_parameters())
    optimizer = task.optimizer({n: p for n, p in parameters.items() if p.requires_grad})
    averages = {
        name: p.detach().clone() for name, p in parameters.items() if task.ema and p.requires_grad
    }
    scheduler = None if task.scheduler is None else task.scheduler(optimizer)
    optimizer.step()  # of nothing; torch warns where the first steps move no weights
    draws = Draws(module, task.draws, task.seed, _dims(module, task))
    norms = LocalNorms(module, task.local)
    scaler = torch.amp.GradScaler("cpu", **(task.scaler or {}), enabled=task.scaler is not None)
    # Torch's fused kernels skip steps themselves; a first one leaves momentum that nobody wrote.
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    waiting: list[dict[str, Tensor | None]] = []
    found = []
    for index, batch in enumerate(task.batches):
        optimizer.zero_grad()
        loss, outputs = _step(module, task, batch, index, draws, norms, scaler)
        scale, skipped = scaler.get_scale(), index in task.skipped
        scaler.unscale_(optimizer)
        gradients = {name: _copy(p.grad) for name, p in parameters.items()}
        waiting.append(gradients)
        late = 0 if index < task.warmup else task.late
        if index - late >= (task.warmup if late else 0) and not skipped:
            for name, parameter in parameters.items():
                parameter.grad = _copy(waiting[index - late][name])
            if task.clip_norm is not None:
                nn.utils.clip_grad_norm_(parameters.values(), task.clip_norm)
            if task.clip_value is not None:
                nn.utils.clip_grad_value_(parameters.values(), task.clip_value)
            scaler.step(optimizer)
            scaler.update()
            skipped = scaler.get_scale() < scale  # as torch's own documentation tells it
            for name, average in averages.items() if not skipped else ():
                assert task.ema is not None
                average.copy_(task.ema * average + (1 - task.ema) * parameters[name].detach())
        if scheduler is not None:
            scheduler.step()
        found.append(
            Step(
                outputs,
                loss,
                gradients,
                {name: p.detach().clone() for name, p in parameters.items()},
                {name: b.detach().clone() for name, b in module.named_buffers()},
                _state(optimizer, parameters, averages),
                _evaluated(module, task, batch.test_ranks, norms, parameters, averages),
                None if task.scaler is None else (scaler.get_scale(), scaler._get_growth_tracker()),
                skipped,
            )
        )
    return found


def _dims(module: nn.Module, task: Task) -> Sequence[int]:
    """Where the batch lies in what the module draws."""
    if not task.draws:
        return ()
    return dims_of(module, task.draws, _own(task.batches[0].inputs, task))


def _state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    averages: Mapping[str, Tensor],
) -> dict[str, dict[str, Tensor]]:
    """What the optimizer remembers, and averaged weights."""
    found = {}
    for name, parameter in parameters.items():
        if parameter in optimizer.state or name in averages:
            held = {"ema": averages[name]} if name in averages else {}
            held |= optimizer.state.get(parameter, {})
            found[name] = {key: value.clone() for key, value in held.items()}
    return found


def _evaluated(
    module: nn.Module,
    task: Task,
    ranks: Sequence[tuple[int, ...]],
    norms: "LocalNorms",
    parameters: Mapping[str, nn.Parameter],
    averages: Mapping[str, Tensor],
) -> tuple[float, float]:
    """Of averaged weights where there are some, which are taken back."""
    own = {name: parameters[name].detach().clone() for name in averages}
    for name, average in averages.items():
        parameters[name].detach().copy_(average)
    found = _evaluate(module, task, ranks, norms)
    for name, weights in own.items():
        parameters[name].detach().copy_(weights)
    return found


def _step(
    module: nn.Module,
    task: Task,
    batch: Batch,
    index: int,
    draws: Draws,
    norms: "LocalNorms",
    scaler: torch.amp.GradScaler,
) -> tuple[float, tuple[Tensor, ...]]:
    """Gradients of the mean over the batch; the loss, and the last micro-batch's outputs."""
    count, total, first = len(batch.labels), 0.0, 0
    outputs: Any = ()
    size, more = divmod(count, task.accumulate)
    sizes = [size + 1] * more + [size] * (task.accumulate - more)
    for turn, rows in enumerate(filter(None, sizes)):
        inputs = _own(batch.inputs[first : first + rows], task)
        labels = batch.labels[first : first + rows]
        draws.start(index, first, rows)
        norms.ranks = batch.ranks[turn] if batch.ranks else ()
        # Under a dispatch mode autocast reaches the parts of an operation, too, as of nn.Bilinear.
        watched = draws if task.draws or task.precision in ("fp64", "fp32") else nullcontext()
        with watched, _autocast(task):
            outputs = module(inputs)
            part = rows / count if task.share is None else task.share(labels, batch.labels)
            loss = task.loss(task.outputs(outputs), labels) * part
        scaler.scale(loss).backward()
        total += loss.item()
        first += rows
    return total, tuple(output.detach().clone() for output in task.outputs(outputs))


def _own(inputs: Tensor, task: Task) -> Tensor:
    """A copy, which the module may change in place: the rows are evaluated after every step."""
    return inputs.to(_dtype(task) if inputs.is_floating_point() else inputs.dtype, copy=True)


def _evaluate(
    module: nn.Module, task: Task, ranks: Sequence[tuple[int, ...]], norms: "LocalNorms"
) -> tuple[float, float]:
    """Mean loss and accuracy, in evaluation mode; the module is left as it was.

    Evaluations are not autocast.
    """
    module.eval()
    inputs, labels = task.test
    loss, hits, first = 0.0, 0, 0
    with torch.no_grad():
        for norms.ranks in ranks:
            some = slice(first, first + sum(norms.ranks))
            outputs = task.outputs(module(_own(inputs[some], task)))
            scores, classes = of_labels(outputs[0], labels[some])
            if task.share is None:
                loss += F.cross_entropy(scores, classes).item() * len(classes) / labels.numel()
            else:
                seen = outputs if task.ignored is None else outputs[:1]  # heads are for training
                loss += task.loss(seen, labels[some]).item() * task.share(labels[some], labels)
            hits += int(((scores.argmax(1) == classes) & (classes != task.ignored)).sum())
            first = some.stop
    module.train()
    count = labels.numel() if task.ignored is None else int((labels != task.ignored).sum())
    return loss, hits / count


def of_labels(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Scores [labels, classes], where every token has a label; else as they are."""
    return (logits, labels) if labels.ndim == 1 else (logits.flatten(0, 1), labels.flatten())


class LocalNorms:
    """Batch norms that normalize the rows of each group of ranks by themselves, one after another.

    The running statistics move by the mean over these parts, each weighted by its rows.

    Args:
        module: whose batch norms to change.
        groups: ranks that see their rows together, by path.
    """

    def __init__(self, module: nn.Module, groups: Mapping[str, int]) -> None:
        self.ranks: tuple[int, ...] = ()
        for path, k in groups.items():
            norm = module.get_submodule(path)
            norm.forward = self._forward(norm, k, norm.forward)  # type: ignore[method-assign]

    def _forward(self, norm: Any, k: int, plain: Callable[[Tensor], Tensor]) -> Any:
        def forward(x: Tensor) -> Tensor:
            if not norm.training and norm.running_mean is not None:
                return plain(x)
            per_sample = x.shape[0] // sum(self.ranks)
            groups = [self.ranks[first : first + k] for first in range(0, len(self.ranks), k)]
            normalized: list[Tensor] = []
            means, variances = torch.zeros(2, x.shape[1], dtype=x.dtype)
            for part in x.split([sum(group) * per_sample for group in groups]):
                if len(part):
                    mean, var = torch.zeros(2, x.shape[1], dtype=x.dtype)
                    normalized.append(
                        F.batch_norm(part, mean, var, norm.weight, norm.bias, True, 1.0, norm.eps)
                    )
                    means += mean * (len(part) / len(x))
                    variances += var * (len(part) / len(x))
            tracks = norm.training and norm.track_running_stats
            if tracks and norm.num_batches_tracked is not None:
                norm.num_batches_tracked.add_(1)
            if tracks and norm.running_mean is not None:
                factor = norm.momentum
                if factor is None:
                    factor = 1.0 / float(norm.num_batches_tracked)
                norm.running_mean.lerp_(means.to(norm.running_mean.dtype), factor)
                norm.running_var.lerp_(variances.to(norm.running_var.dtype), factor)
            after: nn.Module = getattr(norm, "act", nn.Identity())  # of `models.Activated2d`
            return after(torch.cat(normalized))

        return forward


def _autocast(task: Task) -> Any:
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(task.precision)
    return nullcontext() if half is None else torch.autocast("cpu", half)


def _dtype(task: Task) -> torch.dtype:
    return torch.float64 if task.precision == "fp64" else torch.float32


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()
