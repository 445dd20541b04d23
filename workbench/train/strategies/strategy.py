"""When ranks exchange gradients or parameters, and when their optimizers move."""

from collections.abc import Sequence

from torch import Tensor

from workbench.comm.groups.group import Group
from workbench.layers.cut_model import CutModel
from workbench.plan.experiment.experiment import ParameterServer
from workbench.program.buckets import Bucket
from workbench.program.instructions import Instruction, ZeroGrad
from workbench.program.step import RankProgram
from workbench.train.checkpoint.in_flight import InFlight
from workbench.train.loop.passes import Action
from workbench.train.strategies.clipping import Clipping
from workbench.train.strategies.local_sgd import LocalUpdates
from workbench.train.strategies.optimizer import ServingUpdater, ShardedUpdater, Updater
from workbench.train.strategies.pipelined import PipelinedUpdates, drain, stays_in_flight
from workbench.train.strategies.rules import Rules
from workbench.train.strategies.scaling import LossScaling
from workbench.train.strategies.scheduling import Schedule
from workbench.train.strategies.synchronous import SynchronousUpdates
from workbench.train.strategies.updates import ImmediateUpdates, Updates
from workbench.train.strategies.warming import WarmingUpdates


class OwnGradients(ImmediateUpdates):
    """Every rank keeps its own gradients, and moves nothing: for measuring.

    Args:
        strategy: the strategy in whose memory gradients are left.
    """

    def __init__(self, strategy: Updates) -> None:
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
) -> Updates:
    """What an experiment's `sync` makes of gradients.

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
    timing, rules = sync.timing, updater.rules
    left = [each.beside(model.trainable()) for each in left]
    spare = max(0, len(left) - stays_in_flight(timing, first_step))
    if isinstance(sync, ParameterServer):
        serving = SynchronousUpdates(program, model, updater)
        drain(left, model, serving.move, notes)
        return serving
    drain(left[:spare], model, updater.move, notes)

    def made() -> Updates:
        if timing.late:
            return PipelinedUpdates(program, model, updater, left[spare:], notes)
        if timing.of_weights:
            return LocalUpdates(program, model, updater)
        return SynchronousUpdates(program, model, updater, left[spare:])

    if first_step < timing.warmup:
        warm = SynchronousUpdates(program.warm, model, updater)
        return WarmingUpdates(warm, timing.warmup, made, rules)
    if rules is not None and 0 < first_step == timing.warmup:
        rules.begin()
    return made()
