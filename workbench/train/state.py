"""What one rank holds while it trains, and how it came by it."""

from collections.abc import Collection
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.fx

from workbench.comm.group import Group
from workbench.comm.world import World
from workbench.layers.context import BatchContext
from workbench.layers.cut import cut
from workbench.layers.cut_model import CutModel, Groups, group_specs
from workbench.model.slices import Reader, WeightsFile
from workbench.model.trace import skeleton
from workbench.plan.experiment import Experiment
from workbench.plan.plan import Plan
from workbench.train.checkpoint import in_flight, load, restore
from workbench.train.data import Dataset, open_data
from workbench.train.memory import Held
from workbench.train.objective import StepLoss, step_loss
from workbench.train.residuals import restore_residuals
from workbench.train.step import Stepper
from workbench.train.strategy import Strategy, strategy_of, updater_of
from workbench.train.tracing import Tracer
from workbench.train.updater import Updater

CONTROL = "control"
Spec = tuple[str, tuple[int, ...]]


def group_specs_of(plan: Plan) -> list[tuple[str, tuple[int, ...]]]:
    """The groups of a training rank: those of the cut model, and everyone for control."""
    return [(CONTROL, tuple(range(plan.world_size))), *group_specs(plan)]


def groups_for(plan: Plan, world: World, known: Groups, asked: Collection[Spec]) -> Groups:
    """This rank's groups under another plan; those that exist are used again.

    Args:
        plan: to go on under.
        world: all ranks, which call this together.
        known: this rank's groups so far.
        asked: all groups so far, this rank's or not.
    """
    return {**known, **world.groups([s for s in group_specs_of(plan) if s not in asked])}


def everyone(groups: Groups, plan: Plan) -> Group:
    """The group of all ranks, for status, evaluation and checkpoints."""
    return groups[CONTROL, tuple(range(plan.world_size))]


@dataclass
class RankState:
    """One rank's part of a training run.

    Attributes:
        experiment: what runs.
        world: this rank's place.
        everyone: the group of all ranks.
        model: this rank's part of the model.
        updater: of this rank's pieces.
        strategy: moves the weights.
        stepper: computes gradients.
        test_data: the split to evaluate on.
        traced: the model's structure, whole and without values: a re-cut rewrites a copy of it.
        groups: this rank's.
        asked: all groups that were made, this rank's or not.
        first_step: steps made before this session.
        notes: on steps that were unlike others, for people.
    """

    experiment: Experiment
    world: World
    everyone: Group
    model: CutModel
    updater: Updater
    strategy: Strategy
    stepper: Stepper
    test_data: Dataset
    traced: torch.fx.GraphModule
    groups: Groups
    asked: frozenset[Spec]
    first_step: int
    notes: list[str]

    @classmethod
    def start(
        cls,
        experiment: Experiment,
        world: World,
        groups: Groups,
        weights: Path,
        resume: Path | None,
        loss: StepLoss = step_loss,
    ) -> "RankState":
        """Builds this rank's part, from the initial weights or from a checkpoint."""
        plan = experiment.plan
        saved = None if resume is None else load(resume, plan.graph)
        reader: Reader = WeightsFile(weights) if saved is None else saved.reader
        context = BatchContext(world.rank, (0,) * world.size, seed=experiment.seed)
        dtype = torch.float64 if experiment.precision == "fp64" else torch.float32
        traced, device = skeleton(plan.graph), world.device
        model = cut(
            plan, context, groups, reader, device=device, dtype=dtype, traced=deepcopy(traced)
        )
        updater = updater_of(experiment, model)
        if saved is not None:
            restore(saved, model, updater)
        shape, classes = plan.graph.input_shape, plan.graph.num_classes
        train_data = open_data(experiment.data, shape, classes, "train")
        first_step = 0 if saved is None else saved.step
        left = [] if saved is None else in_flight(saved, model)
        notes: list[str] = []
        strategy = strategy_of(experiment, model, updater, first_step, left, notes)
        if saved is not None:
            restore_residuals(saved.reader, model, strategy.residuals)
        return cls(
            experiment=experiment,
            world=world,
            everyone=everyone(groups, plan),
            model=model,
            updater=updater,
            strategy=strategy,
            stepper=Stepper(experiment, model, strategy, train_data, world, dtype, loss),
            test_data=open_data(experiment.data, shape, classes, "test"),
            traced=traced,
            groups=groups,
            asked=frozenset(group_specs_of(plan)),
            first_step=first_step,
            notes=notes,
        )

    def tracer(self) -> Tracer:
        """Measures what this rank does from its beginning to its end."""
        parts, optimizer = self.stepper.passing.parts, self.updater.optimizer
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
