"""A case: a module, a plan and an experiment, as values that their repr brings back."""

from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import lru_cache
from typing import Literal

import torch
from torch import nn

from tests.oracle.losses import ACCURACY, LOSSES, OF_CLASSES, Own
from tests.oracle.models import Net
from tests.oracle.opaque import (
    DATA,
    MORE_LOSSES,
    WRONG_DATA,
    WRONG_LOSSES,
    Keyed,
    Plain,
    Rows,
    Streamed,
)
from workbench.model.errors import ModelError, TraceError
from workbench.model.tracing.trace import trace
from workbench.plan.experiment import experiment as experiments
from workbench.plan.experiment.experiment import Experiment, Synthetic, TorchData
from workbench.plan.graph.graph import Graph
from workbench.plan.io.errors import ExperimentError, PlanError
from workbench.plan.plans.plan import Plan
from workbench.train.data.datasets import open_data

REFUSALS = (ModelError, TraceError, PlanError, ExperimentError)
CLASSES = 3


@dataclass(frozen=True)
class Cut:
    """A plan.

    Attributes:
        world: ranks.
        layers: (name, scheme, group size, shares or None) of layers that have a choice.
        recompute: names of layers that are recomputed.
        rows: relative rows of each rank; None: equal.
        rounds: "BK", "B" or "B/K".
        local: whether batch norms see their own rows only.
        tokens: whether tokens are divided between cut layers, or their relative numbers.
    """

    world: int = 1
    layers: tuple[tuple[str, str, int, tuple[float, ...] | None], ...] = ()
    recompute: tuple[str, ...] = ()
    rows: tuple[float, ...] | None = None
    rounds: str = "BK"
    local: bool = False
    tokens: bool | tuple[float, ...] = False

    def of(self, graph: Graph) -> Plan:
        plan = Plan.data_parallel(graph, self.world, self.rows)
        plan = plan.with_batch_norm("local" if self.local else "synchronized")
        for name, scheme, group_size, shares in self.layers:
            plan = plan.with_layer(name, scheme=scheme, group_size=group_size, shares=shares)
        if self.recompute:
            plan = plan.with_recompute(*self.recompute)
        plan = plan.with_shard_tokens(self.tokens)
        return plan.with_rounds(self.rounds)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Run:
    """An experiment but for its plan; `optimizer`, `sync` and others as they are written.

    The loss is the name of one of `LOSSES` or of those in `opaque.py`; None: cross-entropy. So is
    the data; None: synthetic.
    """

    batch_size: int = 6
    samples: int = 16
    steps: int = 2
    loss: str | None = None
    data: str | None = None
    optimizer: str = "SGD(lr=0.1)"
    sync: str = "Synchronous()"
    precision: str = "fp64"
    loss_scale: str = "None"
    accumulate: int = 1
    shard: bool | tuple[float, ...] = False
    clip: tuple[tuple[str, float], ...] = ()
    schedule: str = "None"
    ema: float | None = None
    seed: int = 0
    checkpoint_every: int | None = None
    evaluate_every: int | None = None

    @property
    def own(self) -> Own | None:
        """Its own loss."""
        known = LOSSES | OF_CLASSES | MORE_LOSSES | WRONG_LOSSES
        return None if self.loss is None else known[self.loss]

    def rows(self, graph: Graph, split: Literal["train", "test"]) -> Rows:
        """Samples and labels of a split, as they lie in it."""
        synthetic = Synthetic(samples=self.samples, classes=CLASSES)
        tokens = graph.scores_tokens
        data = open_data(synthetic, graph.inputs, graph.num_classes, split, per_token=tokens)
        xs, ys = data.batch(torch.arange(len(data)))
        return list(zip(xs, ys, strict=True))

    def data_of(self, graph: Graph) -> TorchData | Synthetic:
        """What the experiment gets."""
        if self.data is None:
            return Synthetic(samples=self.samples, classes=CLASSES)
        own = (DATA | WRONG_DATA)[self.data]
        train, test = self.rows(graph, "train"), self.rows(graph, "test")
        kind = Keyed if own.keyed else Streamed if own.is_stream else Plain
        return TorchData(
            train=own.kind(train),
            test=kind(test),
            collate=None if own.collate is None else own.collate(),
            samples=(len(train) - own.short, len(test)) if own.is_stream else None,
            **(dict(inputs="x", targets="y") if own.keyed else {}),
        )

    def of(self, plan: Plan) -> Experiment:
        own = self.own
        return Experiment(
            plan=plan,
            data=self.data_of(plan.graph),
            loss=None if own is None else own.for_experiment(plan.graph.source.module),
            metrics=None if own is None or own.ignored is not None else ACCURACY,
            batch_size=self.batch_size,
            steps=self.steps,
            optimizer=eval(self.optimizer, vars(experiments)),
            sync=eval(self.sync, vars(experiments)),
            precision=self.precision,
            loss_scale=eval(self.loss_scale, vars(experiments)),
            accumulate=self.accumulate,
            shard_optimizer=self.shard,
            **dict(self.clip),
            ema=self.ema,
            schedule=eval(self.schedule, vars(experiments)),
            seed=self.seed,
            checkpoint_every=self.checkpoint_every,
            evaluate_every=self.evaluate_every,
            trace_every=0,
        )


@dataclass(frozen=True)
class Case:
    """What is run, and in which way besides.

    Attributes:
        net: the module.
        cut: the plan.
        run: the experiment.
        way: "straight"; "again": twice, to equal bits; "resumed": stopped after a step and
            resumed; "re-cut": under another plan after a step.
        then: the plan of the second part of a run that is resumed or re-cut; None: the same.
    """

    net: Net
    cut: Cut = field(default_factory=Cut)
    run: Run = field(default_factory=Run)
    way: str = "straight"
    then: Cut | None = None


@lru_cache(maxsize=256)
def graph_of(net: Net) -> Graph:
    """The traced module.

    Raises:
        TraceError: it is refused.
    """
    outputs = net.roles or None
    return trace(net.build(), input_shape=net.shape, outputs=outputs, vocabulary=net.vocabulary)


FUSED = ("sgd", "adam", "adamw")
CLASSES_OF_TORCH = {name.lower(): one for name, one in vars(torch.optim).items()}


def optimizer_of(
    experiment: Experiment,
) -> Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer]:
    """Torch's own, of named parameters; a group has the first parameters that it matches."""
    value = experiment.optimizer
    options = value.model_dump(exclude={"kind", "groups"})

    def build(parameters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        left, groups = dict(parameters), []
        for group in value.groups:
            mine = [
                name
                for name, parameter in left.items()
                if (not group.patterns or any(fnmatch(name, one) for one in group.patterns))
                and (group.dims is None or parameter.ndim <= group.dims)
            ]
            groups.append({"params": [left.pop(name) for name in mine], **group.options})
        how = {"fused": True} if value.kind in FUSED else {}
        rest = {"params": list(left.values())}
        return CLASSES_OF_TORCH[value.kind]([rest, *groups], **options, **how)

    return build


def scheduler_of(
    experiment: Experiment,
) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None:
    """Torch's own."""
    schedule = experiment.schedule
    if schedule is None:
        return None
    if schedule.kind == "lr_scheduler":
        build = getattr(torch.optim.lr_scheduler, schedule.name)
        return lambda optimizer: build(optimizer, **schedule.model_extra)
    w, total = schedule.warmup, schedule.total or experiment.steps

    def warm_and_cool(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        rise = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / (w + 1), total_iters=w)
        lowest = schedule.final * experiment.optimizer.lr
        fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total - w, lowest)
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, fall], [w])

    return warm_and_cool
