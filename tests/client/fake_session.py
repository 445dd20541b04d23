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

from workbench.comm.collectives import all_reduce
from workbench.comm.groups.world import World
from workbench.plan.metrics import COLUMNS, Row
from workbench.store.outcome import Control, Outcome
from workbench.train.loop.session import Seat

Emit = Callable[[Row], None]


class LayerError(RuntimeError):
    layer = "fc1"


def row(step: int, rank: int) -> Row:
    values = {name: 512 if name.endswith("_bytes") else 0.5 for name in COLUMNS}
    return {**values, "step": step, "rank": rank, "time": time.time(), "loss": 1.0 / (1 + step)}


def train(
    *, seat: Seat, experiment, weights, directory: Path, resume, control: Control, emit: Emit
) -> Outcome:
    """Steps with one all-reduce each; every rank stops at the same step."""
    with World.open(seat) as world:
        ranks = tuple(range(seat.world_size))
        group = world.groups([("all", ranks)])["all", ranks]
        for step in range(experiment.steps):
            status = torch.tensor([float(control.stop_requested), 1.0])
            status = all_reduce(status, group, layer="status")
            assert status[1] == seat.world_size
            emit(row(step, seat.rank))
            if status[0]:
                (directory / "checkpoint").write_text(str(step))
                return Outcome("stopped", step + 1, str(directory / "checkpoint"))
        return Outcome("finished", experiment.steps, None, {"loss": 0.1, "accuracy": 0.75})


def slowly(*, experiment, emit: Emit, **given) -> Outcome:
    """At most some 100 steps a second."""

    def emit_slowly(row: Row) -> None:
        time.sleep(0.01)
        emit(row)

    return train(experiment=experiment, emit=emit_slowly, **given)


def in_a_hurry(*, seat: Seat, experiment, control, emit: Emit, **given) -> Outcome:
    """Rows as fast as they can be made."""
    for step in range(experiment.steps):
        emit(row(step, seat.rank))
    return Outcome("finished", experiment.steps, None)


def diverges(*, seat: Seat, emit: Emit, **given) -> Outcome:
    emit(row(0, seat.rank))
    return Outcome("diverged", 1, None, {}, "the loss became nan at step 1, first in layer 'fc0'")


def last_rank_raises(*, seat: Seat, emit: Emit, **given) -> Outcome:
    """The last rank raises; the others wait for it in a collective."""
    with World.open(seat) as world:
        ranks = tuple(range(seat.world_size))
        group = world.groups([("all", ranks)])["all", ranks]
        emit(row(0, seat.rank))
        if seat.rank == seat.world_size - 1:
            raise LayerError("no room on this rank")
        all_reduce(torch.ones(1), group, layer="fc1")
    raise AssertionError("unreachable")


def all_raise(*, seat: Seat, **given) -> Outcome:
    raise ValueError(f"rank {seat.rank} has no data")


def first_rank_ignores(*, seat: Seat, **given) -> Outcome:
    """The last rank raises; the first one is deaf, as if it were blocked in foreign code."""
    if seat.rank == seat.world_size - 1:
        raise ValueError("enough")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        time.sleep(1)


def answers_too_much(*, seat: Seat, emit: Emit, **given) -> bytes:
    emit(row(0, seat.rank))
    return os.urandom(100_000)


def tells_its_place(**given) -> Outcome:
    """How the engine was started, as the outcome's message."""
    place = {
        "environment": dict(os.environ),
        "threads": torch.get_num_threads(),
        "cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
    }
    return Outcome("finished", 1, None, {}, json.dumps(place))
