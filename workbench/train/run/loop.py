"""Runs an experiment on one rank, from the first slice of the weights to the last checkpoint.

Step after step ranks compute, agree, update, report and save. Where the loss is no number, they
look for the layer that first gave one.
"""

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.fx
from torch import Tensor

from workbench.comm.all_reduce import all_reduce
from workbench.comm.collectives import all_gather
from workbench.comm.groups.group import Group
from workbench.comm.groups.world import RankConfig, World
from workbench.comm.messages.recorder import BytesBySender
from workbench.layers.cut_model import CutModel
from workbench.plan.experiment.checks import LEAST_SCALE
from workbench.plan.experiment.experiment import Experiment
from workbench.plan.experiment.metrics import Row
from workbench.plan.extension.user_object import opened
from workbench.plan.placement.placement import Shard
from workbench.plan.plans.plan import Plan
from workbench.store.messages import EndReason, StopRequest, TrainingOutcome
from workbench.store.run_folder import Best, add_evaluation
from workbench.train.checkpoint.saver import Saver, parts
from workbench.train.run.equality import check_equal
from workbench.train.run.memory import PeakMeter, step_row
from workbench.train.run.rank import RankState, group_specs_of
from workbench.train.run.requests import (
    CarriedOut,
    LearningRate,
    LearningRates,
    RunRequests,
    SaveNow,
)
from workbench.train.run.reshard import resharded_bytes, under
from workbench.train.run.scoring import evaluate
from workbench.train.step.executor import StepResult
from workbench.train.step.loss import average_statistics
from workbench.train.trace.tracer import Traces


def first_bad_layer(model: CutModel, inputs: Sequence[Tensor], world: Group) -> str:
    """Runs the forward pass once more and names the first layer with a NaN or infinity.

    It is "the data" where the inputs have one, and "the loss" where every layer gives numbers.
    Every rank takes part, since the forward pass communicates; all get the same answer.
    """
    nodes = list(model.traced.graph.nodes)
    watch = _Watch(model.traced)
    with torch.no_grad():
        watch.run(*inputs)
    mine = len(nodes) if watch.first is None else nodes.index(watch.first)
    every = all_gather(torch.tensor([mine]), Shard(0, (1,) * world.size), world, layer="blame")
    first = int(every.min())
    if first == len(nodes):
        return "the loss"
    if nodes[first].op == "placeholder":
        return "the data"
    by_node, name = {layer.node: layer.name for layer in model.plan.graph.layers}, nodes[first].name
    return f"layer {by_node.get(name, name)!r}"


class _Watch(torch.fx.Interpreter):
    first: torch.fx.Node | None = None

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        if self.first is None and isinstance(value, Tensor) and not torch.isfinite(value).all():
            self.first = n
        return value


@dataclass(frozen=True)
class Agreed:
    """What all ranks know of a step before anybody updates.

    Attributes:
        blocked_s: seconds that each rank was blocked in collectives.
    """

    loss: float
    stop: bool
    request: int
    blocked_s: tuple[float, ...]


@dataclass(frozen=True)
class _Taken:
    """One step that was taken; what it left on this rank, if the loss is no number, is `bad`."""

    agreed: Agreed
    samples: int
    seconds: float
    received_bytes: int
    bad: StepResult | None


class Loop:
    """Trains to the end, or until somebody asks to stop, or until the loss is no number."""

    def __init__(
        self,
        state: RankState,
        rates: LearningRates,
        meter: PeakMeter,
        directory: Path,
        control: StopRequest,
        emit: Callable[[Row], None],
    ) -> None:
        self.state, self.meter, self.directory = state, meter, directory
        self.control, self.emit = control, emit
        self.saver = Saver(directory, state.everyone, renew=control.renew)
        self.evaluation: dict[str, float] = {}
        by = state.experiment.keep_best
        self._best = Best() if by is None else Best.of(directory, by, state.first_step)
        self._by_sender, self._num_counted = BytesBySender(), 0
        self._compared = -1  # the steps after which ranks were last compared
        self.requests = RunRequests(directory)
        self._heard = self.requests.last_carried_out()  # by an earlier session
        self._rates = rates
        every = state.experiment.trace_every
        self.traces = Traces(directory, state.world.rank, every, state.tracer)

    def run(self) -> TrainingOutcome:
        """Trains; every rank returns after the same step, for the same reason."""
        try:
            return self._run()
        finally:
            self.state.stepper.feed.close()
            self.saver.close()

    def _run(self) -> TrainingOutcome:
        experiment, scaling = self.state.experiment, self.state.updater.scaling
        for step in range(self.state.first_step, experiment.steps):
            taken = self._step(step)
            if taken.bad is not None:
                return self._diverged(step, taken.bad)
            if scaling is not None and scaling.is_spent:
                return self._spent(step, scaling.scale)
            row = step_row(
                step=step,
                rank=self.state.world.rank,
                loss=taken.agreed.loss,
                samples=taken.samples,
                seconds=taken.seconds,
                blocked_s=taken.agreed.blocked_s,
                meter=self.meter,
                received_bytes=taken.received_bytes,
                held=self.state.held(),
                beside_bytes=self.state.world.staged_bytes,
                device=self.state.world.device,
            )
            done, stop = step + 1, taken.agreed.stop
            last = done == experiment.steps
            if last:
                self.state.strategy.settle()
            if done == self.state.first_step + 1:
                self._compare(done)
            is_best = False
            if last or _due(done, experiment.evaluate_every):
                self._compare(done)
                self.evaluation = self._evaluate(done)
                is_best = self._is_best(done)
                row["accuracy"] = self.evaluation.get("accuracy", math.nan)
            self.emit(row)
            if last or stop or is_best or _due(done, experiment.checkpoint_every):
                self._save(done)
            if stop and not last:
                return self._outcome("stopped", done)
            if taken.agreed.request > self._heard and not last:
                self._hear(taken.agreed.request, done)
        return self._outcome("finished", max(experiment.steps, self.state.first_step))

    def _step(self, step: int) -> "_Taken":
        """One step; what it computed with is gone when it returns, unless it came to no number."""
        state, recorder = self.state, self.state.world.recorder
        before = recorder.received_bytes
        state.updater.lr = self._rates.at(step)
        recorder.by_sender = self._by_sender
        with self.traces.around(step):
            began = time.perf_counter()
            result = state.stepper.run(step)
            agreed = agree(
                state.everyone,
                result.loss,
                self.control.stop_requested,
                result.blocked_s,
                self.requests.newest() if state.world.rank == 0 else 0,
            )
            self.traces.agreed(tuple(batch.rows for batch in result.batches))
            bad = None if math.isfinite(agreed.loss) else result
            if bad is None:
                state.stepper.update()
            seconds = time.perf_counter() - began
        recorder.by_sender = None
        self._num_counted += 1
        received = recorder.received_bytes - before
        return _Taken(agreed, result.samples, seconds, received, bad)

    def _hear(self, newest: int, done: int) -> None:
        """Carries out what was requested meanwhile; of plans, the last."""
        graph = self.state.experiment.plan.graph
        numbers = range(self._heard + 1, newest + 1)
        waiting = {number: opened(self.requests.read(number, graph)) for number in numbers}
        plans = [number for number, request in waiting.items() if isinstance(request, Plan)]
        self._heard = newest
        for number, request in waiting.items():
            match request:
                case LearningRate(value):
                    self._rates, found = self._rates.then(done, value)
                    self._carried_out(number, found)
                case SaveNow():
                    began = time.perf_counter()
                    self._save(done)
                    self.saver.finish()
                    self._carried_out(number, CarriedOut(done, time.perf_counter() - began))
                case Plan() if number == plans[-1]:
                    self._replan(number, request, done)

    def _carried_out(self, number: int, found: CarriedOut) -> None:
        if self.state.everyone.rank == 0:
            self.requests.carry_out(number, found)

    def _replan(self, number: int, plan: Plan, done: int) -> None:
        state, began = self.state, time.perf_counter()
        everyone, recorder = state.everyone, state.world.recorder
        shared, received = state.world.shared_bytes, resharded_bytes(recorder)
        self.state = under(state, plan, done)
        self.traces.restart(self.state.tracer)
        del state
        gc.collect()  # it is in cycles: its pieces, and its buffers in shared memory, go now
        self.meter.add(self.state.world.shared_bytes - shared)
        mine = torch.zeros(everyone.size, 2, dtype=torch.float64)
        mine[everyone.rank, 0] = resharded_bytes(recorder) - received
        mine[everyone.rank, 1] = time.perf_counter() - began
        every = all_reduce(mine, everyone, layer="reshard")
        moved = tuple(int(size) for size in every[:, 0].tolist())
        self._carried_out(number, CarriedOut(done, every[:, 1].max().item(), moved))

    def _diverged(self, step: int, result: StepResult) -> TrainingOutcome:
        """Leaves the weights as they were before the step, and says where the NaN arose."""
        batch = result.batches[-1]
        state = self.state
        state.model.context.set(batch.rows, first_row=batch.first_row, step=step)
        layer = first_bad_layer(state.model, batch.inputs, state.everyone)
        state.strategy.rest()
        return self._ended(step, f"the loss became {result.loss} at step {step}, first in {layer}")

    def _spent(self, step: int, scale: float) -> TrainingOutcome:
        """Ends after a step whose gradients were no numbers, though nearly nothing scaled them."""
        return self._ended(
            step,
            f"gradients of step {step} were no numbers, and the loss scale fell to {scale:g}, "
            f"below {LEAST_SCALE:g}: fp16 holds them at no scale; set precision='bf16', or 'fp32' "
            "to see whether they are numbers at all",
        )

    def _ended(self, step: int, why: str) -> TrainingOutcome:
        """Diverged: what is kept is from before."""
        self.saver.finish()
        kept = f"; the last checkpoint is {self.saver.newest}" if self.saver.newest else ""
        return self._outcome("diverged", step, why + kept)

    def _evaluate(self, done: int) -> dict[str, float]:
        state = self.state
        if state.test_data is None:
            return {}
        with state.updater.averaged():
            found = evaluate(
                state.model,
                state.test_data,
                state.experiment.batch_size,
                state.everyone,
                state.world.device,
                state.stepper.dtype,
                state.scoring,
                state.world.excused,
            )
        bad = [f"{name} was {value}" for name, value in found.items() if not math.isfinite(value)]
        if bad:
            state.notes.append(f"evaluated after step {done}: {', '.join(bad)}")
        return found

    def _is_best(self, done: int) -> bool:
        """Keeps what was evaluated; says whether it is the best so far, where that is asked."""
        if self.evaluation and self.state.everyone.rank == 0:
            add_evaluation(self.directory, done, self.evaluation)
        by, before = self.state.experiment.keep_best, self._best
        if by is not None:
            self._best = before.then(done, self.evaluation, by)
        return self._best is not before

    def _compare(self, done: int) -> None:
        """Raises if ranks that are to hold the same weights do not; once a step is enough."""
        if done != self._compared and self.state.strategy.is_settled:
            check_equal(self.state.model, self.state.everyone, done, self.state.experiment.sync)
            self._compared = done

    def _save(self, done: int) -> None:
        state = self.state
        state.strategy.settle()
        self._compare(done)
        average_statistics(state.model)
        part, files = parts(
            done,
            state.model,
            state.updater,
            in_flight=state.strategy.in_flight,
            residuals=state.strategy.residuals,
        )
        self.saver.begin(done, part, files, self._as_it_is(done), self._best.done)

    def _as_it_is(self, done: int) -> Experiment:
        """The experiment, with the learning rate that is asked for; a schedule starts from it."""
        return self.state.experiment.at_rate(self._rates.at(done))

    def _outcome(self, reason: EndReason, step: int, message: str = "") -> TrainingOutcome:
        self.saver.finish()
        scaling, notes = self.state.updater.scaling, list(self.state.notes)
        if scaling is not None and scaling.skipped:
            notes.append(scaling.note)
        return TrainingOutcome(
            reason,
            step,
            None if self.saver.newest is None else str(self.saver.newest),
            self.evaluation,
            message,
            tuple(astuple(row) for row in self.state.world.recorder.rows()),
            tuple(notes),
            self._by_sender.rows(),
            self._num_counted,
        )


def agree(everyone: Group, loss: float, stop: bool, blocked_s: float, request: int = 0) -> Agreed:
    """What all ranks must know before anybody updates; one small all-reduce.

    Args:
        stop: whether this rank was asked to stop; a request of any rank stops all of them after the
            same step.
        request: the number of the last request; 0 on all ranks but one.
    """
    status = torch.zeros(3 + everyone.size, dtype=torch.float64)
    status[0], status[1], status[2], status[3 + everyone.rank] = (
        loss,
        float(stop),
        request,
        blocked_s,
    )
    status = all_reduce(status, everyone, layer="status")
    loss, stopping, number, *every = status.tolist()
    return Agreed(loss, bool(stopping), int(number), tuple(every))


def _due(done: int, every: int | None) -> bool:
    return every is not None and done % every == 0


def train(
    config: RankConfig,
    experiment: Experiment,
    *,
    weights: Path,
    directory: Path,
    resume: Path | None = None,
    control: StopRequest,
    emit: Callable[[Row], None],
) -> TrainingOutcome:
    """Trains on one rank until the last step, a request to stop, or a loss that is no number.

    Every rank ends at the same step and, unless it diverged, leaves a checkpoint.

    Args:
        experiment: what to run, unless the run in `directory` went on under another plan since.
        resume: a checkpoint, under any plan of this model, to go on from.

    Raises:
        CommError: a rank did not arrive, or died.
        CheckpointError: weights or checkpoint are damaged or of another model.
        ReplicasDiffer: ranks that hold the same weights do not have the same bits of them any more.
    """
    requests = RunRequests(directory)
    experiment = opened(requests.in_force(experiment))
    rates = LearningRates.of(experiment.optimizer.lr, requests)
    with (
        PeakMeter(torch.device(config.device)) as meter,
        World.open(config, control.renew) as world,
    ):
        groups = world.groups(group_specs_of(experiment.plan))
        # Not in a variable, which would keep the first state when a re-cut has made another.
        loop = Loop(
            RankState.start(experiment, world, groups, weights, resume, rates),
            rates,
            meter,
            directory,
            control,
            emit,
        )
        meter.add(world.shared_bytes)
        return loop.run()
