"""Machines for `bench predict`: calibrated between the rounds in which its cases run.

Only what the cases of one model need is measured: each of their plans, at the rows of its ranks;
more than once, since a host is slower at one moment than at another. Devices and links are measured
once for each number of ranks. The user's stored machine is not replaced.

One machine is merged from several calibrations of the same engines, as the median of each figure.
"""

from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import Protocol

from torch import nn

from workbench.bench.predict.cases import Case
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.graph.graph import Graph
from workbench.plan.machine.device import Device, Precision, Sample
from workbench.plan.machine.machine import Machine
from workbench.plan.plans.plan import Plan


def merged(machines: Sequence[Machine]) -> Machine:
    """The median of calibrations that measured the same layers.

    Links are the first one's. Unevenness adds up as variances do.

    Args:
        machines: the calibrations, one or more.
    """
    ranks = max(len(machine.devices) for machine in machines)
    devices = [_device([machine.device(rank) for machine in machines]) for rank in range(ranks)]
    return machines[0].replace(
        devices=tuple(devices),
        unevenness=fmean(machine.unevenness**2 for machine in machines) ** 0.5,
        jitter_s=fmean(machine.jitter_s for machine in machines),
    )


def _device(found: Sequence[Device]) -> Device:
    """The median of one rank's device."""
    first, samples = found[0], dict[tuple[str, str, int], list[Sample]]()
    for device in found:
        for sample in device.samples:
            samples.setdefault((sample.key, sample.precision, sample.rows), []).append(sample)
    return first.replace(
        samples=tuple(map(_sample, samples.values())),
        load_s_per_byte=median(device.load_s_per_byte for device in found),
        step_s=median(device.step_s for device in found),
        update_s_per_byte={
            kind: median(device.update_s_per_byte[kind] for device in found)
            for kind in first.update_s_per_byte
        },
    )


def _sample(found: Sequence[Sample]) -> Sample:
    return found[0].replace(
        forward_s=median(sample.forward_s for sample in found),
        backward_s=median(sample.backward_s for sample in found),
        error=median(sample.error for sample in found),
    )


BARE_S = 16.0  # to measure devices and links, about

Kind = tuple[str, int, str]
"""The graph, world size and precision that a calibration is for."""


class Calibrating(Protocol):
    """A cluster that can be calibrated."""

    def calibrate(
        self,
        *what: Graph | Plan,
        rows: int | Sequence[int] = ...,
        precision: Precision = ...,
        within_s: float = ...,
        module: nn.Module | None = ...,
        machine: Machine | None = ...,
        keep: bool = ...,
    ) -> Machine: ...


class Machines:
    """Calibrates for groups of cases in turn.

    Args:
        cluster: the cluster that is calibrated.
        plan_s: the approximate seconds for one plan at one number of rows.
        bare_s: the approximate seconds for devices and links.
    """

    def __init__(self, cluster: Calibrating, plan_s: float, bare_s: float = BARE_S) -> None:
        self._cluster, self._plan_s, self._bare_s = cluster, plan_s, bare_s
        self._bare: dict[int, Machine] = {}
        self._found: dict[Kind, list[Machine]] = {}

    def measure(self, cases: Iterable[Case]) -> None:
        """Calibrates now for these cases, once more if it has before."""
        alike: dict[Kind, list[Case]] = {}
        for case in cases:
            alike.setdefault(kind_of(case), []).append(case)
        for kind, some in alike.items():
            self._found.setdefault(kind, []).append(self._calibrated(kind[1], some))

    def of(self, case: Case) -> Machine | None:
        """The machine that was measured for a case; None: there is none."""
        found = self._found.get(kind_of(case))
        return None if found is None else merged(found)

    def _calibrated(self, world: int, alike: Sequence[Case]) -> Machine:
        first = alike[0]
        wanted: dict[int, dict[Plan, None]] = {}
        for case in alike:
            plan = case.experiment.plan.with_rounds("BK").with_recompute("*", recompute=False)
            for rows in rows_of(case.experiment):
                wanted.setdefault(rows, {}).setdefault(plan)
        machine, seen = self._bare.get(world), list[Machine]()
        for rows, plans in wanted.items():
            machine = self._cluster.calibrate(
                *plans,
                rows=(rows,),
                precision=first.experiment.precision,
                within_s=self._plan_s * len(plans) + (self._bare_s if machine is None else 0.0),
                module=first.module,
                machine=machine,
                keep=False,
            )
            self._bare.setdefault(world, bare(machine))
            seen.append(machine)
        *_, whole = seen
        even = fmean(one.unevenness**2 for one in seen) ** 0.5  # each call returns its own
        return whole.replace(unevenness=even, jitter_s=fmean(one.jitter_s for one in seen))


def kind_of(case: Case) -> Kind:
    """The graph, world size and precision of a case."""
    experiment = case.experiment
    return experiment.plan.graph.fingerprint, experiment.plan.world_size, experiment.precision


def rows_of(experiment: Experiment) -> list[int]:
    """The rows of a rank in a pass; for a tail in rounds, also those that give the group's rows."""
    plan = experiment.plan
    own = max(1, experiment.batch_size // experiment.accumulate // plan.world_size)
    if plan.rounds == "BK" or plan.tail is None:
        return [own]
    return sorted({own, max(1, own // plan.tail.group_size)})


def bare(machine: Machine) -> Machine:
    """The machine without the measurements of layers and steps of a model."""
    devices = tuple(
        device.replace(samples=(), step_s=0.0, load_s_per_byte=0.0) for device in machine.devices
    )
    return machine.replace(devices=devices, unevenness=0.0, jitter_s=0.0)
