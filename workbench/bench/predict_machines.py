"""Machines for `bench predict`: calibrated between the rounds in which its cases run.

What is measured is what the cases of one model need and no more: each of their plans, at the rows
that its ranks have; more than once, as a host is slower at one moment than at another. Devices and
links are measured once for each number of ranks. Nothing of it takes the place of the machine that
is kept for the user.
"""

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Literal, Protocol

from torch import nn

from workbench.bench.cases import Case
from workbench.bench.merged_machine import merged
from workbench.plan.experiment import Experiment
from workbench.plan.graph import Graph
from workbench.plan.machine import Machine
from workbench.plan.plan import Plan

BARE_S = 16.0  # to measure devices and links, about

Kind = tuple[str, int, str]
"""Graph, world size and precision: what a calibration is for."""


class Calibrating(Protocol):
    """A cluster."""

    def calibrate(
        self,
        *what: Graph | Plan,
        rows: int | Sequence[int] = ...,
        precision: Literal["fp32", "bf16", "fp64"] = ...,
        within_s: float = ...,
        module: nn.Module | None = ...,
        machine: Machine | None = ...,
        keep: bool = ...,
    ) -> Machine: ...


class Machines:
    """Calibrates for some cases after others.

    Args:
        cluster: runs them.
        plan_s: seconds for one plan at one number of rows, about.
        bare_s: for devices and links.
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
        """What was measured for a case; None: nothing."""
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
        even = fmean(one.unevenness**2 for one in seen) ** 0.5  # each call tells its own
        return whole.replace(unevenness=even, jitter_s=fmean(one.jitter_s for one in seen))


def kind_of(case: Case) -> Kind:
    """What a case needs a machine for."""
    experiment = case.experiment
    return experiment.plan.graph.fingerprint, experiment.plan.world_size, experiment.precision


def rows_of(experiment: Experiment) -> list[int]:
    """Rows of a rank in a pass; of a tail in rounds, also as many as give the group's rows."""
    plan = experiment.plan
    own = max(1, experiment.batch_size // experiment.accumulate // plan.world_size)
    if plan.rounds == "BK" or plan.tail is None:
        return [own]
    return sorted({own, max(1, own // plan.tail.group_size)})


def bare(machine: Machine) -> Machine:
    """The machine without what was measured in steps of some model."""
    devices = tuple(
        device.replace(samples=(), step_s=0.0, load_s_per_byte=0.0) for device in machine.devices
    )
    return machine.replace(devices=devices, unevenness=0.0, jitter_s=0.0)
