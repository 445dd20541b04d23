"""The work of one engine in `bench splitbrain`: builds every system, then runs each in turn."""

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from workbench.bench.rivals.losses import WAYS, loss_sides
from workbench.bench.rivals.rivals import Side, build_rival, whole_machine, workbench_side
from workbench.comm.collectives import all_gather
from workbench.comm.groups.group import Group
from workbench.comm.groups.world import RankConfig, World
from workbench.layers.cut_model import RankGroups
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.placement.placement import Shard
from workbench.plan.plans.plan import Plan
from workbench.train.measure.repeating import finish
from workbench.train.run.memory import PeakMeter
from workbench.train.run.rank import everyone, group_specs_of

WARM_UP = 2


@dataclass
class Measured:
    """The measurements of one rank, by system.

    Attributes:
        samples: the samples of a step, over all ranks that take part.
        seconds: the seconds of a step on the slowest rank that takes part, one entry for each
            round.
        peak_bytes: the bytes of this rank's tensors at the peak, from the system's first to its
            second step.
        losses: this rank's part of the last step's loss.
        chosen: the name for `build_rival` of each rival that took part.
    """

    samples: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    chosen: list[str] = field(default_factory=list)


def measure(
    config: RankConfig,
    experiment: Experiment,
    *,
    weights: Path,
    steps: int,
    rivals: Sequence[Sequence[str]],
) -> Measured:
    """Builds the systems, then runs a round of `steps` steps of each.

    Args:
        config: the rank's number, device and connection to the others.
        experiment: the experiment of the workbench itself.
        weights: the file of weights that all systems start from.
        steps: the number of steps of a turn.
        rivals: the names for `build_rival`; of several in one place, each is tried, and the fastest
            takes part.
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
            bench.found.chosen.append(best)
        for side in sides:
            bench.run(side, range(WARM_UP, WARM_UP + steps))
        return bench.found


def measure_plans(
    config: RankConfig,
    experiment: Experiment,
    *,
    weights: Path,
    plans: Sequence[str],
    rounds: int,
    steps: int,
) -> Measured:
    """Builds a system for each plan, then runs `rounds` rounds of `steps` steps of each.

    Args:
        config: the rank's number, device and connection to the others.
        experiment: the experiment that each plan runs in.
        weights: the file of weights that all systems start from.
        plans: the plans, as TOML; each system is named by the number of its plan.
        rounds: how often each system takes its turn.
        steps: the number of steps of a turn.
    """
    graph = experiment.plan.graph
    with PeakMeter(torch.device(config.device)) as meter, World.open(config) as world:
        everybody = everyone(world.groups(group_specs_of(experiment.plan)), experiment.plan)
        bench, sides = _Bench(meter, everybody, world.device), list[Side]()
        for number, text in enumerate(plans):
            own = experiment.replace(plan=Plan.from_toml(text, graph))
            groups = world.groups(group_specs_of(own.plan))
            sides += bench.built(partial(_named_side, str(number), own, world, groups, weights))
        for index in range(rounds):
            first = WARM_UP + index * steps
            for side in sides:
                bench.run(side, range(first, first + steps))
        return bench.found


def measure_losses(
    config: RankConfig, experiment: Experiment, *, weights: Path, steps: int
) -> Measured:
    """Builds each way to the loss of cut scores, then runs a round of `steps` steps of each.

    Args:
        config: the rank's number, device and connection to the others.
        experiment: the experiment whose model, batch and seed give the scores.
        weights: not read: scores are drawn.
        steps: the number of steps of a turn.
    """
    with PeakMeter(torch.device(config.device)) as meter, World.open(config) as world:
        groups = world.groups(group_specs_of(experiment.plan))
        bench = _Bench(meter, everyone(groups, experiment.plan), world.device)
        sides = list[Side]()
        for way in WAYS:
            sides += bench.built(partial(loss_sides, way, experiment, world, bench.group))
        for side in sides:
            bench.run(side, range(WARM_UP, WARM_UP + steps))
        return bench.found


def _named_side(
    name: str, experiment: Experiment, world: World, groups: RankGroups, weights: Path
) -> list[Side]:
    return [replace(workbench_side(experiment, world, groups, weights), name=name)]


class _Bench:
    def __init__(self, meter: PeakMeter, group: Group, device: torch.device) -> None:
        self.meter, self.group, self.device, self.found = meter, group, device, Measured()

    def built(self, build: Callable[[], Iterable[Side]]) -> list[Side]:
        """Builds systems and warms them up, measuring the memory that they add."""
        before = self.meter.lap().live_bytes
        sides = list(build())
        for side in sides:
            self.found.samples[side.name] = side.samples
            self.found.seconds[side.name] = []
            self._timed(side, range(WARM_UP))
        peak = self.meter.lap().peak_bytes - before
        self.found.peak_bytes |= {side.name: peak for side in sides}
        return sides

    def tried(self, side: Side) -> float:
        """Seconds of a step of a system that is then dropped."""
        self._timed(side, range(WARM_UP))
        return self._timed(side, range(WARM_UP, 2 * WARM_UP))

    def run(self, side: Side, steps: range) -> None:
        """Runs one round of one system."""
        self.found.seconds[side.name].append(self._timed(side, steps))

    def _timed(self, side: Side, steps: range) -> float:
        """Seconds of a step on the slowest rank; all ranks start together and wait for all."""
        self._slowest(0.0)
        began = time.perf_counter()
        if side.takes_part:
            back = whole_machine(side.threads)
            try:
                for index in steps:
                    self.found.losses[side.name] = side.step(index)
                finish(self.device)
            finally:
                back()
        return self._slowest(time.perf_counter() - began) / len(steps)

    def _slowest(self, seconds: float) -> float:
        mine = torch.tensor([seconds], dtype=torch.float64)
        ranks = Shard(0, (1,) * self.group.size)
        return float(all_gather(mine, ranks, self.group, layer="bench").max())
