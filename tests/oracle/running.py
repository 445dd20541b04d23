"""Runs of the library on ranks, as a session has them, and what every step of them leaves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from workbench.comm.groups.world import RankConfig
from workbench.plan.experiment.experiment import Experiment
from workbench.store.messages import StopRequest, TrainingOutcome
from workbench.train.run import loop as session
from workbench.train.run.loop import Loop
from workbench.train.step.loss import own_rows

# Of a collective, and of an attempt: far more than any needs, and a hang is a failure.
TIMEOUT_S, LIMIT_S = 20.0, 60.0


@dataclass(frozen=True)
class Seen:
    """What one rank holds after one step: copies.

    Attributes:
        step: its index.
        rows: of each rank, of the last micro-batch.
        outputs: of the last micro-batch, this rank's rows.
        gradients: before the update, unscaled, of this rank's pieces; None where there is none.
        pieces: of weights and buffers, after the update.
        state: of the optimizer, by entry.
        loss: of the whole batch.
        evaluation: on the test rows; None where it was not made.
        scale: of the loss, of the next step, and updates since it moved; None: there is none.
    """

    step: int
    rows: tuple[int, ...]
    outputs: tuple[Tensor, ...]
    gradients: dict[str, Tensor | None]
    pieces: dict[str, Tensor]
    state: dict[str, Tensor]
    loss: float
    evaluation: dict[str, float] | None
    scale: tuple[float, ...] | None


@dataclass(frozen=True)
class Leg:
    """One attempt of a run.

    Attributes:
        experiment: what runs.
        weights: the file that it starts from.
        directory: of the run.
        resume: a checkpoint to go on from.
        stop: whether to ask for an end before the first step.
    """

    experiment: Experiment
    weights: Path
    directory: Path
    resume: Path | None = None
    stop: bool = False


def trained(config: RankConfig, leg: Leg) -> tuple[list[Seen], TrainingOutcome]:
    """One rank's part of an attempt, through `train` itself."""
    torch.set_num_threads(1)
    seen: list[Seen] = []

    class Watched(Loop):
        """Keeps what each step leaves."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.emitted, self.emit = self.emit, self.looked
            self.of_step: dict[str, Any] = {}

        def _step(self, step: int) -> Any:
            stepper = self.state.stepper
            with patch.object(stepper, "run", self.looking(stepper.run)):
                return super()._step(step)

        def looking(self, run: Callable[[int], Any]) -> Callable[[int], Any]:
            def looked(step: int) -> Any:
                scaling = self.state.updater.scaling
                scale = 1.0 if scaling is None else scaling.scale
                result = run(step)
                model = self.state.model
                with torch.no_grad():
                    outputs = tuple(
                        copied(own_rows(model, name, output))
                        for name, output in zip(
                            model.plan.graph.outputs, result.outputs, strict=True
                        )
                    )
                self.of_step = dict(
                    step=step,
                    rows=model.context.rows,
                    outputs=outputs,
                    gradients={
                        name: None if p.grad is None else copied(p.grad) / scale
                        for name, p in model.trainable().items()
                    },
                )
                return result

            return looked

        def looked(self, row: Any) -> None:
            model, updater = self.state.model, self.state.updater
            known = updater.remembered.items()
            wanted = {f"optimizer/{s}/{n}" for n, one in known for s in one.names}
            evaluated = row["accuracy"] == row["accuracy"]
            seen.append(
                Seen(
                    **self.of_step,
                    pieces={n: copied(p) for n, p in model.pieces().items()},
                    state={n: copied(t) for n, t in updater.state(wanted).items()},
                    loss=row["loss"],
                    evaluation=dict(self.evaluation) if evaluated else None,
                    scale=None
                    if updater.scaling is None
                    else tuple(updater.scaling.state().tolist()),
                )
            )
            self.emitted(row)

    with patch.object(session, "Loop", Watched):
        outcome = session.train(
            config,
            leg.experiment,
            weights=leg.weights,
            directory=leg.directory,
            resume=leg.resume,
            control=StopRequest(stop_requested=leg.stop),
            emit=lambda row: None,
        )
    return seen, outcome


def copied(tensor: Tensor) -> Tensor:
    """Of its own memory, on the host."""
    return tensor.detach().cpu().clone()


Ranks = Callable[..., list[Any]]


def on(ranks: Ranks, leg: Leg) -> tuple[list[list[Seen]], TrainingOutcome]:
    """An attempt on all its ranks: what each step left, [step][rank], and how it ended."""
    answers: Sequence[tuple[list[Seen], TrainingOutcome]] = ranks(
        leg.experiment.plan.world_size, trained, leg, timeout_s=TIMEOUT_S, limit_s=LIMIT_S
    )
    steps = [list(step) for step in zip(*(seen for seen, _ in answers), strict=True)]
    return steps, answers[0][1]
