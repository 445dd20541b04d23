"""Step after step on one rank: agree, update, report, save."""

import math
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

from workbench.comm.collectives import all_reduce
from workbench.comm.group import Group
from workbench.train import checkpoint
from workbench.train.blame import first_bad_layer
from workbench.train.control import Control, Outcome, Reason
from workbench.train.evaluate import evaluate
from workbench.train.memory import PeakMeter
from workbench.train.metrics import Row, step_row
from workbench.train.state import RankState
from workbench.train.statistics import average_statistics
from workbench.train.step import StepResult
from workbench.train.traces import Traces


@dataclass(frozen=True)
class _Taken:
    """One step that was taken; what it left on this rank, if the loss is no number, is `bad`."""

    loss: float
    stop: bool
    samples: int
    seconds: float
    blocked_s: tuple[float, ...]
    bad: StepResult | None


class Loop:
    """Trains to the end, or until somebody asks to stop, or until the loss is no number.

    Args:
        state: this rank's part.
        meter: of its tensors.
        directory: where checkpoints go.
        control: wishes of the outside.
        emit: receives one row a step.
    """

    def __init__(
        self,
        state: RankState,
        meter: PeakMeter,
        directory: Path,
        control: Control,
        emit: Callable[[Row], None],
    ) -> None:
        self.state, self.meter, self.directory = state, meter, directory
        self.control, self.emit = control, emit
        self.checkpoint: Path | None = None
        self.evaluation: dict[str, float] = {}
        every = state.experiment.trace_every
        self.traces = Traces(directory, state.world.rank, every, state.tracer)

    def run(self) -> Outcome:
        """Trains; every rank returns after the same step, for the same reason."""
        experiment = self.state.experiment
        for step in range(self.state.first_step, experiment.steps):
            taken = self._step(step)
            if taken.bad is not None:
                return self._diverged(step, taken.bad)
            row = step_row(
                step=step,
                rank=self.state.world.rank,
                loss=taken.loss,
                samples=taken.samples,
                seconds=taken.seconds,
                blocked_s=taken.blocked_s,
                meter=self.meter,
                tensors=self.state.tensors(),
                beside_bytes=self.state.world.staged_bytes,
                device=self.state.world.device,
            )
            done, stop = step + 1, taken.stop
            last = done == experiment.steps
            if last:
                self.state.strategy.settle()
            if last or _due(done, experiment.evaluate_every):
                self.evaluation = self._evaluate()
                row["accuracy"] = self.evaluation["accuracy"]
            self.emit(row)
            if last or stop or _due(done, experiment.checkpoint_every):
                self._save(done)
            if stop and not last:
                return self._outcome("stopped", done)
        return self._outcome("finished", max(experiment.steps, self.state.first_step))

    def _step(self, step: int) -> "_Taken":
        """One step; what it computed with is gone when it returns, unless it came to no number."""
        state = self.state
        with self.traces.around(step):
            began = time.perf_counter()
            result = state.stepper.run(step)
            wish = self.control.stop_requested
            loss, stop, blocked_s = agree(state.everyone, result.loss, wish, result.blocked_s)
            self.traces.agreed(tuple(batch.rows for batch in result.batches))
            bad = None if math.isfinite(loss) else result
            if bad is None:
                state.strategy.update(step)
            seconds = time.perf_counter() - began
        return _Taken(loss, stop, result.samples, seconds, blocked_s, bad)

    def _diverged(self, step: int, result: StepResult) -> Outcome:
        """Leaves the weights as they were before the step, and says where the NaN arose."""
        batch = result.batches[-1]
        state = self.state
        state.model.context.set(batch.rows, first_row=batch.first_row, step=step)
        layer = first_bad_layer(state.model, batch.images, state.everyone)
        kept = f"; the last checkpoint is {self.checkpoint}" if self.checkpoint else ""
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

    def _save(self, done: int) -> None:
        state = self.state
        state.strategy.settle()
        average_statistics(state.model)
        self.checkpoint = checkpoint.save(
            self.directory,
            done,
            state.model,
            state.updater,
            state.experiment,
            state.everyone,
            in_flight=state.strategy.in_flight,
        )

    def _outcome(self, reason: Reason, step: int, message: str = "") -> Outcome:
        return Outcome(
            reason,
            step,
            None if self.checkpoint is None else str(self.checkpoint),
            self.evaluation,
            message,
            tuple(astuple(row) for row in self.state.world.recorder.rows()),
            tuple(self.state.notes),
        )


def agree(
    everyone: Group, loss: float, stop: bool, blocked_s: float
) -> tuple[float, bool, tuple[float, ...]]:
    """What all ranks must know before anybody updates; one small all-reduce.

    Args:
        everyone: all ranks.
        loss: this rank's part of the mean loss.
        stop: whether this rank was asked to stop; a wish of any rank stops all of them after
            the same step.
        blocked_s: seconds that this rank was blocked in collectives.

    Returns:
        The mean loss, whether to stop, and every rank's blocked seconds.
    """
    status = torch.zeros(2 + everyone.size, dtype=torch.float64)
    status[0], status[1], status[2 + everyone.rank] = loss, float(stop), blocked_s
    status = all_reduce(status, everyone, layer="status")
    return status[0].item(), bool(status[1]), tuple(status[2:].tolist())


def _due(done: int, every: int | None) -> bool:
    return every is not None and done % every == 0
