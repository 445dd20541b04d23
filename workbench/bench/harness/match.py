"""Systems that are measured interleaved, in rounds: a notebook's side, and one engine's.

In a match all systems stay in memory, and each has some steps of every round (`measure`). Where
they do not fit together, each is built anew for its turn (`measure_turns`); its first steps are not
timed: they fill a pipeline, and allocate memory.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from workbench.bench.harness.report import MIB, Cell
from workbench.bench.harness.rivals import LOSSES, Side, build_rival, loss_side, workbench_side
from workbench.client.cluster import Cluster
from workbench.comm.all_reduce import start_all_reduce
from workbench.comm.collectives import all_gather
from workbench.comm.groups.group import Group
from workbench.comm.groups.world import RankConfig, World
from workbench.layers.cut_model import RankGroups
from workbench.plan.experiment.experiment import Experiment, Sync, Synchronous
from workbench.plan.experiment.metrics import PHASES, CollectiveTrace, PhaseName
from workbench.plan.graph.graph import Graph
from workbench.plan.placement.placement import Shard
from workbench.plan.plans.plan import Plan
from workbench.train.measure.repeating import finish
from workbench.train.run.memory import PeakMeter
from workbench.train.run.rank import everyone, group_specs_of

WARM_UP = 2
MEASURE_PLANS, MEASURE_LOSSES = f"{__name__}:measure_plans", f"{__name__}:measure_losses"


@dataclass(frozen=True)
class Match:
    """Systems that run interleaved with the workbench, a round of which takes some seconds.

    Of several rivals in one place, the one that is fastest in the first round takes part.
    """

    part: str
    engines: int
    rivals: Sequence[Sequence[str]]
    seconds: float


@dataclass
class Measured:
    """The measurements of one rank, by system.

    Attributes:
        samples: the samples of a step, over all ranks that take part.
        seconds: the seconds of a step on the slowest rank, for each round.
        peak_bytes: the bytes of this rank's tensors at the peak, in the system's first two steps.
        losses: this rank's part of the last step's loss.
        chosen: the name for `build_rival` of each rival that took part.
    """

    samples: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    chosen: list[str] = field(default_factory=list)


@dataclass
class Results:
    """The measurements of all rounds of a match, by system; peaks are the most of all ranks."""

    samples: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)

    def add(self, ranks: Sequence[Measured]) -> None:
        """Adds a round, as each rank has measured it."""
        self.samples |= ranks[0].samples
        for name, seconds in ranks[0].seconds.items():
            self.seconds.setdefault(name, []).extend(seconds)
            most = max(rank.peak_bytes[name] for rank in ranks)
            self.peaks[name] = max(most, self.peaks.get(name, 0))
            self.losses[name] = sum(rank.losses.get(name, 0.0) for rank in ranks)

    @property
    def speeds(self) -> dict[str, list[float]]:
        """The samples per second in each round, by system."""
        return {
            name: [self.samples[name] / seconds for seconds in taken]
            for name, taken in self.seconds.items()
        }

    def rows(self, graph: Graph, ranks: int, group_size: int) -> list[dict[str, Cell]]:
        """A row of the report for each system."""
        return [
            {
                "system": name,
                "model": graph.source.name,
                "engines": ranks,
                "group": group_size if name == "workbench" else "",
                "samples/s": statistics.median(values),
                "min": min(values),
                "max": max(values),
                "peak MiB per rank": self.peaks[name] / MIB,
                "loss": self.losses[name],
            }
            for name, values in self.speeds.items()
        ]


def run_round(
    cluster: Cluster,
    experiment: Experiment,
    module: nn.Module | None,
    rivals: Sequence[Sequence[str]],
    steps: int,
) -> list[Measured]:
    """One round of the workbench and of its rivals, as each rank has measured it."""
    options = {"steps": steps, "rivals": rivals}
    return cluster.call(f"{__name__}:measure", experiment, module=module, **options)


def measure(
    config: RankConfig,
    experiment: Experiment,
    *,
    weights: Path,
    steps: int,
    rivals: Sequence[Sequence[str]],
) -> Measured:
    """On an engine: builds the systems, then runs a round of `steps` steps of each.

    Of several rivals in one place, each is tried, and the fastest takes part.
    """
    with PeakMeter(torch.device(config.device)) as meter, World.open(config) as world:
        groups = world.groups(group_specs_of(experiment.plan))
        bench = _Bench(meter, everyone(groups, experiment.plan), world.device)

        def build_ours() -> list[Side]:
            side = workbench_side(experiment, world, groups, weights)
            meter.add(world.shared_bytes)
            return [side]

        sides = bench.built(build_ours)
        sides_of = partial(build_rival, experiment=experiment, world=world, weights=weights)
        for choices in rivals:
            best = choices[0]
            if len(choices) > 1:
                best = min(choices, key=lambda name: bench.tried(sides_of(name)[0]))
                gc.collect()
            sides += bench.built(partial(sides_of, best))
            bench.measured.chosen.append(best)
        return bench.rounds(sides, 1, steps)


def measure_plans(
    config: RankConfig,
    experiment: Experiment,
    *,
    weights: Path,
    plans: Sequence[str],
    rounds: int,
    steps: int,
) -> Measured:
    """On an engine: builds a system for each plan (TOML), named by its number, and runs rounds."""
    graph = experiment.plan.graph
    with PeakMeter(torch.device(config.device)) as meter, World.open(config) as world:
        everybody = everyone(world.groups(group_specs_of(experiment.plan)), experiment.plan)
        bench, sides = _Bench(meter, everybody, world.device), list[Side]()
        for number, text in enumerate(plans):
            own = experiment.replace(plan=Plan.from_toml(text, graph))
            groups = world.groups(group_specs_of(own.plan))
            sides += bench.built(partial(_named_side, str(number), own, world, groups, weights))
        return bench.rounds(sides, rounds, steps)


def _named_side(
    name: str, experiment: Experiment, world: World, groups: RankGroups, weights: Path
) -> list[Side]:
    return [replace(workbench_side(experiment, world, groups, weights), name=name)]


def measure_losses(
    config: RankConfig, experiment: Experiment, *, weights: Path, steps: int
) -> Measured:
    """On an engine: a round of each way to the loss of cut scores, which are drawn."""
    with PeakMeter(torch.device(config.device)) as meter, World.open(config) as world:
        groups = world.groups(group_specs_of(experiment.plan))
        bench, sides = _Bench(meter, everyone(groups, experiment.plan), world.device), list[Side]()
        for name in LOSSES:
            sides += bench.built(partial(_loss_sides, name, experiment, world, bench.group))
        return bench.rounds(sides, 1, steps)


def _loss_sides(name: str, experiment: Experiment, world: World, group: Group) -> list[Side]:
    return [loss_side(name, experiment, world, group)]


class _Bench:
    def __init__(self, meter: PeakMeter, group: Group, device: torch.device) -> None:
        self.meter, self.group, self.device, self.measured = meter, group, device, Measured()

    def built(self, build: Callable[[], Iterable[Side]]) -> list[Side]:
        """Builds systems and warms them up, measuring the memory that they add."""
        before = self.meter.lap().live_bytes
        sides = list(build())
        for side in sides:
            self.measured.samples[side.name] = side.samples
            self.measured.seconds[side.name] = []
            self._timed(side, range(WARM_UP))
        peak = self.meter.lap().peak_bytes - before
        self.measured.peak_bytes |= {side.name: peak for side in sides}
        return sides

    def tried(self, side: Side) -> float:
        """Seconds of a step of a system that is then dropped."""
        self._timed(side, range(WARM_UP))
        return self._timed(side, range(WARM_UP, 2 * WARM_UP))

    def rounds(self, sides: Sequence[Side], rounds: int, steps: int) -> Measured:
        """Runs rounds of all systems."""
        for index in range(rounds):
            first = WARM_UP + index * steps
            for side in sides:
                seconds = self._timed(side, range(first, first + steps))
                self.measured.seconds[side.name].append(seconds)
        return self.measured

    def _timed(self, side: Side, steps: range) -> float:
        """Seconds of a step on the slowest rank; all ranks start together and wait for all."""
        slowest(0.0, self.group)
        began = time.perf_counter()
        if side.takes_part:
            with side.threads_of_all():
                for index in steps:
                    self.measured.losses[side.name] = side.step(index)
                finish(self.device)
        return slowest(time.perf_counter() - began, self.group) / len(steps)


def slowest(seconds: float, group: Group) -> float:
    """The most seconds of all ranks; also a barrier."""
    mine = torch.tensor([seconds], dtype=torch.float64)
    return float(all_gather(mine, Shard(0, (1,) * group.size), group, layer="bench").max())


CONTROL = ("status", "bench")  # layers of the record that are no part of the exchange


@dataclass(frozen=True)
class Turn:
    """One system that is built anew for its turn.

    It runs a strategy of the workbench, or "rival ..." as for `build_rival`; `alone`, only the
    gradient's exchange of a synchronous strategy.
    """

    name: str
    runs: Sync | str
    warm: int = 1
    steps: int = 2
    alone: bool = False


@dataclass
class Seen:
    """The measurements of one rank for one system.

    Attributes:
        seconds: the seconds of a step on the slowest rank, for each round.
        received: the bytes that this rank received for gradients and parameters in a step; 0 for
            systems other than the workbench.
        phases: the seconds of a step's exchanges in each phase; only of a system that runs alone.
    """

    seconds: list[float] = field(default_factory=list)
    received: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)

    def coding_s(self) -> float:
        """The seconds of coding in a step: encoding, decoding, and decoding while adding up."""
        return sum(self.phases.get(name, 0.0) for name in ("encode", "decode", "reduce"))


def take_turns(
    cluster: Cluster,
    experiment: Experiment,
    module: nn.Module | None,
    turns: Sequence[Turn],
    rounds: int,
) -> list[dict[str, Seen]]:
    """Runs the systems in turns; the measurements of each rank, by system."""
    options = {"turns": turns, "rounds": rounds}
    return cluster.call(f"{__name__}:measure_turns", experiment, module=module, **options)


def measure_turns(
    config: RankConfig, experiment: Experiment, *, weights: Path, turns: Sequence[Turn], rounds: int
) -> dict[str, Seen]:
    """On an engine: runs each system once in every round, with its own strategy."""
    with World.open(config) as world:
        bench = _Turns(experiment, weights, world)
        seen = {turn.name: Seen() for turn in turns}
        for _ in range(rounds):
            for turn in turns:
                bench.take(turn, seen[turn.name])
        return seen


class _Turns:
    def __init__(self, experiment: Experiment, weights: Path, world: World) -> None:
        self.experiment, self.weights, self.world = experiment, weights, world
        self.groups = world.groups(group_specs_of(experiment.plan))
        self.everyone = everyone(self.groups, experiment.plan)

    def take(self, turn: Turn, seen: Seen) -> None:
        """Adds one turn to the measurements of its system."""
        side, recorder = self._built(turn), self.world.recorder
        slowest(0.0, self.everyone)  # all begin together
        recorder.reset()
        for index in range(turn.warm):
            side.step(index)
        with ExitStack() as stack:
            traces = stack.enter_context(recorder.tracing()) if turn.alone else []
            began = time.perf_counter()
            for index in range(turn.warm, turn.warm + turn.steps):
                side.step(index)
            seconds = time.perf_counter() - began
        side.rest()  # so that every step's exchange is counted, and the next turn has a free link
        received = sum(row.bytes for row in recorder.rows() if row.layer not in CONTROL)
        seen.seconds.append(slowest(seconds, self.everyone) / turn.steps)
        seen.received = received / (turn.warm + turn.steps)
        seen.phases = {name: _spent(traces, name) / turn.steps for name in PHASES if turn.alone}
        del side
        gc.collect()  # models are full of cycles

    def _built(self, turn: Turn) -> Side:
        if isinstance(turn.runs, str):
            name = turn.runs.removeprefix("rival ")
            return build_rival(name, self.experiment, self.world, self.weights)[0]
        if turn.alone and isinstance(turn.runs, Synchronous):
            return Side(turn.name, self._exchange(turn.runs), 0)
        experiment = self.experiment.replace(sync=turn.runs)
        return workbench_side(experiment, self.world, self.groups, self.weights)

    def _exchange(self, sync: Synchronous) -> Callable[[int], float]:
        flat = self.everyone.buffer(self.experiment.plan.graph.parameters, torch.zeros(1))
        flat.normal_()
        algorithm, codec = sync.algorithm, sync.codec

        def step(_index: int) -> float:
            start_all_reduce(
                flat, self.everyone, algorithm=algorithm, codec=codec, layer="gradients"
            ).wait()
            return 0.0

        return step


def _spent(traces: Sequence[CollectiveTrace], name: PhaseName) -> float:
    return sum(trace.seconds_of([name]) for trace in traces if trace.layer not in CONTROL)
