"""Devices of unequal speed: measured shares, against equal ones and the fastest device alone.

    static     engines of three sets of speeds, rows and filters shared out
    hosts      two emulated hosts of unequal speed, and rows shared out over both
    live       a device slows down during a run
    re-cut     what resharding costs, against copies of the same bytes

Equal shares, measured shares and the fastest device alone run in interleaved rounds. Shares come
from times that were measured under other shares, and once more under the chosen ones; a device is
left out if the predicted step is shorter without it.

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

Of `live`, three runs, one after the other, on devices of which the last one is slowed three times:
"followed" is balanced as it runs, and the device slows down in its middle; "best" has the best
static shares for the new speeds, from a calibration under them; "left" equal shares, as they were.

    recovered_after_slowdown   samples per second of the first, over the second's
    gain_of_rebalancing        the same over the third's
    rebalancing_rounds         changes of shares after the slowdown
    imbalance                  (slowest - fastest) / slowest of the ranks' computing, under the last
                               shares
    imbalance_of_one_row       what one row more or less makes on the rank that has the fewest:
                               below that, no shares are sure to come

Of `re-cut`, a model with momentum, from equal filters to unequal ones and back. In turns with every
resharding, each rank sends each other one as many bytes as it did then, from one flat buffer into
another: the time of the transfer alone.

    recut_vs_copy         seconds of a resharding, over those of the copies
    recut_vs_predicted    bytes that ranks received, over the predicted ones: 1

Source: Moreno-Alvarez et al. 2020 and 2021, and the gain model derived from them.
"""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import torch

from workbench.bench.harness.match import slowest
from workbench.bench.harness.nets import INPUT_SHAPE, CifarNet
from workbench.bench.harness.progress import Part, Progress
from workbench.bench.harness.report import MIB, Figure, Report, Row
from workbench.client.calibration.rebalancer import Rebalancer
from workbench.client.cluster import Cluster
from workbench.client.run.run import Run
from workbench.comm.collectives import all_to_all_v
from workbench.comm.groups.group import Group
from workbench.comm.groups.world import RankConfig, World
from workbench.hosts.emulated.hosts import Hosts
from workbench.model.tracing.trace import trace
from workbench.plan.experiment.experiment import SGD, Experiment, Synthetic
from workbench.plan.graph.graph import Graph
from workbench.plan.machine.machine import Machine
from workbench.plan.plans.plan import Plan
from workbench.plan.plans.reshard import Reshard
from workbench.predict.balance import Balanced, Split, balanced
from workbench.store.errors import HostsError
from workbench.train.run.rank import RankState, group_specs_of
from workbench.train.run.reshard import resharded_bytes, under

GRAIN = 4
_ROWS_OF = (24, 12, 6)  # parts of a batch whose rows are measured, by the slowest as well


@dataclass
class _Part:
    """The rows, figures and notes of one part."""

    rows: list[Row] = field(default_factory=list)
    figures: dict[str, Figure] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    """The work that is divided: rows or filters of a network with channels over a divisor."""

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

        Devices' own figures and links come from `bare`, or are measured too.
        """
        experiment = self.experiment(self.equal(world), 1)
        rows: tuple[int, ...] = (max(1, self.batch_size // world),)
        if self.split == "rows":
            rows = tuple(sorted({max(1, self.batch_size // part) for part in _ROWS_OF}))
        # Measurements of slowed engines are not kept for others.
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
        """Plans under which every device has small and large shards of every layer."""
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
    """The sets of speeds and cases, rounds and steps, and the seconds of a calibration, about."""

    speeds: tuple[tuple[int, ...], ...]
    cases: tuple[Case, ...]
    rounds: int
    steps: int
    within_s: float


# Shares of rows are fine-grained if there are many rows, shares of filters if a layer has many.
ROWS = Case("rows", divisor=4, batch_size=240)
FILTERS = Case("filters", divisor=1, batch_size=16)
SMALL = (Case("rows", divisor=4, batch_size=48), Case("filters", divisor=4, batch_size=16))
FULL = Size(((2, 1, 1), (4, 2, 1), (70, 25, 5)), (ROWS, FILTERS), 2, 2, 6.0)
QUICK = Size(((2, 1),), SMALL, 1, 2, 2.0)
SLOWDOWNS = 3
RANKS = 4  # of the re-cut


def run(progress: Progress, *, quick: bool) -> Iterator[Report]:
    """Measures all parts; `quick` without hosts, small and on few engines."""
    size, slowdowns = (QUICK, 1) if quick else (FULL, SLOWDOWNS)
    compared = [(speeds, case) for speeds in size.speeds for case in size.cases]
    progress.begin(
        Part("static", len(compared), 20 if quick else 100),
        Part("live", slowdowns, 60 if quick else 150),
        *([] if quick else [Part("hosts", 1, 100)]),
        Part("re-cut", 1, 10 if quick else 60),
    )
    parts: list[_Part] = []
    if any(map(progress.wants, ("static", "live"))):
        with Cluster(len(size.speeds[0]), timeout=300.0) as cluster:
            bare: Machine | None = None
            for speeds, case in progress.each("static", compared):
                for engine, speed in enumerate(speeds):
                    cluster.slow(engine, max(speeds) / speed)
                try:
                    if bare is None:  # for all speeds: at a twentieth's it would take minutes
                        measured = cluster.calibrate(within_s=size.within_s, keep=False)
                        bare = _each_its_own(measured, len(cluster))
                    parts.append(_compared(cluster, speeds, case, size, bare))
                finally:
                    cluster.mend()
                yield _report(parts, size)
            before, slowed = list(parts), list[_Slowdown]()
            for _ in progress.each("live"):
                slowed.append(_slowdown(cluster, size.cases[0], quick=quick))
                parts = [*before, _live(slowed, len(cluster))]
                yield _report(parts, size)
    for _ in progress.each("hosts"):
        parts.append(_on_hosts(size))
        yield _report(parts, size)
    for _ in progress.each("re-cut"):
        with Cluster(2 if quick else RANKS, timeout=300.0) as cluster:
            parts.append(_resharded(cluster, "" if quick else "vgg11", rounds=1 if quick else 3))
        yield _report(parts, size)


def _report(parts: Sequence[_Part], size: Size) -> Report:
    notes = (
        "An engine of speed v is held for max(v) / v - 1 times the processor time that it takes. "
        "Layers are measured under each set of speeds, devices' own figures and links under the "
        "first. " + "; ".join(map(str, size.cases)),
        f"Medians and ranges of {size.rounds} interleaved rounds of {size.steps} steps.",
    )
    return Report(
        "hetero",
        tuple(row for part in parts for row in part.rows),
        {name: figure for part in parts for name, figure in part.figures.items()},
        (*notes, *(note for part in parts for note in part.notes)),
        engines=len(size.speeds[0]),
    )


def _each_its_own(machine: Machine, world: int) -> Machine:
    """The machine with a device for every rank, though some are equal now."""
    ranks = range(world)
    devices = tuple(machine.device(rank).replace(name=f"engine {rank}") for rank in ranks)
    return machine.replace(devices=devices)


WARM = 1  # steps of a run that do not count
_IDLE = 0.05  # of the slowest rank's computing: a rank without a share still takes part


@dataclass(frozen=True)
class _Timed:
    """A run's middle steps: computing of each rank, seconds in which all were blocked, speed."""

    compute_s: tuple[float, ...]
    communication_s: float
    samples_per_s: float

    @property
    def spread(self) -> float:
        """(slowest - fastest) / slowest, of the compute time of ranks that have work."""
        used = [seconds for seconds in self.compute_s if seconds > _IDLE * max(self.compute_s)]
        return (max(used) - min(used)) / max(used)


def _compared(
    cluster: Cluster,
    speeds: Sequence[int],
    case: Case,
    size: Size,
    bare: Machine | None = None,
    name: str = "",
) -> _Part:
    """Compares the plans under one set of speeds, which the cluster's engines have already.

    Devices' own figures and links come from `bare`, or are measured too.
    """
    world = len(speeds)
    name = name or f"{case.split}_{'_'.join(map(str, speeds))}"
    chosen = case.chosen(cluster, world, size.within_s, bare)
    plans = {
        "equal": case.equal(world),
        "measured": chosen.plan,
        "fastest alone": Plan.data_parallel(case.graph, 1),
    }
    times: dict[str, list[_Timed]] = {plan: [] for plan in plans}
    for _ in range(size.rounds):
        for label, plan in plans.items():
            times[label].append(_timed(cluster, case, plan, WARM + size.steps))
    equal, measured, alone = (times[label] for label in plans)
    slowed, made = cluster.slowed, "by quotas"
    if slowed:
        made = ":".join(f"{slowed.get(rank, 1.0):.2f}" for rank in range(world))
    ideal = statistics.fmean(speeds) / min(speeds)
    ideals = {"measured": ideal, "fastest alone": max(speeds) / world / min(speeds)}
    gains = [max(e.compute_s) / max(m.compute_s) for e, m in zip(equal, measured, strict=True)]
    ideals_alone = [_ideal_vs_alone(e, a, speeds, case) for e, a in zip(equal, alone, strict=True)]
    figures = {
        "gain_vs_ideal": Figure.of([gain / ideal for gain in gains]),
        "gain_vs_equal": Figure.ratio(_speeds(measured), _speeds(equal)),
        "gain_vs_fastest_alone": Figure.ratio(_speeds(measured), _speeds(alone)),
        "ideal_vs_fastest_alone": Figure.of(ideals_alone),
        "slowest_share": Figure.of([_slowest_share(chosen.partition.sizes, speeds)]),
        "spread": Figure.of([one.spread for one in measured]),
    }
    shares = {"measured": ":".join(map(str, chosen.partition.sizes))}
    rows: list[Row] = [
        {
            "speeds": ":".join(map(str, speeds)),
            "slowed": made,
            "split": case.split,
            "shares": shares.get(label, label),
            "ideal gain": ideals.get(label, 1.0),
            "samples/s": statistics.median(_speeds(some)),
            "slowest rank computes s": statistics.median(max(one.compute_s) for one in some),
            "spread": statistics.median(one.spread for one in some),
        }
        for label, some in times.items()
    ]
    best, own = (figures[f"{which}_vs_fastest_alone"].median for which in ("ideal", "gain"))
    judged = (
        f"at best {best:.2f} x the fastest alone, its communication included: it is {own:.2f} x"
    )
    named = {f"{figure}_{name}": value for figure, value in figures.items()}
    return _Part(rows, named, [f"{name}: {note}" for note in (judged, *chosen.notes)])


def _speeds(times: Sequence[_Timed]) -> list[float]:
    return [one.samples_per_s for one in times]


def _timed(cluster: Cluster, case: Case, plan: Plan, steps: int) -> _Timed:
    """Trains a plan to its end, and takes the times of all but its first steps."""
    run = cluster.train(case.experiment(plan, steps), module=case.module)
    frame = run.wait().metrics
    frame = frame[frame["step"] >= WARM]
    seconds = frame.groupby("rank")["compute_s"].median()
    communication_s, samples_per_s = frame[["communication_s", "samples_per_s"]].median()
    return _Timed(tuple(seconds), float(communication_s), float(samples_per_s))


def _ideal_vs_alone(even: _Timed, alone: _Timed, speeds: Sequence[int], case: Case) -> float:
    """The ideal speed-up over the fastest device alone, with the measured communication."""
    alone_s = case.batch_size / alone.samples_per_s
    return alone_s / (alone_s * max(speeds) / sum(speeds) + even.communication_s)


def _slowest_share(sizes: Sequence[int], speeds: Sequence[int]) -> float:
    """The slowest devices' share over their fair share; `sizes` are of the used devices."""
    slow = [rank for rank, speed in enumerate(speeds) if speed == min(speeds)]
    fair = sum(sizes) * len(slow) * min(speeds) / sum(speeds)
    return sum(sizes[rank] for rank in slow if rank < len(sizes)) / fair


HOST_SPEEDS, RANKS_PER_HOST, BANDWIDTH = (1.0, 0.5), 2, "2gbit"


def _on_hosts(size: Size) -> _Part:
    """Rows divided over two hosts, one of which is half as fast."""
    world = len(HOST_SPEEDS) * RANKS_PER_HOST
    speeds = tuple(2 if index < RANKS_PER_HOST else 1 for index in range(world))
    try:
        with (
            Hosts(len(HOST_SPEEDS), speeds=HOST_SPEEDS, bandwidth=BANDWIDTH) as hosts,
            Cluster(world, hosts=hosts, timeout=300.0) as cluster,
        ):
            part = _compared(cluster, speeds, ROWS, size, name="hosts")
    except HostsError as error:
        return _Part(notes=[f"Emulated hosts were not measured: {error}"])
    part.notes.append(
        f"Hosts: {RANKS_PER_HOST} engines on each of two, {HOST_SPEEDS} fast, {BANDWIDTH} links."
    )
    return part


FACTOR = 3.0
RECOVER_WITHIN = 20  # steps
LAST = 8  # of those steps, that count
SETTLE = 72  # more, after which shares are looked at: small differences take most evidence
TYPICAL = 24  # of those, that count
TICK_S = 0.02


@dataclass(frozen=True)
class _Slowdown:
    """One slowdown: samples per second after it by the name of the run, and what shares came of it.

    `changes` of shares followed it, each of which took so many `seconds`.
    """

    speeds: Mapping[str, float]
    imbalance: float
    one_row: float
    changes: int
    seconds: Sequence[float]
    notes: Sequence[str]


def _live(slowed: Sequence[_Slowdown], world: int) -> _Part:
    """The rows and figures of some slowdowns, of the last of so many engines."""
    speeds = {name: [one.speeds[name] for one in slowed] for name in slowed[0].speeds}
    seconds = [s for one in slowed for s in one.seconds]
    return _Part(
        [
            {"shares": name, "samples/s after the slowdown": speed}
            for one in slowed
            for name, speed in one.speeds.items()
        ],
        {
            "recovered_after_slowdown": Figure.ratio(speeds["followed"], speeds["best"]),
            "gain_of_rebalancing": Figure.ratio(speeds["followed"], speeds["left"]),
            "rebalancing_rounds": Figure.of([one.changes for one in slowed]),
            "imbalance": Figure.of([one.imbalance for one in slowed]),
            "imbalance_of_one_row": Figure.of([one.one_row for one in slowed]),
        },
        [
            f"Engine {world - 1} becomes {FACTOR:g} times slower; samples/s are of the "
            f"median of {LAST} steps, the last ones of the {RECOVER_WITHIN} after it; imbalance of "
            f"the ranks' own medians of {TYPICAL}, under the last shares, {SETTLE} steps later. "
            f"Changes of shares took, in s: {', '.join(f'{s:.3g}' for s in seconds) or 'none'}.",
            *(note for one in slowed for note in one.notes),
        ],
    )


def _slowdown(cluster: Cluster, case: Case, *, quick: bool) -> _Slowdown:
    """Measures the three runs."""
    world, slow = len(cluster), len(cluster) - 1
    experiment = case.experiment(case.equal(world), 1_000_000)
    try:
        followed = cluster.train(experiment, module=case.module)
        balancer = Rebalancer(followed)
        _until(followed, 6 if quick else 12)
        cluster.slow(slow, FACTOR)
        slowed_at, earlier = _last_step(followed), len(balancer.changes)
        _until(followed, slowed_at + RECOVER_WITHIN)
        speeds = {"followed": _speed(followed, slowed_at + RECOVER_WITHIN)}
        _until(followed, slowed_at + RECOVER_WITHIN + (LAST if quick else SETTLE))
        imbalance, one_row = _imbalance(followed, balancer), _one_row(followed)
        _end(followed)
        best = case.chosen(cluster, world, 2.0 if quick else 10.0).plan
        for name, chosen in (("best", best), ("left", experiment.plan)):
            static = cluster.train(experiment.replace(plan=chosen), module=case.module)
            _until(static, LAST + 2 if quick else RECOVER_WITHIN)
            speeds[name] = _speed(static, _last_step(static))
            _end(static)
    finally:
        cluster.mend()
    changes = [change.replan.carried_out for change in balancer.changes]
    return _Slowdown(
        speeds,
        imbalance,
        one_row,
        len(changes) - earlier,
        [done.seconds for done in changes if done is not None],
        balancer.notes,
    )


def _imbalance(run: Run, balancer: Rebalancer) -> float:
    """(slowest - fastest) / slowest, of the median compute time of ranks that have rows."""
    done = [change.replan.carried_out for change in balancer.changes]
    since = max((one.step for one in done if one is not None), default=0)
    rows = run.experiment.plan.rows_of(run.experiment.batch_size)
    seen: dict[int, list[float]] = {rank: [] for rank, count in enumerate(rows) if count}
    for row in run.rows[:]:
        if row["step"] > since and row["rank"] in seen:  # the first one gets its memory
            seen[int(row["rank"])].append(row["compute_s"])
    typical = [statistics.median(own[-TYPICAL:]) for own in seen.values() if own]
    return (max(typical) - min(typical)) / max(typical) if typical else 0.0


def _one_row(run: Run) -> float:
    """The imbalance of one row, on the rank with the fewest rows above none."""
    rows = run.experiment.plan.rows_of(run.experiment.batch_size)
    return 1 / min(count for count in rows if count)


def _until(run: Run, step: int) -> None:
    while _last_step(run) < step and not run.is_done:
        time.sleep(TICK_S)


def _last_step(run: Run) -> int:
    return max((int(row["step"]) for row in run.rows[-16:]), default=0)


def _speed(run: Run, step: int) -> float:
    """Samples per second in the steps before this one."""
    rows = [row for row in run.rows[:] if row["rank"] == 0 and row["step"] <= step]
    return statistics.median(row["samples_per_s"] for row in rows[-LAST:])


def _end(run: Run) -> None:
    run.stop()
    run.wait()


UNEQUAL = (4, 2, 1, 1)
_STATES = 1  # momentum


@dataclass(frozen=True)
class Resharded:
    """One rank's reshardings: seconds on the slowest rank, of copies too, and bytes received."""

    recut_s: tuple[float, ...]
    copy_s: tuple[float, ...]
    received: tuple[int, ...]


def _resharded(cluster: Cluster, model: str, *, rounds: int) -> _Part:
    """Measures reshardings there and back, of a torchvision model, or "" for a small network."""
    world, module = len(cluster), None if model else CifarNet(4)
    graph = trace(module or model, input_shape=INPUT_SHAPE, num_classes=10)
    equal, unequal = (Plan.filters(graph, world, s) for s in (None, UNEQUAL[:world]))
    experiment = Experiment(
        plan=equal,
        data=Synthetic(samples=2 * world),
        batch_size=2 * world,
        optimizer=SGD(lr=1e-4, momentum=0.9),
        steps=1,
    )
    task, text = f"{__name__}:measure", unequal.to_toml()
    ranks: list[Resharded] = cluster.call(task, experiment, module=module, plan=text, rounds=rounds)
    states = dict.fromkeys(graph.trainable, _STATES)
    predicted = [
        [4 * Reshard(*way).received(rank, states) for way in ((equal, unequal), (unequal, equal))]
        for rank in range(world)
    ]
    ratios = [
        received / predicted[rank][index % 2]
        for rank, one in enumerate(ranks)
        for index, received in enumerate(one.received)
        if predicted[rank][index % 2]
    ]
    recut_s, copy_s = ranks[0].recut_s, ranks[0].copy_s
    rows: list[Row] = [
        {
            "re-cut": way,
            "MiB moved": sum(one.received[first] for one in ranks) / MIB,
            "re-cut s": statistics.median(recut_s[first::2]),
            "copies s": statistics.median(copy_s[first::2]),
        }
        for first, way in enumerate(("equal to unequal", "back"))
    ]
    figures = {
        "recut_vs_copy": Figure.ratio(recut_s, copy_s),
        "recut_vs_predicted": Figure.of(ratios),
    }
    note = (
        f"Re-cuts of {graph.source.name} ({graph.parameters:,} parameters, with momentum) on "
        f"{world} engines, from equal filters to {':'.join(map(str, UNEQUAL[:world]))} and back."
    )
    return _Part(rows, figures, [note])


def measure(
    config: RankConfig, experiment: Experiment, *, weights: Path, plan: str, rounds: int
) -> Resharded:
    """On an engine: reshardings to a plan (TOML) and back, and copies in turns with them.

    A first round warms up.
    """
    plans = (Plan.from_toml(plan, experiment.plan.graph), experiment.plan)
    recut_s, copy_s, received = list[float](), list[float](), list[int]()
    with World.open(config) as world:
        groups = world.groups(group_specs_of(experiment.plan))
        state = RankState.start(experiment, world, groups, weights, None)
        for done in range(1, 2 * rounds + 3):
            state.stepper.run(done)
            state.stepper.update()
            sizes = _elements(state.experiment.plan, plans[(done - 1) % 2])
            slowest(0.0, state.everyone)
            began, before = time.perf_counter(), resharded_bytes(world.recorder)
            state = under(state, plans[(done - 1) % 2], done)
            recut_s.append(slowest(time.perf_counter() - began, state.everyone))
            received.append(resharded_bytes(world.recorder) - before)
            copy_s.append(_copied(sizes, state.everyone))
    return Resharded(tuple(recut_s[2:]), tuple(copy_s[2:]), tuple(received[2:]))


def _elements(before: Plan, after: Plan) -> list[list[int]]:
    """The elements of weights and momentum that each rank sends to each other [ranks, ranks]."""
    world = before.world_size
    sizes = [[0] * world for _ in range(world)]
    trainable = {name for name, placed in before.flow.weights.items() if placed.trainable}
    for move in Reshard(before, after).moves:
        sizes[move.source][move.target] += move.numel * (1 + _STATES * (move.name in trainable))
    return sizes


def _copied(sizes: Sequence[Sequence[int]], everyone: Group) -> float:
    """Seconds of exchanging so many elements, from existing flat memory to new memory."""
    flat = torch.zeros(sum(sizes[everyone.rank]))
    slowest(0.0, everyone)
    began = time.perf_counter()
    all_to_all_v(flat, sizes, everyone, layer="bench")
    return slowest(time.perf_counter() - began, everyone)
