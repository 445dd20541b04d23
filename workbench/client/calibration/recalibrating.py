"""A machine whose device was measured anew, in a run."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.graph.graph import Layer
from workbench.plan.machine.device import Device, Sample
from workbench.plan.machine.machine import Machine
from workbench.plan.machine.work import Work, work_of
from workbench.plan.placement.rounds import round_rows
from workbench.plan.plans.plan import Plan
from workbench.predict.prediction import predict
from workbench.store.errors import ClusterError
from workbench.train.measure.repeating import estimate
from workbench.train.trace.trace import Sample as Traced

_LEAST_S = 1e-12

Pairs = dict[Work, tuple[float, float]]
"""Seconds forward and backward of one pass, for each work of a step."""


@dataclass(frozen=True)
class _Step:
    """One traced step of one rank: all of its seconds but those that it waited and communicated.

    Attributes:
        layers: seconds of each layer in one pass.
        often: how many passes of each work there are, forward and backward.
        load_s: seconds of loading the images.
        update_s: seconds of the optimizer's update.
        besides_s: seconds that the step took besides.
    """

    layers: Pairs
    often: Mapping[Work, tuple[int, int]]
    load_s: float
    update_s: float
    besides_s: float

    def in_layers(self, each: Pairs) -> float:
        """Of all passes, if each took so long."""
        return sum(
            forward_s * self.often[work][0] + backward_s * self.often[work][1]
            for work, (forward_s, backward_s) in each.items()
            if work in self.often
        )


def recalibrated(
    machine: Machine, experiment: Experiment, steps: Sequence[Sequence[Traced]]
) -> Machine:
    """The same machine with what a run's own steps took, collectives left out.

    Layers, loading, updates and what a step takes besides are replaced, so that a step which was
    traced is predicted as it was: of several, one that is neither fast nor slow.

    Raises:
        ClusterError: the machine has devices for another number of ranks.
    """
    world, count = experiment.plan.world_size, len(machine.devices)
    if count not in (1, world):
        raise ClusterError(
            f"{machine!r} has devices for {count} ranks, and the run had {world}; a machine with "
            f"one device, or with {world}, is valid"
        )
    found: list[list[_Step]] = [[] for _ in machine.devices]
    for samples in steps:
        for traced in samples:
            found[traced.rank if count > 1 else 0].append(_step(traced, experiment))
    sizes = _sizes(machine, experiment)
    mean = tuple(map(statistics.fmean, zip(*sizes, strict=True)))
    devices = [
        _renewed(device, experiment, own, *(mean if count == 1 else sizes[rank]))
        for rank, (device, own) in enumerate(zip(machine.devices, found, strict=True))
    ]
    return machine.replace(devices=tuple(devices))


def _renewed(
    device: Device, experiment: Experiment, steps: Sequence[_Step], images: float, moved: float
) -> Device:
    """The device with what steps took that loaded and moved so many bytes."""
    times: dict[Work, list[tuple[float, float]]] = {}
    for step in steps:
        for work, pair in step.layers.items():
            times.setdefault(work, []).append(pair)
    usual = {work: _each(statistics.median, pairs) for work, pairs in times.items()}
    # Each layer's slow moments were left out apart; a step has some of them each time.
    sums = statistics.median(step.in_layers(usual) for step in steps)
    over = statistics.median(step.in_layers(step.layers) for step in steps) / max(sums, _LEAST_S)
    fresh = [
        Sample.of(work, usual[work][0] * over, usual[work][1] * over, _error(times[work]))
        for work in times
    ]
    kind, update_s = experiment.optimizer.kind, statistics.median([step.update_s for step in steps])
    return device.replace(
        samples=_replaced(device.samples, fresh),
        load_s_per_byte=statistics.median([step.load_s for step in steps]) / images
        if images
        else 0.0,
        step_s=statistics.median([step.besides_s for step in steps]),
        update_s_per_byte=device.update_s_per_byte | ({kind: update_s / moved} if moved else {}),
    )


def _sizes(machine: Machine, experiment: Experiment) -> list[tuple[float, float]]:
    """Of each rank (bytes of images that it loads in a step, bytes of parameters that it moves).

    As what a step would take at a second for each byte.
    """
    rates = dict(load_s_per_byte=1.0, update_s_per_byte={experiment.optimizer.kind: 1.0})
    devices = tuple(device.replace(**rates) for device in machine.devices)
    slow = predict(experiment.plan, machine.replace(devices=devices), experiment)
    return [(parts["load"], parts["update"]) for parts in slow.breakdown]


def _step(traced: Traced, experiment: Experiment) -> _Step:
    trace = traced.trace
    passes: dict[Work, list[tuple[float, float]]] = {}
    often: dict[Work, tuple[int, int]] = {}
    for work, pair, forwards in _measured(traced, experiment):
        passes.setdefault(work, []).append(pair)
        before = often.get(work, (0, 0))
        often[work] = (before[0] + forwards, before[1] + 1)
    apart = {"load": 0.0, "update": 0.0}
    for stretch, own in zip(trace.stretches, trace.own_seconds(), strict=True):
        if stretch.what in apart:
            apart[stretch.what] += own
    means = {work: _each(statistics.fmean, pairs) for work, pairs in passes.items()}
    held_s = sum(end - begin for begin, end in trace.held_up)
    step = _Step(means, often, apart["load"], apart["update"], 0.0)
    besides = trace.seconds - held_s - step.load_s - step.update_s - step.in_layers(means)
    return replace(step, besides_s=max(0.0, besides))


def _measured(
    traced: Traced, experiment: Experiment
) -> Iterator[tuple[Work, tuple[float, float], int]]:
    """Each pass of each layer: its work, its seconds forward and backward, how often forward.

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
            yield work, (mean, backward[index]), often


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


def _each(
    figure: Callable[[Sequence[float]], float], pairs: Sequence[tuple[float, float]]
) -> tuple[float, float]:
    forward, backward = zip(*pairs, strict=True)
    return figure(forward), figure(backward)


def _replaced(samples: Sequence[Sample], fresh: Sequence[Sample]) -> tuple[Sample, ...]:
    known = set(map(_key, fresh))
    return (*(sample for sample in samples if _key(sample) not in known), *fresh)


def _key(of: Sample) -> tuple[str, str, str, int]:
    return of.kind, of.key, of.precision, of.rows


def _error(pairs: Sequence[tuple[float, float]]) -> float:
    """Relative half width of the 95 % interval of forward and backward together."""
    sums = np.array([sum(pair) for pair in pairs])
    if len(sums) < 2 or sums.sum() == 0:
        return 0.0
    mean, half = estimate(sums)
    return float(half) / float(mean)
