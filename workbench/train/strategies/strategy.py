"""When ranks exchange gradients or parameters, and when their optimizers move."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from workbench.layers.cut_model import CutModel
from workbench.plan.experiment import (
    Experiment,
    LocalSGD,
    ParameterServer,
    Pipelined,
    Synchronous,
)
from workbench.train.checkpoint.in_flight import InFlight
from workbench.train.checkpoint.residuals import Residuals
from workbench.train.strategies.local_sgd import LocalUpdates
from workbench.train.strategies.optimizer import Updater
from workbench.train.strategies.parameter_server import ServedUpdates, ServingUpdater
from workbench.train.strategies.per_round import PerRoundUpdates, weights_behind
from workbench.train.strategies.pipelined import (
    PipelinedUpdates,
    as_synchronous,
    drain,
    stays_in_flight,
)
from workbench.train.strategies.sharded import ShardedUpdater
from workbench.train.strategies.synchronous import SynchronousUpdates


class Strategy(Protocol):
    """One way to turn backward passes into updates.

    A step is `begin`, any number of backward passes with `last` before the last of them,
    `finish`, and `update`, unless the loss was no number.
    """

    def begin(self) -> None:
        """Forgets the last step's gradients."""
        ...

    def last(self) -> None:
        """No parameter gets more gradients than from the passes under way."""
        ...

    def after_round(self, rows: int, samples: int) -> None:
        """The tail's backward pass of one round is done.

        Args:
            rows: of the round over all ranks.
            samples: of the step over all ranks.
        """
        ...

    def finish(self, rows: tuple[int, ...]) -> None:
        """Makes every gradient what the optimizer is to see.

        Args:
            rows: of the whole step on each rank of the world.
        """
        ...

    def update(self, step: int) -> None:
        """Moves the weights.

        Args:
            step: index of the step.
        """
        ...

    def settle(self) -> None:
        """Makes weights and optimizer state equal on all ranks that hold the same piece."""
        ...

    @property
    def is_settled(self) -> bool:
        """Whether all ranks that hold the same piece of a weight are to have the same now."""
        ...

    def rest(self) -> None:
        """Waits until nothing travels any more, whatever comes of it; moves no weights."""
        ...

    @property
    def in_flight(self) -> list[InFlight]:
        """What has been computed and will be used in later steps; sums once it has settled."""
        ...

    @property
    def residuals(self) -> Residuals:
        """What its codec has left out so far, of as many sums on all ranks; to be added to."""
        ...

    @property
    def buffers(self) -> list[Tensor]:
        """What it keeps from step to step, for the account of memory."""
        ...


def updater_of(experiment: Experiment, model: CutModel) -> Updater:
    """Moves a rank's weights, as an experiment's strategy wants it."""
    value, sync = experiment.optimizer, experiment.sync
    if isinstance(sync, ParameterServer):
        return ServingUpdater(value, model, sync.server)
    if not experiment.shard_optimizer:
        return Updater(value, model, model.trainable())
    every = set(model.trainable())
    behind = weights_behind(model.plan) if isinstance(sync, Synchronous) and sync.per_round else ()
    apart = [every.difference(behind), every.intersection(behind)]
    shares = experiment.optimizer_shares
    fused = experiment.fused
    return ShardedUpdater.over_replicas(value, model, sync.bucket_bytes, apart, shares, fused=fused)


def strategy_of(
    experiment: Experiment,
    model: CutModel,
    updater: Updater,
    first_step: int = 0,
    left: Sequence[InFlight] = (),
    notes: list[str] | None = None,
) -> Strategy:
    """The strategy that an experiment's `sync` names.

    Args:
        experiment: what runs.
        model: this rank's part.
        updater: of its pieces.
        first_step: that this session begins with.
        left: what was in flight before it, under whatever strategy, the oldest first, and on
            whatever device. What has no place in this one's pipeline moves the weights now.
        notes: takes what people should know of steps that were unlike others.
    """
    notes = [] if notes is None else notes
    left = [each.beside(model.trainable()) for each in left]
    spare = max(0, len(left) - stays_in_flight(experiment.sync, first_step))
    if isinstance(experiment.sync, ParameterServer):
        served = ServedUpdates(experiment.sync, model, updater)
        drain(left[:spare], model, served.move, notes)
        return served
    drain(left[:spare], model, updater.step, notes)
    match experiment.sync:
        case Pipelined(width=1) as sync:
            return SynchronousUpdates(as_synchronous(sync), model, updater)
        case Pipelined() as sync:
            return PipelinedUpdates(sync, model, updater, first_step, left[spare:], notes)
        case Synchronous(per_round=True) as sync:
            return PerRoundUpdates(sync, model, updater)
        case Synchronous() as sync:
            return SynchronousUpdates(sync, model, updater)
        case LocalSGD() as sync:
            return LocalUpdates(sync, experiment.optimizer, model, updater.optimizer)
