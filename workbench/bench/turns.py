"""What one engine does in `bench pipesgd`: systems take turns, each built anew for its turn.

So only one of them is in memory at a time, however large the model is. A turn's first steps are
not timed: they fill a pipeline, and have memory allocated.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from workbench.bench.peers import build_rival
from workbench.bench.sides import Side, workbench_side
from workbench.comm.collectives import all_gather, start_all_reduce
from workbench.comm.group import Group
from workbench.comm.world import Seat, World
from workbench.layers.cut_model import Groups
from workbench.plan.all_reduce import Algorithm
from workbench.plan.experiment import Experiment, Sync
from workbench.plan.placement import Shard
from workbench.train.state import everyone, group_specs_of

CONTROL = ("status", "bench")  # layers of the record that are no part of the exchange


@dataclass(frozen=True)
class Turn:
    """One system.

    Attributes:
        name: of the system.
        runs: a step strategy of the workbench, "rival ..." as `build_rival` takes it, or
            "exchange ...": nothing but the all-reduce of a gradient by this algorithm.
        warm: steps before those that are timed.
        steps: that are timed.
    """

    name: str
    runs: Sync | str
    warm: int = 1
    steps: int = 2


@dataclass
class Seen:
    """What one rank saw of one system.

    Attributes:
        seconds: of a step on the slowest rank, one entry for each round.
        received: bytes that this rank received for gradients and parameters in a step; 0 of what
            is not the workbench's.
    """

    seconds: list[float] = field(default_factory=list)
    received: float = 0.0


def measure(
    seat: Seat, experiment: Experiment, *, weights: Path, turns: Sequence[Turn], rounds: int
) -> dict[str, Seen]:
    """In every round each system takes its turn.

    Args:
        seat: where this rank sits.
        experiment: its strategy is put aside for each system's own.
        weights: from which all systems start.
        turns: the systems.
        rounds: how often each takes its turn.
    """
    with World.open(seat) as world:
        groups = world.groups(group_specs_of(experiment.plan))
        bench = _Bench(experiment, weights, world, groups)
        found = {turn.name: Seen() for turn in turns}
        for _ in range(rounds):
            for turn in turns:
                seconds, received = bench.take(turn)
                found[turn.name].seconds.append(seconds)
                found[turn.name].received = received
        return found


class _Bench:
    def __init__(
        self, experiment: Experiment, weights: Path, world: World, groups: Groups
    ) -> None:
        self.experiment, self.weights, self.world, self.groups = experiment, weights, world, groups
        self.everyone: Group = everyone(groups, experiment.plan)

    def take(self, turn: Turn) -> tuple[float, float]:
        """Seconds of a step, and bytes that this rank received in it."""
        with self._side(turn.runs) as side:
            self._slowest(0.0)  # all begin together
            self.world.recorder.reset()
            for index in range(turn.warm):
                side.step(index)
            began = time.perf_counter()
            for index in range(turn.warm, turn.warm + turn.steps):
                side.step(index)
            seconds = time.perf_counter() - began
            side.rest()  # so that every step's exchange is counted, and the next turn has a link
            rows = self.world.recorder.rows()
            received = sum(row.bytes for row in rows if row.layer not in CONTROL)
            slowest = self._slowest(seconds) / turn.steps
        return slowest, received / (turn.warm + turn.steps)

    @contextmanager
    def _side(self, runs: Sync | str) -> Iterator[Side]:
        yield self._built(runs)
        gc.collect()  # models are full of cycles

    def _built(self, runs: Sync | str) -> Side:
        if not isinstance(runs, str):
            experiment = self.experiment.replace(sync=runs)
            return workbench_side(experiment, self.world, self.groups, self.weights)
        kind, _, what = runs.partition(" ")
        if kind == "exchange":
            return Side(runs, self._exchange(what), 0)
        return build_rival(what, self.experiment, self.world, self.weights)[0]

    def _exchange(self, algorithm: Algorithm) -> Callable[[int], float]:
        numel = self.experiment.plan.graph.parameters
        flat = self.everyone.buffer(numel, torch.zeros(1))

        def step(_index: int) -> float:
            start_all_reduce(flat, self.everyone, algorithm=algorithm, layer="gradients").wait()
            return 0.0

        return step

    def _slowest(self, seconds: float) -> float:
        mine = torch.tensor([seconds], dtype=torch.float64)
        ranks = Shard(0, (1,) * self.everyone.size)
        return float(all_gather(mine, ranks, self.everyone, layer="bench").max())
