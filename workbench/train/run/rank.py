"""What one rank holds while it trains, and how it came by it."""

from collections.abc import Collection
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.fx

from workbench.comm.groups.group import Group
from workbench.comm.groups.world import World
from workbench.layers.cut import cut
from workbench.layers.cut_model import CutModel, RankGroups, group_specs
from workbench.layers.local.context import BatchContext
from workbench.layers.local.loss import PLAIN
from workbench.model.tracing.trace import skeleton
from workbench.model.weights.slices import Reader, WeightsFile
from workbench.plan.experiment.experiment import Experiment, Loss, TorchData
from workbench.plan.plans.plan import Plan
from workbench.program.step import program_of
from workbench.train.checkpoint.checkpoint import in_flight, load, restore
from workbench.train.data.datasets import Dataset, open_for
from workbench.train.optimizer.optimizer import Updater
from workbench.train.run.memory import Held
from workbench.train.run.requests import LearningRates
from workbench.train.run.scoring import Scoring, ScoringOfClasses
from workbench.train.step.executor import Stepper
from workbench.train.step.loss import CrossEntropyLoss, OwnLoss, StepLoss, step_loss
from workbench.train.step.state import Strategy, restore_residuals
from workbench.train.step.trial import LossTrial, Trial, check_classes, try_fp16
from workbench.train.strategy.strategy import strategy_of, updater_of
from workbench.train.trace.tracer import Tracer

CONTROL = "control"
Spec = tuple[str, tuple[int, ...]]


def group_specs_of(plan: Plan) -> list[tuple[str, tuple[int, ...]]]:
    """The groups of a training rank: those of the cut model, and everyone for control."""
    return [(CONTROL, tuple(range(plan.world_size))), *group_specs(plan)]


def groups_for(
    plan: Plan, before: Plan, world: World, known: RankGroups, asked: Collection[Spec]
) -> tuple[RankGroups, frozenset[Spec]]:
    """This rank's groups under another plan, and all groups that there are then.

    Those of the plan before stay, as runs mostly go back and forth and to connect takes long;
    others are closed.

    Args:
        before: the plan so far, under which nothing is communicated any more.
        asked: all groups so far, this rank's or not.
    """
    wanted = group_specs_of(plan)
    kept = frozenset([*wanted, *group_specs_of(before)])
    new = [spec for spec in wanted if spec not in asked]
    found = {**known, **(world.groups(new) if new else {})}
    if not kept.issuperset(asked):
        world.let_go([found.pop(spec) for spec in known if spec not in kept])
    return found, kept


def everyone(groups: RankGroups, plan: Plan) -> Group:
    """The group of all ranks, for status, evaluation and checkpoints."""
    return groups[CONTROL, tuple(range(plan.world_size))]


@dataclass
class RankState:
    """One rank's part of a training run.

    Attributes:
        traced: the model's structure, whole and without values: a re-cut rewrites a copy of it.
        asked: all groups that there are, this rank's or not.
        first_step: steps made before this session.
        notes: the notes on metrics that gave no number when they were tried, and on steps that were
            unlike others, for people.
    """

    experiment: Experiment
    world: World
    everyone: Group
    model: CutModel
    updater: Updater
    stepper: Stepper
    test_data: Dataset | None
    loss: StepLoss
    scoring: Scoring | ScoringOfClasses
    traced: torch.fx.GraphModule
    groups: RankGroups
    asked: frozenset[Spec]
    first_step: int
    notes: list[str]

    @classmethod
    def start(
        cls,
        experiment: Experiment,
        world: World,
        groups: RankGroups,
        weights: Path,
        resume: Path | None,
        rates: LearningRates | None = None,
    ) -> "RankState":
        """Builds this rank's part, from the initial weights or from a checkpoint.

        Args:
            rates: the rates of the run that goes on; None: every step has the experiment's. What
                was in flight and has no place in this experiment's pipeline moves the weights here.

        Raises:
            ExperimentError: the data has so many samples that a layer gets too few rows of some
                batch; on every rank. Or this rank's device does not compute a layer in fp16.
            DataError: the data is not there, or does not fit the model.
            OwnObjectError: a loss or a metric of the user's own cannot be loaded, fails, mixes
                rows, or gives no number.
        """
        plan = experiment.plan
        dtype = torch.float64 if experiment.precision == "fp64" else torch.float32
        with world.excused():
            train_data, test_data = _splits(experiment)
        experiment.check_rows((len(train_data), 0 if test_data is None else len(test_data)))
        all_ranks = everyone(groups, plan)
        notes: list[str] = []
        loss, scoring = _objective(
            experiment, train_data, test_data, all_ranks, world.device, dtype, notes
        )
        with world.excused():
            saved = None if resume is None else load(resume, plan.graph)
        reader: Reader = WeightsFile(weights) if saved is None else saved.reader
        context = BatchContext(world.rank, (0,) * world.size, seed=experiment.seed)
        traced, device = skeleton(plan.graph), world.device
        if experiment.precision == "fp16":
            try_fp16(traced, device)
        with world.excused():
            model = cut(
                plan, context, groups, reader, device=device, dtype=dtype, traced=deepcopy(traced)
            )
        program = program_of(experiment).of(world.rank)
        updater = updater_of(program, model, all_ranks)
        if saved is not None:
            with world.excused():
                restore(saved, model, updater)
        first_step = 0 if saved is None else saved.step
        left = [] if saved is None else in_flight(saved, model)
        if rates is not None:
            updater.lr = rates.at(first_step)
        updater.begin(first_step)
        strategy = strategy_of(program, model, updater, first_step, left, notes)
        if saved is not None:
            restore_residuals(saved.reader, model, strategy.residuals)
        return cls(
            experiment=experiment,
            world=world,
            everyone=all_ranks,
            model=model,
            updater=updater,
            stepper=Stepper(experiment, model, strategy, train_data, world, dtype, loss),
            test_data=test_data,
            loss=loss,
            scoring=scoring,
            traced=traced,
            groups=groups,
            asked=frozenset(group_specs_of(plan)),
            first_step=first_step,
            notes=notes,
        )

    @property
    def strategy(self) -> Strategy:
        """The strategy that moves the weights, as of the last step."""
        return self.stepper.strategy

    def tracer(self) -> Tracer:
        """Measures what this rank does from its beginning to its end."""
        parts, optimizer = self.stepper.passes.parts, self.updater.optimizer
        return Tracer(self.model, parts, self.world.recorder, self.world.device, optimizer)

    def held(self) -> Held:
        """What stays alive from step to step."""
        parameters = self.model.trainable().values()
        return Held(
            weights=tuple(self.model.pieces().values()),
            gradients=(
                *(p.grad for p in parameters if p.grad is not None),
                *self.strategy.buffers,
            ),
            optimizer=tuple(self.updater.tensors()),
        )


def _splits(experiment: Experiment) -> tuple[Dataset, Dataset | None]:
    """What is trained on, and what is evaluated on, if there is such a split."""
    data, graph, seed = experiment.data, experiment.plan.graph, experiment.seed
    train = open_for(graph, data, "train", seed)
    if isinstance(data, TorchData) and data.test is None:
        return train, None
    return train, open_for(graph, data, "test", seed)


def _objective(
    experiment: Experiment,
    train: Dataset,
    test: Dataset | None,
    everyone: Group,
    device: torch.device,
    dtype: torch.dtype,
    notes: list[str],
) -> tuple[StepLoss, Scoring | ScoringOfClasses]:
    """The loss of a step and what evaluations report; the user's own have been tried."""
    plan, loss = experiment.plan, None
    of_step: StepLoss = step_loss
    if isinstance(experiment.loss, Loss):
        loss = of_step = OwnLoss(experiment.loss, everyone, device, dtype)
        trial = LossTrial(loss)
        rows = experiment.batch_size
        trial.check(Trial.of(plan.graph, train, device, dtype, rows), rows)
        loss.look = trial.look
    else:
        options = experiment.loss or PLAIN
        if isinstance(experiment.data, TorchData):
            check_classes(plan.graph, train, options)
            if test is not None:
                check_classes(plan.evaluation.graph, test, options)
        if experiment.loss is not None:
            of_step = CrossEntropyLoss(options, plan.graph, everyone)
        if experiment.metrics is None:
            return of_step, ScoringOfClasses(plan.evaluation.graph, options)
    tried = None if test is None else Trial.of(plan.evaluation.graph, test, device, dtype)
    return of_step, Scoring.of(experiment, loss, tried, notes)
