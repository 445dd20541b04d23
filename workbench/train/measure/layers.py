"""How long the layers of a cut model take on this rank, all ranks working at once.

Whole training steps are measured, as they are run, except that gradients are not summed: in a loop
over one layer its weights would stay in the cache, and alone on a host a rank would have the
memory to itself. Ranks begin each step together, since they do when they train: they then want
the same of the memory at the same time, and what slows all of them down makes none of them late.
Of every three steps one runs without a tracer: what it takes more than the layers, the loading and
the update is what every step costs besides.
"""

import gc
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from workbench.comm.groups.world import RankConfig, World
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.graph.graph import sample_bytes
from workbench.plan.machine.work import Work, work_of
from workbench.plan.plans.plan import Plan
from workbench.train.data.feed import MicroBatch, moved
from workbench.train.measure.repeating import Repetition, Until, estimate, finish, together, typical
from workbench.train.run.rank import RankState, group_specs_of
from workbench.train.step.executor import Stepper
from workbench.train.strategy.strategy import OwnGradients
from workbench.train.trace.trace import RankTrace
from workbench.train.trace.tracer import Tracer

_UNTRACED = 3  # of so many steps, one
PARTS = 32  # of a step, whose times tell how unequally fast ranks are
_KEPT = 24  # steps of which they are told


@dataclass(frozen=True)
class LayersMeasured:
    """What one rank found at one number of rows.

    Attributes:
        layers: [distinct works, 3], in the order of `works_on`: seconds forward, seconds backward
            and the relative half width of the 95 % interval of their sum.
        besides_s: what a step takes besides; less than nothing where tracing took longer than that.
        parts: [steps, PARTS]: seconds of runs of as many layers each, of the last few steps.
    """

    rows: int
    layers: NDArray[np.float32]
    load_s: float
    update_s: float
    besides_s: float
    image_bytes: int
    parameter_bytes: int
    steps: int
    parts: NDArray[np.float32]


def works_on(plan: Plan, rank: int, rows: int, precision: str) -> dict[Work, list[str]]:
    """The distinct works of a rank, each with the layers that have it; in the model's order."""
    found: dict[Work, list[str]] = {}
    every = (rows,) * plan.world_size
    for layer in plan.graph.layers:
        if layer.kind not in ("parameter", "size"):
            work = work_of(plan, layer, rank, every, precision)
            found.setdefault(work, []).append(layer.name)
    return found


def layers(
    config: RankConfig,
    experiment: Experiment,
    *,
    weights: Path,
    rows: Sequence[int],
    within_s: float,
) -> list[LayersMeasured]:
    """Measures an experiment's layers at several numbers of rows."""
    with World.open(config) as world:
        groups = world.groups(group_specs_of(experiment.plan))
        state = RankState.start(experiment, world, groups, weights, None)
        end = time.perf_counter() + within_s
        found = []
        for index, count in enumerate(rows):
            left = max(0.0, end - time.perf_counter()) / (len(rows) - index)
            found.append(_Measuring(state, count).measured(left))
        return found


@dataclass
class _Seen:
    layers: list[NDArray[np.float64]] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)
    untraced_s: list[float] = field(default_factory=list)
    parts: list[NDArray[np.float64]] = field(default_factory=list)


class _Measuring:
    def __init__(self, state: RankState, rows: int) -> None:
        self.state, self.rows = state, rows
        world, experiment = state.world, state.experiment
        self.works = works_on(experiment.plan, world.rank, rows, experiment.precision)
        self.stepper = Stepper(
            experiment,
            state.model,
            OwnGradients(state.strategy),
            state.stepper.feed.data,
            world,
            state.stepper.dtype,
            state.loss,
        )
        self.seen, self.step = _Seen(), 0

    def measured(self, within_s: float) -> LayersMeasured:
        for traced in (False, True):  # each kind's first step chooses memory and kernels
            self._run(traced=traced)
        self.seen = _Seen()
        repetition = Repetition(self.state.everyone, Until(), within_s)
        while repetition.goes_on(self.seen.layers):
            for index in range(_UNTRACED):
                self._run(traced=index < _UNTRACED - 1)
        return self._result()

    def _run(self, *, traced: bool) -> None:
        """One step, without sums."""
        state, self.step = self.state, self.step + 1
        gc.collect(1)  # what a tracer has left is not for the next step to collect
        together(state.everyone)
        blocked = state.world.recorder.blocked_s
        began = time.perf_counter()
        batch = self._load()
        load_s = time.perf_counter() - began
        tracer = Tracer(
            state.model,
            self.stepper.passes.parts,
            state.world.recorder,
            state.world.device,
            state.updater.optimizer,
        )
        with tracer if traced else nullcontext():
            self.stepper.run(self.step, (batch,))
            state.updater.step()
        if traced:
            self._note(tracer.trace, load_s)
            return
        finish(state.world.device)
        seconds = time.perf_counter() - began
        self.seen.untraced_s.append(seconds - (state.world.recorder.blocked_s - blocked))

    def _load(self) -> MicroBatch:
        state, rank = self.state, self.state.world.rank
        data = state.stepper.feed.data
        own = torch.arange(rank * self.rows, (rank + 1) * self.rows) % len(data)
        batch = moved(data.batch(own), state.world.device, state.stepper.dtype)
        return MicroBatch((self.rows,) * state.world.size, 0, *batch)

    def _note(self, trace: RankTrace, load_s: float) -> None:
        took = trace.layer_seconds()
        rows = []
        for names in self.works.values():
            known = [took[name] for name in names if name in took]
            forward = sum(seconds.forward_s for seconds in known) / len(names)
            rows.append((forward, sum(seconds.backward_s for seconds in known) / len(names)))
        self.seen.layers.append(np.array(rows).reshape(-1))
        own = np.array_split(np.array(trace.own_seconds()), PARTS)
        self.seen.parts.append(np.array([part.sum() for part in own]))
        self.seen.load_s.append(load_s)
        updates = [stretch.during for stretch in trace.stretches if stretch.what == "update"]
        self.seen.update_s.append(sum(end - begin for begin, end in updates))

    def _result(self) -> LayersMeasured:
        seen, state = self.seen, self.state
        both = np.stack(seen.layers).reshape(len(seen.layers), -1, 2)
        counts = np.array([len(names) for names in self.works.values()])
        mean, _ = estimate(both)
        whole, half = estimate(both.sum(axis=2))
        error = half / np.maximum(whole, 1e-12)
        in_layers, load_s, update_s, step_s = (
            typical(values)
            for values in (
                (both.sum(axis=2) @ counts).tolist(),
                seen.load_s,
                seen.update_s,
                seen.untraced_s,
            )
        )
        # Each layer's slow moments were left out apart; a step has some of them each time.
        mean *= in_layers / max(float(counts @ whole), 1e-12)
        besides = step_s - load_s - update_s - in_layers
        graph = state.model.plan.graph
        sample = sample_bytes(graph.inputs, state.stepper.dtype.itemsize)
        return LayersMeasured(
            self.rows,
            np.concatenate([mean, error[:, None]], axis=1).astype(np.float32),
            load_s,
            update_s,
            besides,
            self.rows * sample,
            sum(parameter.nbytes for parameter in state.model.trainable().values()),
            len(seen.layers),
            np.stack(seen.parts[-_KEPT:]).astype(np.float32),
        )
