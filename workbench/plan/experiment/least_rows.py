"""The check that every rank has as many rows of every batch as its layers need.

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

from workbench.plan.errors import ExperimentError
from workbench.plan.graph import Graph, Layer
from workbench.plan.placement.placement import apportion
from workbench.plan.placement.tail import round_rows
from workbench.plan.plan import Plan


@dataclass(frozen=True)
class Schedule:
    """The parameters that decide which batches a run has.

    Attributes:
        batch_size: the samples of one step over all ranks.
        accumulate: the micro-batches of a step.
        steps: the number of steps of the run.
        samples: the samples of the training and of the test split.
        half: whether it computes in 16 bits, by autocast.
    """

    batch_size: int
    accumulate: int
    steps: int
    samples: tuple[int, int]
    half: bool = False


def check_rows(plan: Plan, schedule: Schedule) -> None:
    """Checks that a plan gives every rank as many rows of every batch as each layer needs.

    Raises:
        ExperimentError: a rank has too few rows; the text names the batch, the rank and the layer.
    """
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
