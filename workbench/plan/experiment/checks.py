"""What a run computes in, and what its losses are scaled by where that is fp16.

fp16 has the range of 6e-8 to 65504. Gradients of activations are often smaller than that, and are
lost; so the backward pass begins with the loss times a scale, and gradients of weights, which are
fp32, are divided by it before they are used. Where some gradient is then no number, the scale was
too large: the step updates nothing, on any rank, and the next one has a smaller scale.

Source: Micikevicius et al. 2018 (arXiv:1710.03740); the rules of `torch.amp.GradScaler`.

The check that every rank has as many rows of every batch as its layers need.

Most layers take any number of rows, even none. Two kinds do not:

    batch_norm     with one value of each channel, variance is nothing, and torch refuses: where it
                   sees one position of a sample (`nn.BatchNorm1d` behind a linear layer), it takes
                   two rows or more. A rank without any idles.
    an operation   that fails without rows, or with one: it was tried when the model was traced

A model may also decide by the size of the batch (`model/tracing/decisions.py`): there the samples
of the whole batch count, as in one process.

The rows that count are those that a layer sees: the rank's own, its shard group's where the layer
is sharded, the world's for synchronised batch norm; in a tail that runs in rounds, those of one
round.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import Field, model_validator

from workbench.plan.experiment.sync import OwnStrategy, Sync, Synchronous
from workbench.plan.graph.graph import Graph, Layer
from workbench.plan.io.errors import ExperimentError
from workbench.plan.io.value import Value
from workbench.plan.machine.device import Precision
from workbench.plan.placement.placement import apportion
from workbench.plan.placement.rounds import round_rows
from workbench.plan.plans.plan import Plan

LARGEST_SCALE = 2.0**127  # of fp32, in which the scale is kept
Scale = Annotated[float, Field(gt=0, le=LARGEST_SCALE, allow_inf_nan=False)]


class LossScale(Value):
    """A loss scale that follows the gradients, by the rules of `torch.amp.GradScaler`.

    A step whose gradients overflow updates nothing, and the scale shrinks; after so many updates
    in a row it grows. Both it and their count are part of a checkpoint.

    Raises:
        ExperimentError: a field has a value with which the scale cannot follow.
    """

    init_scale: Scale = 2.0**16
    """The scale of the first step."""
    growth_factor: float = Field(default=2.0, gt=1, allow_inf_nan=False)
    """What the scale is multiplied by after `growth_interval` updates in a row."""
    backoff_factor: float = Field(default=0.5, gt=0, lt=1)
    """What the scale is multiplied by when a gradient is no number."""
    growth_interval: int = Field(default=2000, ge=1, lt=2**31)
    """The number of updates in a row after which the scale grows."""

    @model_validator(mode="after")
    def _has_a_least(self) -> Self:
        if self.init_scale < LEAST_SCALE:
            raise ValueError(
                f"init_scale must be at least {LEAST_SCALE:g}, the least scale that a run goes on "
                f"with, got {self.init_scale:g}"
            )
        return self


LEAST_SCALE = 1e-4
"""A run whose scale has shrunk below this has diverged: its gradients are numbers at no scale.

Source: the default of fairseq's `--min-loss-scale`.
"""


def check_scaled(precision: Precision, given: object, sync: Sync) -> None:
    """Checks that a loss scale has a use, and that a step of fp16 can be skipped."""
    if precision != "fp16":
        if given is not None:
            raise ValueError(
                f"loss_scale lifts gradients into the range of fp16, and precision {precision!r} "
                "has a range that needs none; leave it out, or set precision='fp16'"
            )
        return
    valid = "it is valid with Synchronous and ParameterServer; precision='bf16' with all strategies"
    if isinstance(sync, OwnStrategy):
        raise ValueError(
            "precision: a step of fp16 whose gradients overflow is skipped on all ranks, and what "
            f"{sync.title} keeps of it, a strategy of one's own, is not known; {valid}"
        )
    if sync.timing.of_weights:
        raise ValueError(
            "precision: a step of fp16 whose gradients overflow is skipped on all ranks, and under "
            f"{sync.title} each steps by itself; {valid}"
        )
    if sync.timing.late:
        raise ValueError(
            "precision: the scale of fp16 follows the gradients of each step before the next, and "
            f"under {sync.title} they are late; {valid}"
        )
    if isinstance(sync, Synchronous) and sync.per_round:
        raise ValueError(
            "precision: a step of fp16 whose gradients overflow is skipped as a whole, and with "
            "per_round weights behind the gather have stepped before; it is valid with "
            "per_round=False"
        )
    _, codec = sync.summing
    if codec is not None:
        raise ValueError(
            "precision: gradients of fp16 travel scaled, and are infinite where they overflow, "
            f"which codec {codec.name!r} cannot tell; leave the codec out, or set precision='bf16'"
        )


@dataclass(frozen=True)
class Schedule:
    """The parameters that decide which batches a run has.

    Attributes:
        samples: the samples of the training and of the test split.
    """

    batch_size: int
    accumulate: int
    steps: int
    samples: tuple[int, int]
    half: bool = False


def check_rows(plan: Plan, schedule: Schedule) -> None:
    """Checks that a plan gives every rank as many rows of every batch as each layer needs."""
    for layer in plan.graph.layers:
        least = _least(layer, schedule)
        if least == 0:
            continue
        for what, count in _trained(schedule):
            for rows in _rows(plan, layer, count):
                _check(plan, layer, rows, least, what)
    there = plan.evaluation
    _check_batches(plan.graph, _trained(schedule))
    _check_batches(there.graph, _evaluated(schedule))
    for layer in there.graph.layers:
        least = _least(layer, schedule)
        if least and (there is not plan or _needs_rows_to_evaluate(plan.graph, layer)):
            for what, count in _evaluated(schedule):
                _check(there, layer, plan.rows_of(count), least, what)


def _check_batches(graph: Graph, batches: Iterable[tuple[str, int]]) -> None:
    """Checks that one process would not decide otherwise, as a model may for a single sample."""
    for what, count in batches:
        if count < graph.least_batch:
            raise ExperimentError(
                f"{what}: the forward pass of {graph.source.name} decides otherwise for "
                f"{count} sample than for more; choose a batch_size or accumulate that leaves "
                f"{graph.least_batch} or more"
            )


def _least(layer: Layer, schedule: Schedule) -> int:
    return max(layer.least_rows, layer.least_rows_half if schedule.half else 0)


def _trained(schedule: Schedule) -> Iterator[tuple[str, int]]:
    """(description, samples) of every kind of micro-batch of training."""
    samples, size = schedule.samples[0], schedule.batch_size
    full, last = min(size, samples), samples % size
    batches = [(f"a batch of {full} samples", full)]
    if samples > size and last and schedule.steps >= -(-samples // size):
        batches.append((f"an epoch's last batch of {last} samples ({samples} by {size})", last))
    for what, count in batches:
        parts = apportion(count, (1,) * schedule.accumulate)
        for part in sorted({part for part in parts if part}):
            yield what if part == count else f"a micro-batch of {part} of {what}", part


def _evaluated(schedule: Schedule) -> Iterator[tuple[str, int]]:
    samples, size = schedule.samples[1], schedule.batch_size
    for count in sorted({min(size, samples), samples % size or size}):
        if 0 < count <= samples:
            yield f"a batch of {count} samples of evaluation ({samples} by {size})", count


def _rows(plan: Plan, layer: Layer, count: int) -> list[tuple[int, ...]]:
    """The rows of each rank [ranks], for each call of the layer in a batch of so many samples."""
    rows = plan.rows_of(count)
    if plan.rounds == "BK" or plan.tail is None or layer.name not in plan.tail.layers:
        return [rows]
    return round_rows(plan.rounds, rows, plan.tail.group_size)


def _needs_rows_to_evaluate(graph: Graph, layer: Layer) -> bool:
    """Whether a layer needs the same rows in evaluation as in training."""
    if layer.kind != "batch_norm":
        return True
    owner = graph[layer.shared] if layer.shared else layer
    return not any(weight.name.endswith("running_mean") for weight in owner.weights)


def _check(plan: Plan, layer: Layer, rows: tuple[int, ...], least: int, what: str) -> None:
    norm = layer.kind == "batch_norm"
    together = norm and plan.batch_norm == "synchronized"
    k = plan.world_size if together else plan.flow.inputs[layer.name].group_size
    for first in range(0, len(rows), k):
        seen = sum(rows[first : first + k])
        if seen >= least or (norm and seen == 0):
            continue
        who = f"rank {first} has" if k == 1 else f"ranks {first} to {first + k - 1} have"
        due = f"{least} or more" + ", or none" * norm
        raise ExperimentError(
            f"of {what}, {who} {seen} row{'s' * (seen != 1)}, and layer {layer.name!r} "
            f"({layer.kind}) takes {due}: choose a batch_size, accumulate or row shares that give "
            f"it so many (plan.with_rows)" + _synchronized(plan, norm, sum(rows))
        )


def _synchronized(plan: Plan, norm: bool, total: int) -> str:
    if not norm or plan.batch_norm == "synchronized" or total < 2:
        return ""
    return ', or statistics of all ranks, plan.with_batch_norm("synchronized")'
