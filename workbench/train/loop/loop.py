"""Step after step on one rank: agree, update, report, save."""

import math
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

from workbench.comm.collectives import all_reduce
from workbench.comm.groups.group import Group
from workbench.comm.groups.record import Givers
from workbench.plan.experiment import Experiment
from workbench.plan.metrics import Row
from workbench.plan.plan import Plan
from workbench.store.outcome import Control, Outcome, Reason
from workbench.train.checkpoint.parts import parts
from workbench.train.checkpoint.saver import Saver
from workbench.train.checkpoint.statistics import average_statistics
from workbench.train.loop.blame import first_bad_layer
from workbench.train.loop.equality import check_equal
from workbench.train.loop.evaluate import evaluate
from workbench.train.loop.learning_rates import LearningRates, set_rate
from workbench.train.loop.memory import PeakMeter
from workbench.train.loop.metrics import step_row
from workbench.train.loop.state import RankState
from workbench.train.loop.step import StepResult
from workbench.train.reshard.replanning import recut_bytes, under
from workbench.train.reshard.requests import CarriedOut, LearningRate, RunRequests, SaveNow
from workbench.train.trace.traces import Traces


@dataclass(frozen=True)
class Agreed:
    """What all ranks know of a step before anybody updates.

    Attributes:
        loss: mean over the batch.
        stop: whether to stop after it.
        wish: number of the last wish.
        blocked_s: seconds that each rank was blocked in collectives.
    """

    loss: float
    stop: bool
    wish: int
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
    """Trains to the end, or until somebody asks to stop, or until the loss is no number.

    Args:
        state: this rank's part.
        rates: of the run so far.
        meter: of its tensors.
        directory: where checkpoints go.
        control: wishes of the outside.
        emit: receives one row a step.
    """

    def __init__(
        self,
        state: RankState,
        rates: LearningRates,
        meter: PeakMeter,
        directory: Path,
        control: Control,
        emit: Callable[[Row], None],
    ) -> None:
        self.state, self.meter, self.directory = state, meter, directory
        self.control, self.emit = control, emit
        self.saver = Saver(directory, state.everyone)
        self.evaluation: dict[str, float] = {}
        self._givers, self._num_counted = Givers(), 0
        self._compared = -1  # the steps after which ranks were last compared
        self.wishes = RunRequests(directory)
        self._heard = self.wishes.last_carried_out()  # by an earlier session
        self._rates = rates
        every = state.experiment.trace_every
        self.traces = Traces(directory, state.world.rank, every, state.tracer)

    def run(self) -> Outcome:
        """Trains; every rank returns after the same step, for the same reason."""
        try:
            return self._run()
        finally:
            self.saver.close()

    def _run(self) -> Outcome:
        experiment = self.state.experiment
        for step in range(self.state.first_step, experiment.steps):
            taken = self._step(step)
            if taken.bad is not None:
                return self._diverged(step, taken.bad)
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
            if last or _due(done, experiment.evaluate_every):
                self._compare(done)
                self.evaluation = self._evaluate()
                row["accuracy"] = self.evaluation["accuracy"]
            self.emit(row)
            if last or stop or _due(done, experiment.checkpoint_every):
                self._save(done)
            if stop and not last:
                return self._outcome("stopped", done)
            if taken.agreed.wish > self._heard and not last:
                self._hear(taken.agreed.wish, done)
        return self._outcome("finished", max(experiment.steps, self.state.first_step))

    def _step(self, step: int) -> "_Taken":
        """One step; what it computed with is gone when it returns, unless it came to no number."""
        state, recorder = self.state, self.state.world.recorder
        before = recorder.received_bytes
        set_rate(state.updater.optimizer, self._rates.at(step))
        recorder.givers = self._givers
        with self.traces.around(step):
            began = time.perf_counter()
            result = state.stepper.run(step)
            agreed = agree(
                state.everyone,
                result.loss,
                self.control.stop_requested,
                result.blocked_s,
                self.wishes.newest() if state.world.rank == 0 else 0,
            )
            self.traces.agreed(tuple(batch.rows for batch in result.batches))
            bad = None if math.isfinite(agreed.loss) else result
            if bad is None:
                state.strategy.update(step)
            seconds = time.perf_counter() - began
        recorder.givers = None
        self._num_counted += 1
        received = recorder.received_bytes - before
        return _Taken(agreed, result.samples, seconds, received, bad)

    def _hear(self, newest: int, done: int) -> None:
        """Carries out what was wished for meanwhile; of plans, the last."""
        graph = self.state.experiment.plan.graph
        numbers = range(self._heard + 1, newest + 1)
        waiting = {number: self.wishes.read(number, graph) for number in numbers}
        plans = [number for number, wish in waiting.items() if isinstance(wish, Plan)]
        self._heard = newest
        for number, wish in waiting.items():
            match wish:
                case LearningRate(value):
                    self._rates, found = self._rates.then(done, value)
                    self._carried_out(number, found)
                case SaveNow():
                    began = time.perf_counter()
                    self._save(done)
                    self.saver.finish()
                    self._carried_out(number, CarriedOut(done, time.perf_counter() - began))
                case Plan() if number == plans[-1]:
                    self._replan(number, wish, done)

    def _carried_out(self, number: int, found: CarriedOut) -> None:
        if self.state.everyone.rank == 0:
            self.wishes.carry_out(number, found)

    def _replan(self, number: int, plan: Plan, done: int) -> None:
        """Goes on under another plan."""
        state, began = self.state, time.perf_counter()
        everyone, recorder = state.everyone, state.world.recorder
        shared, received = state.world.shared_bytes, recut_bytes(recorder)
        self.state = under(state, plan, done)
        del state  # the old pieces go before the next step
        self.meter.add(self.state.world.shared_bytes - shared)
        self.traces.restart(self.state.tracer)
        mine = torch.zeros(everyone.size, 2, dtype=torch.float64)
        mine[everyone.rank, 0] = recut_bytes(recorder) - received
        mine[everyone.rank, 1] = time.perf_counter() - began
        every = all_reduce(mine, everyone, layer="recut")
        moved = tuple(int(size) for size in every[:, 0].tolist())
        self._carried_out(number, CarriedOut(done, every[:, 1].max().item(), moved))

    def _diverged(self, step: int, result: StepResult) -> Outcome:
        """Leaves the weights as they were before the step, and says where the NaN arose."""
        batch = result.batches[-1]
        state = self.state
        state.model.context.set(batch.rows, first_row=batch.first_row, step=step)
        layer = first_bad_layer(state.model, batch.images, state.everyone)
        self.saver.finish()
        kept = f"; the last checkpoint is {self.saver.newest}" if self.saver.newest else ""
        state.strategy.rest()
        message = f"the loss became {result.loss} at step {step}, first in {layer}{kept}"
        return self._outcome("diverged", step, message)

    def _evaluate(self) -> dict[str, float]:
        state = self.state
        return evaluate(
            state.model,
            state.test_data,
            state.experiment.batch_size,
            state.everyone,
            state.world.device,
            state.stepper.dtype,
        )

    def _compare(self, done: int) -> None:
        """Raises if ranks that are to hold the same weights do not; once a step is enough."""
        if done != self._compared and self.state.strategy.is_settled:
            check_equal(self.state.model, self.state.everyone, done)
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
        self.saver.begin(done, part, files, self._as_it_is(done))

    def _as_it_is(self, done: int) -> Experiment:
        """The experiment, with the learning rate of the next step."""
        experiment = self.state.experiment
        rated = experiment.optimizer.model_copy(update={"lr": self._rates.at(done)})
        return experiment.replace(optimizer=rated)

    def _outcome(self, reason: Reason, step: int, message: str = "") -> Outcome:
        self.saver.finish()
        return Outcome(
            reason,
            step,
            None if self.saver.newest is None else str(self.saver.newest),
            self.evaluation,
            message,
            tuple(astuple(row) for row in self.state.world.recorder.rows()),
            tuple(self.state.notes),
            self._givers.rows(),
            self._num_counted,
        )


def agree(everyone: Group, loss: float, stop: bool, blocked_s: float, wish: int = 0) -> Agreed:
    """What all ranks must know before anybody updates; one small all-reduce.

    Args:
        everyone: all ranks.
        loss: this rank's part of the mean loss.
        stop: whether this rank was asked to stop; a wish of any rank stops all of them after
            the same step.
        blocked_s: seconds that this rank was blocked in collectives.
        wish: number of the last wish; 0 on all ranks but one.
    """
    status = torch.zeros(3 + everyone.size, dtype=torch.float64)
    status[0], status[1], status[2], status[3 + everyone.rank] = loss, float(stop), wish, blocked_s
    status = all_reduce(status, everyone, layer="status")
    loss, stopping, number, *every = status.tolist()
    return Agreed(loss, bool(stopping), int(number), tuple(every))


def _due(done: int, every: int | None) -> bool:
    return every is not None and done % every == 0
