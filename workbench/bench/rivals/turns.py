"""The work of one engine in `bench pipesgd`: systems take turns, each built anew for its turn.

So only one of them is in memory at a time, however large the model is. A turn's first steps are not
timed: they fill a pipeline, and allocate memory.
"""

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from workbench.bench.rivals.rivals import Side, build_rival, workbench_side
from workbench.comm.all_reduce import start_all_reduce
from workbench.comm.collectives import all_gather
from workbench.comm.groups.group import Group
from workbench.comm.groups.world import RankConfig, World
from workbench.layers.cut_model import RankGroups
from workbench.plan.experiment.experiment import Experiment, Sync, Synchronous
from workbench.plan.experiment.metrics import PHASES, CollectiveTrace, PhaseName
from workbench.plan.placement.placement import Shard
from workbench.train.run.rank import everyone, group_specs_of

CONTROL = ("status", "bench")  # layers of the record that are no part of the exchange


@dataclass(frozen=True)
class Turn:
    """One system.

    Attributes:
        name: the name of the system.
        runs: a strategy of the workbench, or "rival ..." as for `build_rival`.
        alone: whether only the gradient's exchange of a synchronous strategy runs.
        warm: the number of steps before the timed ones.
        steps: the number of timed steps.
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
        seconds: the seconds of a step on the slowest rank, one entry for each round.
        received: the bytes that this rank received for gradients and parameters in a step; 0 for
            systems other than the workbench.
        phases: the seconds of a step's exchanges in each phase, by name; only of a system that runs
            alone.
    """

    seconds: list[float] = field(default_factory=list)
    received: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)

    def coding_s(self) -> float:
        """The seconds of coding in a step: encoding, decoding, and decoding while adding up."""
        return sum(self.phases.get(name, 0.0) for name in ("encode", "decode", "reduce"))


def measure(
    config: RankConfig, experiment: Experiment, *, weights: Path, turns: Sequence[Turn], rounds: int
) -> dict[str, Seen]:
    """Runs each system once in every round.

    Args:
        config: the rank's number, device and connection to the others.
        experiment: the experiment, whose strategy is replaced by each system's own.
        weights: the file of weights that all systems start from.
        turns: the systems.
        rounds: how often each takes its turn.
    """
    with World.open(config) as world:
        groups = world.groups(group_specs_of(experiment.plan))
        bench = _Bench(experiment, weights, world, groups)
        found = {turn.name: Seen() for turn in turns}
        for _ in range(rounds):
            for turn in turns:
                bench.take(turn, found[turn.name])
        return found


class _Bench:
    def __init__(
        self, experiment: Experiment, weights: Path, world: World, groups: RankGroups
    ) -> None:
        self.experiment, self.weights, self.world, self.groups = experiment, weights, world, groups
        self.everyone: Group = everyone(groups, experiment.plan)

    def take(self, turn: Turn, seen: Seen) -> None:
        """Adds one turn to the measurements of its system."""
        side, recorder = self._built(turn), self.world.recorder
        self._slowest(0.0)  # all begin together
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
        seen.seconds.append(self._slowest(seconds) / turn.steps)
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
        numel = self.experiment.plan.graph.parameters
        flat = self.everyone.buffer(numel, torch.zeros(1))
        flat.normal_()

        def step(_index: int) -> float:
            start_all_reduce(
                flat,
                self.everyone,
                algorithm=sync.algorithm,
                codec=sync.codec,
                layer="gradients",
            ).wait()
            return 0.0

        return step

    def _slowest(self, seconds: float) -> float:
        mine = torch.tensor([seconds], dtype=torch.float64)
        ranks = Shard(0, (1,) * self.everyone.size)
        return float(all_gather(mine, ranks, self.everyone, layer="bench").max())


def _spent(traces: Sequence[CollectiveTrace], name: PhaseName) -> float:
    return sum(trace.seconds_of([name]) for trace in traces if trace.layer not in CONTROL)
