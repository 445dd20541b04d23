"""What one engine does in `bench splitbrain`: builds every side, then runs them in turn."""

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from workbench.bench.peers import build_rival
from workbench.bench.sides import Side, whole_machine, workbench_side
from workbench.comm.collectives import all_gather
from workbench.comm.groups.group import Group
from workbench.comm.groups.world import Seat, World
from workbench.layers.cut_model import Groups
from workbench.plan.experiment import Experiment
from workbench.plan.placement import Shard
from workbench.plan.plan import Plan
from workbench.train.loop.memory import PeakMeter
from workbench.train.loop.state import everyone, group_specs_of

WARM_UP = 2


@dataclass
class Measured:
    """What one rank saw of each side.

    Attributes:
        samples: of a step, over all ranks.
        seconds: of a step, one entry for each round: of the slowest rank that takes part.
        peak_bytes: of this rank's tensors, from the side's first to its second step.
        losses: this rank's part of the last step's loss.
    """

    samples: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)


def measure(
    seat: Seat,
    experiment: Experiment,
    *,
    weights: Path,
    rounds: int,
    steps: int,
    rivals: Sequence[Sequence[str]],
) -> Measured:
    """Builds the sides, then runs `rounds` rounds of `steps` steps of each.

    Args:
        seat: where this rank sits.
        experiment: of the workbench's own side.
        weights: from which all sides start.
        rounds: how often each side takes its turn.
        steps: of a turn.
        rivals: names for `build_rival`; where there are several in one place, each is tried,
            and the fastest takes part.
    """
    with PeakMeter(torch.device(seat.device)) as meter, World.open(seat) as world:
        groups = world.groups(group_specs_of(experiment.plan))
        bench = _Bench(meter, everyone(groups, experiment.plan))

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
        for index in range(rounds):
            first = WARM_UP + index * steps
            for side in sides:
                bench.run(side, range(first, first + steps))
        return bench.found


def measure_plans(
    seat: Seat,
    experiment: Experiment,
    *,
    weights: Path,
    plans: Sequence[str],
    rounds: int,
    steps: int,
) -> Measured:
    """Builds a side for each plan, then runs `rounds` rounds of `steps` steps of each.

    Args:
        seat: where this rank sits.
        experiment: in which each plan runs.
        weights: from which all start.
        plans: as TOML; a side has the number of its plan as its name.
        rounds: how often each side takes its turn.
        steps: of a turn.
    """
    graph = experiment.plan.graph
    with PeakMeter(torch.device(seat.device)) as meter, World.open(seat) as world:
        everybody = everyone(world.groups(group_specs_of(experiment.plan)), experiment.plan)
        bench, sides = _Bench(meter, everybody), list[Side]()
        for number, text in enumerate(plans):
            own = experiment.replace(plan=Plan.from_toml(text, graph))
            groups = world.groups(group_specs_of(own.plan))
            sides += bench.built(partial(_named_side, str(number), own, world, groups, weights))
        for index in range(rounds):
            first = WARM_UP + index * steps
            for side in sides:
                bench.run(side, range(first, first + steps))
        return bench.found


def _named_side(
    name: str, experiment: Experiment, world: World, groups: Groups, weights: Path
) -> list[Side]:
    return [replace(workbench_side(experiment, world, groups, weights), name=name)]


class _Bench:
    def __init__(self, meter: PeakMeter, group: Group) -> None:
        self.meter, self.group, self.found = meter, group, Measured()

    def built(self, build: Callable[[], Iterable[Side]]) -> list[Side]:
        """Builds sides and warms them up, measuring the memory that they add."""
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
        """Seconds of a step of a side that is then dropped."""
        self._timed(side, range(WARM_UP))
        return self._timed(side, range(WARM_UP, 2 * WARM_UP))

    def run(self, side: Side, steps: range) -> None:
        """One round of one side."""
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
            finally:
                back()
        return self._slowest(time.perf_counter() - began) / len(steps)

    def _slowest(self, seconds: float) -> float:
        mine = torch.tensor([seconds], dtype=torch.float64)
        ranks = Shard(0, (1,) * self.group.size)
        return float(all_gather(mine, ranks, self.group, layer="bench").max())
