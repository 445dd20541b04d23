"""Sessions that ranks run in these tests: the real protocol, real collectives, no model.

A cluster runs one of them when its `task` names it. World size and steps are the experiment's.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch

from workbench.comm.all_reduce import all_reduce
from workbench.comm.groups.world import RankConfig, World
from workbench.plan.experiment.metrics import COLUMNS, Row
from workbench.store.messages import StopRequest, TrainingOutcome

Emit = Callable[[Row], None]


class LayerError(RuntimeError):
    layer = "fc1"


def row(step: int, rank: int) -> Row:
    values = {name: 512 if name.endswith("_bytes") else 0.5 for name in COLUMNS}
    return {**values, "step": step, "rank": rank, "time": time.time(), "loss": 1.0 / (1 + step)}


def train(
    *,
    config: RankConfig,
    experiment,
    weights,
    directory: Path,
    resume,
    control: StopRequest,
    emit: Emit,
) -> TrainingOutcome:
    """Steps with one all-reduce each; every rank stops at the same step."""
    with World.open(config) as world:
        ranks = tuple(range(config.world_size))
        group = world.groups([("all", ranks)])["all", ranks]
        for step in range(experiment.steps):
            status = torch.tensor([float(control.stop_requested), 1.0])
            status = all_reduce(status, group, layer="status")
            assert status[1] == config.world_size
            emit(row(step, config.rank))
            if status[0]:
                (directory / "checkpoint").write_text(str(step))
                return TrainingOutcome("stopped", step + 1, str(directory / "checkpoint"))
        return TrainingOutcome("finished", experiment.steps, None, {"loss": 0.1, "accuracy": 0.75})


def slowly(*, experiment, emit: Emit, **given) -> TrainingOutcome:
    """At most some 100 steps a second."""

    def emit_slowly(row: Row) -> None:
        time.sleep(0.01)
        emit(row)

    return train(experiment=experiment, emit=emit_slowly, **given)


def in_a_hurry(*, config: RankConfig, experiment, control, emit: Emit, **given) -> TrainingOutcome:
    """Rows as fast as they can be made."""
    for step in range(experiment.steps):
        emit(row(step, config.rank))
    return TrainingOutcome("finished", experiment.steps, None)


def diverges(*, config: RankConfig, emit: Emit, **given) -> TrainingOutcome:
    emit(row(0, config.rank))
    return TrainingOutcome(
        "diverged", 1, None, {}, "the loss became nan at step 1, first in layer 'fc0'"
    )


def last_rank_raises(*, config: RankConfig, emit: Emit, **given) -> TrainingOutcome:
    """The last rank raises; the others wait for it in a collective."""
    with World.open(config) as world:
        ranks = tuple(range(config.world_size))
        group = world.groups([("all", ranks)])["all", ranks]
        emit(row(0, config.rank))
        if config.rank == config.world_size - 1:
            raise LayerError("no room on this rank")
        all_reduce(torch.ones(1), group, layer="fc1")
    raise AssertionError("unreachable")


def all_raise(*, config: RankConfig, **given) -> TrainingOutcome:
    with World.open(config):  # or one that is late is ended before it raises
        raise ValueError(f"rank {config.rank} has no data")


def first_rank_ignores(*, config: RankConfig, directory: Path, **given) -> TrainingOutcome:
    """The last rank raises; the first one is deaf by then, as if blocked in foreign code."""
    deaf = directory / "deaf"
    if config.rank == config.world_size - 1:
        while not deaf.exists():
            time.sleep(0.01)
        raise ValueError("enough")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    deaf.touch()
    while True:
        time.sleep(1)


def answers_too_much(*, config: RankConfig, emit: Emit, **given) -> bytes:
    emit(row(0, config.rank))
    return os.urandom(100_000)


def tells_its_place(**given) -> TrainingOutcome:
    """How the engine was started, as the outcome's message."""
    place = {
        "environment": dict(os.environ),
        "threads": torch.get_num_threads(),
        "cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
    }
    return TrainingOutcome("finished", 1, None, {}, json.dumps(place))
