"""Equal shares, measured shares and the fastest device alone, in interleaved rounds.

    gain_vs_ideal           the gain over equal shares, for computing alone, over the ideal one,
                            mean(v) / min(v) of the nominal speeds v
    gain_vs_equal           samples per second, against equal shares
    gain_vs_fastest_alone   samples per second, against the fastest device by itself
    ideal_vs_fastest_alone  the ideal of that, with the communication c of a step as it was
                            measured under equal shares: T / (T max(v) / sum(v) + c), of the fastest
                            device's own step T; below 1 the fastest device is faster alone
    slowest_share           the slowest devices' share, over their share by speed;
                            0: they were left out
    spread                  (slowest - fastest) / slowest, of the ranks' computing

Shares come from times that were measured under other shares, and once more under the chosen ones; a
device is left out if the predicted step is shorter without it.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from workbench.bench.nets import INPUT_SHAPE, CifarNet
from workbench.bench.report import Cell, Figure
from workbench.client.cluster import Cluster
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import SGD, Experiment, Synthetic
from workbench.plan.graph.graph import Graph
from workbench.plan.machine.machine import Machine
from workbench.plan.plans.plan import Plan
from workbench.predict.balance import Balanced, Split, balanced

WARM = 1  # steps of a run that do not count
GRAIN = 4
_ROWS_OF = (24, 12, 6)  # parts of a batch whose rows are measured, by the slowest as well


@dataclass(frozen=True)
class Found:
    """The rows, figures and notes of one part."""

    rows: tuple[dict[str, Cell], ...]
    figures: dict[str, Figure]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """The work that is divided.

    Attributes:
        split: the kind of shares, "rows" or "filters".
        divisor: the divisor of the network's channels.
        batch_size: the samples of a step over all ranks.
    """

    split: Split
    divisor: int
    batch_size: int

    @cached_property
    def module(self) -> CifarNet:
        """The network."""
        return CifarNet(self.divisor)

    @cached_property
    def graph(self) -> Graph:
        """The network, traced."""
        return trace(self.module, input_shape=INPUT_SHAPE)

    def equal(self, world: int) -> Plan:
        """The plan of equal shares."""
        if self.split == "rows":
            return Plan.data_parallel(self.graph, world)
        return Plan.filters(self.graph, world, grain=GRAIN)

    def experiment(self, plan: Plan, steps: int) -> Experiment:
        """The experiment of a plan."""
        return Experiment(
            plan=plan,
            data=Synthetic(samples=self.batch_size),  # no batch is short: steps are alike
            batch_size=self.batch_size,
            optimizer=SGD(lr=0.01, momentum=0.9),
            steps=steps,
        )

    def chosen(
        self, cluster: Cluster, world: int, within_s: float, bare: Machine | None = None
    ) -> Balanced:
        """Finds shares by measurement; for filters also by measurements under the first shares.

        Args:
            cluster: the cluster, whose engines are slowed already.
            world: the number of ranks.
            within_s: the approximate seconds for each calibration.
            bare: the machine with the devices' own figures and links; None: they are measured, too.
        """
        experiment = self.experiment(self.equal(world), 1)
        rows: tuple[int, ...] = (max(1, self.batch_size // world),)
        if self.split == "rows":
            rows = tuple(sorted({max(1, self.batch_size // part) for part in _ROWS_OF}))
        # What slowed engines take is nothing to be kept for others.
        measure = partial(
            cluster.calibrate, rows=rows, within_s=within_s, module=self.module, keep=False
        )
        machine = measure(*self._to_measure(world), machine=bare)
        first = self._balanced(experiment, machine)
        if self.split == "rows":
            return first
        left = first.plan.world_size  # of the ranks
        known = machine.replace(devices=machine.devices[:left])
        machine = measure(first.plan.with_rows(None), machine=known)
        second = self._balanced(self.experiment(self.equal(left), 1), machine)
        return replace(second, notes=(*first.notes, *second.notes))

    def _balanced(self, experiment: Experiment, machine: Machine) -> Balanced:
        each = self.split == "filters"
        return balanced(experiment, machine, split=self.split, per_layer=each, grain=GRAIN)

    def _to_measure(self, world: int) -> tuple[Plan, ...]:
        """Plans under which every device has small and large pieces of every layer."""
        if self.split == "rows":
            return (self.equal(world),)
        falling = [2**rank for rank in range(world)]
        turns = [falling[shift:] + falling[:shift] for shift in range(world)]
        every = (Plan.filters(self.graph, world, turn, grain=GRAIN) for turn in turns)
        return tuple(plan.with_rows(None) for plan in every)

    def __str__(self) -> str:
        return (
            f"{self.split} of CifarNet with {self.graph.parameters:,} parameters, "
            f"batches of {self.batch_size}"
        )


@dataclass(frozen=True)
class Size:
    """The amount of measurement.

    Attributes:
        speeds: the relative speeds of the engines, for each set.
        cases: the work that is divided, in each case.
        rounds: the number of interleaved rounds of all plans.
        steps: the number of timed steps of a run.
        within_s: the approximate seconds of a calibration; it takes longer on slow engines.
    """

    speeds: tuple[tuple[int, ...], ...]
    cases: tuple[Case, ...]
    rounds: int
    steps: int
    within_s: float


@dataclass(frozen=True)
class Timed:
    """The times of a run's middle steps.

    Attributes:
        compute_s: the seconds that each rank computes in a step [ranks].
        communication_s: the seconds of a step in which all ranks were blocked at once.
        samples_per_s: the samples per second over all ranks.
    """

    compute_s: tuple[float, ...]
    communication_s: float
    samples_per_s: float

    @property
    def spread(self) -> float:
        """(slowest - fastest) / slowest, of the compute time of ranks that have work."""
        used = [seconds for seconds in self.compute_s if seconds > _IDLE * max(self.compute_s)]
        return (max(used) - min(used)) / max(used)


_IDLE = 0.05  # of the slowest rank's computing: a rank without a share still takes part


def compared(
    cluster: Cluster,
    speeds: Sequence[int],
    case: Case,
    size: Size,
    bare: Machine | None = None,
    name: str = "",
) -> Found:
    """Compares the plans under one set of speeds, which the cluster's engines have already.

    Args:
        cluster: the cluster.
        speeds: the relative speed of each engine [ranks].
        case: the work that is divided.
        size: the amount of measurement.
        bare: the machine with the devices' own figures and links; None: they are measured, too.
        name: the end of the figures' names; "": the split and the speeds.
    """
    world = len(speeds)
    name = name or f"{case.split}_{'_'.join(map(str, speeds))}"
    equal = case.equal(world)
    chosen = case.chosen(cluster, world, size.within_s, bare)
    plans = {
        "equal": equal,
        "measured": chosen.plan,
        "fastest alone": Plan.data_parallel(case.graph, 1),
    }
    times: dict[str, list[Timed]] = {plan: [] for plan in plans}
    for _ in range(size.rounds):
        for label, plan in plans.items():
            times[label].append(_timed(cluster, case, plan, WARM + size.steps))
    slowed, made = cluster.slowed, "by quotas"
    if slowed:
        made = ":".join(f"{slowed.get(rank, 1.0):.2f}" for rank in range(world))
    ideal = statistics.fmean(speeds) / min(speeds)
    ideals = {"measured": ideal, "fastest alone": max(speeds) / world / min(speeds)}
    rounds = list(zip(times["equal"], times["measured"], times["fastest alone"], strict=True))
    gains = [max(even.compute_s) / max(own.compute_s) for even, own, _ in rounds]
    figures = {
        f"gain_vs_ideal_{name}": Figure.of([gain / ideal for gain in gains]),
        f"gain_vs_equal_{name}": Figure.of(
            [own.samples_per_s / even.samples_per_s for even, own, _ in rounds]
        ),
        f"gain_vs_fastest_alone_{name}": Figure.of(
            [own.samples_per_s / alone.samples_per_s for _, own, alone in rounds]
        ),
        f"ideal_vs_fastest_alone_{name}": Figure.of(
            [_ideal_vs_alone(even, alone, speeds, case) for even, _, alone in rounds]
        ),
        f"slowest_share_{name}": Figure.of([_slowest_share(chosen.partition.sizes, speeds)]),
        f"spread_{name}": Figure.of([own.spread for _, own, _ in rounds]),
    }
    shares = {"equal": "equal", "measured": ":".join(map(str, chosen.partition.sizes))}
    rows = tuple[dict[str, Cell], ...](
        {
            "speeds": ":".join(map(str, speeds)),
            "slowed": made,
            "split": case.split,
            "shares": shares.get(label, label),
            "ideal gain": ideals.get(label, 1.0),
            "samples/s": statistics.median(one.samples_per_s for one in of),
            "slowest rank computes s": statistics.median(max(one.compute_s) for one in of),
            "spread": statistics.median(one.spread for one in of),
        }
        for label, of in times.items()
    )
    best, own = (figures[f"{of}_vs_fastest_alone_{name}"].median for of in ("ideal", "gain"))
    judged = (
        f"at best {best:.2f} x the fastest alone, its communication included: it is {own:.2f} x"
    )
    return Found(rows, figures, tuple(f"{name}: {note}" for note in (judged, *chosen.notes)))


def _timed(cluster: Cluster, case: Case, plan: Plan, steps: int) -> Timed:
    """Trains a plan to its end, and takes the times of all but its first steps."""
    run = cluster.train(case.experiment(plan, steps), module=case.module)
    frame = run.wait().metrics
    frame = frame[frame["step"] >= WARM]
    seconds = frame.groupby("rank")["compute_s"].median()
    communication_s, samples_per_s = frame[["communication_s", "samples_per_s"]].median()
    return Timed(tuple(seconds), float(communication_s), float(samples_per_s))


def _ideal_vs_alone(even: Timed, alone: Timed, speeds: Sequence[int], case: Case) -> float:
    """The ideal speed-up over the fastest device alone, with the measured communication."""
    alone_s = case.batch_size / alone.samples_per_s
    return alone_s / (alone_s * max(speeds) / sum(speeds) + even.communication_s)


def _slowest_share(sizes: Sequence[int], speeds: Sequence[int]) -> float:
    """The slowest devices' share over their fair share; `sizes` are of the used devices."""
    slowest = [rank for rank, speed in enumerate(speeds) if speed == min(speeds)]
    fair = sum(sizes) * len(slowest) * min(speeds) / sum(speeds)
    return sum(sizes[rank] for rank in slowest if rank < len(sizes)) / fair
