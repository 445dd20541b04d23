"""What an experiment's strategy does on a rank: when gradients are exchanged, and weights move."""

from collections.abc import Callable, Sequence

from torch import Tensor

from workbench.comm.groups.group import Group
from workbench.layers.cut_model import CutModel
from workbench.plan.experiment.experiment import ParameterServer
from workbench.program.buckets import Bucket
from workbench.program.instructions import Instruction, ZeroGrad
from workbench.program.step import RankProgram
from workbench.train.optimizer.optimizer import ServingUpdater, ShardedUpdater, Updater
from workbench.train.optimizer.rules import Rules
from workbench.train.optimizer.state import Schedule
from workbench.train.step.gradients import Clipping, LossScaling
from workbench.train.step.state import (
    InFlight,
    StepFunction,
    Strategy,
)
from workbench.train.strategy.local_sgd import LocalStrategy
from workbench.train.strategy.pipelined import PipelinedStrategy, drain, stays_in_flight
from workbench.train.strategy.synchronous import SynchronousStrategy


class WarmupStrategy(SynchronousStrategy):
    """Synchronous until a step, then as the strategy wants it.

    Args:
        then: makes the strategy that comes after them.
    """

    def __init__(
        self,
        program: RankProgram,
        model: CutModel,
        updater: Updater,
        until: int,
        then: Callable[[], Strategy],
    ) -> None:
        super().__init__(program, model, updater)
        self._until, self._then = until, then

    def at(self, step: int) -> Strategy:
        return self if step < self._until else self._cooled()

    def _cooled(self) -> Strategy:
        """What the codec has left out is not forgotten; states begin with the weights of now."""
        left_out = self.residuals
        self.close()
        strategy = self._then()
        if self.updater.rules is not None:
            self.updater.rules.begin()
        for mine, before in zip(strategy.residuals, left_out, strict=False):
            for name, piece in before.items():
                mine[name].copy_(piece)
        return strategy


class OwnGradients(Strategy):
    """Every rank keeps its own gradients in a strategy's memory, and moves nothing: to measure."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(strategy.program)
        self._strategy = strategy

    def bound(self, instruction: Instruction) -> StepFunction:
        if isinstance(instruction, ZeroGrad):
            return self._strategy.bound(instruction)
        return lambda _: None

    def reducing(self, buckets: Sequence[Bucket]) -> StepFunction:
        return lambda _: None

    @property
    def buffers(self) -> list[Tensor]:
        return self._strategy.buffers


def updater_of(program: RankProgram, model: CutModel, everyone: Group | None = None) -> Updater:
    """Moves a rank's weights, as its experiment's strategy wants it.

    Args:
        everyone: all ranks, who agree on how gradients are clipped and scaled; None: they are not.
    """
    updater, experiment = _plain(program, model), program.program.experiment
    if experiment.schedule is not None:
        updater.schedule = Schedule(experiment)
    if experiment.ema is not None:
        updater.average(experiment.ema)
    if everyone is not None and (experiment.clip_norm or experiment.clip_value):
        updater.clipping = Clipping(experiment.clip_norm, experiment.clip_value, everyone)
    if everyone is not None and experiment.scaling is not None:
        device = next(iter(model.trainable().values())).device
        updater.scaling = LossScaling(experiment.scaling, everyone, device)
    rules = Rules.of(experiment.sync, model)
    if rules is not None:
        updater.follow(rules)
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
    """What an experiment's `sync` makes of gradients.

    Args:
        left: what was in flight before it, under whatever strategy, the oldest first, and on
            whatever device. What has no place in this one's pipeline moves the weights now.
        notes: takes what people should know of steps that were unlike others.
    """
    notes, sync = [] if notes is None else notes, program.program.experiment.sync
    timing, rules = sync.timing, updater.rules
    left = [each.beside(model.trainable()) for each in left]
    spare = max(0, len(left) - stays_in_flight(timing, first_step))
    if isinstance(sync, ParameterServer):
        serving = SynchronousStrategy(program, model, updater)
        drain(left, model, serving.move, notes)
        return serving
    drain(left[:spare], model, updater.move, notes)

    def made() -> Strategy:
        if timing.late:
            return PipelinedStrategy(program, model, updater, left[spare:], notes)
        if timing.of_weights:
            return LocalStrategy(program, model, updater)
        return SynchronousStrategy(program, model, updater, left[spare:])

    if first_step < timing.warmup:
        return WarmupStrategy(program.warm, model, updater, timing.warmup, made)
    if rules is not None and 0 < first_step == timing.warmup:
        rules.begin()
    return made()
