"""A machine whose layers were measured anew, in a run."""

import statistics
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from workbench.cluster.errors import ClusterError
from workbench.plan.experiment import Experiment
from workbench.plan.graph import Layer
from workbench.plan.machine import Machine
from workbench.plan.plan import Plan
from workbench.plan.sample import Sample
from workbench.plan.tail import round_rows
from workbench.plan.work import Work, work_of
from workbench.train.repeating import estimate
from workbench.train.traces import Sample as Traced

Times = dict[Work, list[tuple[float, float]]]


def recalibrated(
    machine: Machine, experiment: Experiment, steps: Sequence[Sequence[Traced]]
) -> Machine:
    """The same machine with the samples of a run's own work replaced by what was measured in it.

    Args:
        machine: one device for all ranks, or one for each.
        experiment: that ran.
        steps: of all ranks, each traced.

    Raises:
        ClusterError: the machine has devices for another number of ranks.
    """
    world, count = experiment.plan.world_size, len(machine.devices)
    if count not in (1, world):
        raise ClusterError(
            f"{machine!r} has devices for {count} ranks, and the run had {world}; a machine with "
            f"one device, or with {world}, is valid"
        )
    found: list[Times] = [{} for _ in machine.devices]
    for samples in steps:
        for traced in samples:
            times = found[traced.rank if count > 1 else 0]
            for work, pair in _measured(traced, experiment):
                times.setdefault(work, []).append(pair)
    devices = [
        device.replace(samples=_replaced(device.samples, times))
        for device, times in zip(machine.devices, found, strict=True)
    ]
    return machine.replace(devices=tuple(devices))


def _measured(traced: Traced, experiment: Experiment) -> Iterator[tuple[Work, tuple[float, float]]]:
    """Each pass of each layer: its work, and its seconds forward and backward.

    A segment that is recomputed runs forward twice in a pass; both are the same work. A layer that
    nothing is learnt before has no backward pass.
    """
    plan: Plan = experiment.plan
    stretches = zip(traced.trace.stretches, traced.trace.own_seconds(), strict=True)
    seconds: dict[tuple[str, str], list[float]] = {}
    for stretch, own in stretches:
        if not stretch.conversion:
            seconds.setdefault((stretch.label, stretch.what), []).append(own)
    for layer in plan.graph.layers:
        passes = list(_passes(plan, layer, traced.rows))
        forward = seconds.get((layer.name, "forward"), [])
        backward = seconds.get((layer.name, "backward"), [0.0] * len(passes))
        often = len(forward) // len(passes)
        if len(forward) != often * len(passes) or len(backward) != len(passes) or not often:
            continue
        for index, rows in enumerate(passes):
            work = work_of(plan, layer, traced.rank, rows, experiment.precision)
            mean = statistics.fmean(forward[index * often : (index + 1) * often])
            yield work, (mean, backward[index])


def _passes(
    plan: Plan, layer: Layer, batches: Sequence[tuple[int, ...]]
) -> Iterator[tuple[int, ...]]:
    """The rows of every rank in each pass of a layer, in the order of the step."""
    tail = plan.tail if plan.rounds != "BK" else None
    for rows in batches:
        if tail is not None and layer.name in tail.layers:
            yield from round_rows(plan.rounds, rows, tail.group_size)
        else:
            yield rows


def _replaced(
    samples: Sequence[Sample], times: Mapping[Work, list[tuple[float, float]]]
) -> tuple[Sample, ...]:
    fresh = {_key(work): _sample(work, pairs) for work, pairs in times.items()}
    kept = [sample for sample in samples if _key(sample) not in fresh]
    return (*kept, *fresh.values())


def _key(of: Work | Sample) -> tuple[str, str, str, int]:
    return of.kind, of.key, of.precision, of.rows


def _sample(work: Work, pairs: list[tuple[float, float]]) -> Sample:
    forward, backward = (statistics.median(times) for times in zip(*pairs, strict=True))
    error = 0.0
    if len(pairs) > 1 and forward + backward > 0:
        _, half = estimate(np.array([sum(pair) for pair in pairs]))
        error = float(half) / (forward + backward)
    return Sample.of(work, forward, backward, error)
