"""When ranks exchange gradients or parameters, and when their optimizers move."""

from collections.abc import Collection, Sequence
from typing import Protocol

from torch import Tensor

from workbench.comm.groups.group import Group
from workbench.layers.cut_model import CutModel
from workbench.plan.experiment.experiment import LocalSGD, ParameterServer, Pipelined
from workbench.program.buckets import Bucket
from workbench.program.instructions import Instruction, ZeroGrad
from workbench.program.step import RankProgram
from workbench.train.checkpoint.in_flight import InFlight, Residuals
from workbench.train.loop.passes import Action
from workbench.train.strategies.clipping import Clipping
from workbench.train.strategies.local_sgd import LocalUpdates
from workbench.train.strategies.optimizer import ServingUpdater, ShardedUpdater, Updater
from workbench.train.strategies.pipelined import PipelinedUpdates, drain, stays_in_flight
from workbench.train.strategies.scheduling import Schedule
from workbench.train.strategies.synchronous import ImmediateStrategy, SynchronousUpdates


class Strategy(Protocol):
    """What a rank does at those instructions of its program that turn gradients into updates."""

    def program(self, step: int) -> RankProgram:
        """What a step executes, if all of its rows are there."""
        ...

    def bound(self, instruction: Instruction) -> Action:
        """What is done at an instruction of this program.

        Raises:
            OutOfOrder: the strategy's steps have no such instruction.
        """
        ...

    def reducing(self, buckets: Sequence[Bucket]) -> Action:
        """What begins to sum these buckets, at their own place in the list."""
        ...

    def expecting(self, names: Collection[str], buckets: Sequence[Bucket]) -> Action | None:
        """What is to be done before a backward pass in which sums may begin.

        Args:
            names: the parameters that get no more gradients after it, before they are summed.
            buckets: the buckets that may begin to be summed, in their order.
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


class OwnGradients(ImmediateStrategy):
    """Every rank keeps its own gradients, and moves nothing: for measuring.

    Args:
        strategy: the strategy whose memory gradients are left in.
    """

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(strategy.program(0))
        self._strategy = strategy

    def bound(self, instruction: Instruction) -> Action:
        if isinstance(instruction, ZeroGrad):
            return self._strategy.bound(instruction)
        return lambda _: None

    def reducing(self, buckets: Sequence[Bucket]) -> Action:
        return lambda _: None

    @property
    def buffers(self) -> list[Tensor]:
        return self._strategy.buffers


def updater_of(program: RankProgram, model: CutModel, everyone: Group | None = None) -> Updater:
    """Moves a rank's weights, as its experiment's strategy wants it.

    Args:
        program: what this rank executes.
        model: this rank's part.
        everyone: all ranks, who agree on how much gradients are clipped; None: they are not.
    """
    updater, experiment = _plain(program, model), program.program.experiment
    if experiment.schedule is not None:
        updater.schedule = Schedule(experiment)
    if experiment.ema is not None:
        updater.average(experiment.ema)
    if everyone is not None and (experiment.clip_norm or experiment.clip_value):
        updater.clipping = Clipping(experiment.clip_norm, experiment.clip_value, everyone)
    return updater


def _plain(program: RankProgram, model: CutModel) -> Updater:
    experiment = program.program.experiment
    if isinstance(experiment.sync, ParameterServer):
        return ServingUpdater(experiment.optimizer, model, experiment.sync.server)
    if not experiment.shard_optimizer:
        return Updater(experiment.optimizer, model, model.trainable())
    return ShardedUpdater.over_replicas(program, model, experiment.optimizer_shares)


def strategy_of(
    program: RankProgram,
    model: CutModel,
    updater: Updater,
    first_step: int = 0,
    left: Sequence[InFlight] = (),
    notes: list[str] | None = None,
) -> Strategy:
    """The strategy that an experiment's `sync` names.

    Args:
        program: what this rank executes.
        model: this rank's part.
        updater: the updater of its pieces.
        first_step: the step that this session begins with.
        left: what was in flight before it, under whatever strategy, the oldest first, and on
            whatever device. What has no place in this one's pipeline moves the weights now.
        notes: takes what people should know of steps that were unlike others.
    """
    notes, sync = [] if notes is None else notes, program.program.experiment.sync
    left = [each.beside(model.trainable()) for each in left]
    spare = max(0, len(left) - stays_in_flight(sync, first_step))
    if isinstance(sync, Pipelined) and sync.width > 1:
        drain(left[:spare], model, updater.move, notes)
        return PipelinedUpdates(program, model, updater, first_step, left[spare:], notes)
    if isinstance(sync, LocalSGD):
        drain(left[:spare], model, updater.move, notes)
        return LocalUpdates(program, model, updater)
    strategy = SynchronousUpdates(program, model, updater)
    drain(left[:spare], model, strategy.move, notes)
    return strategy
