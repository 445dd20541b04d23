"""An experiment as one value: a plan, data, an optimizer, a synchronisation strategy and steps."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from workbench.plan.experiment.checks import LossScale as LossScale
from workbench.plan.experiment.checks import (
    Scale,
    Schedule,
    check_rows,
    check_scaled,
)
from workbench.plan.experiment.optimizers import ASGD as ASGD
from workbench.plan.experiment.optimizers import SGD as SGD
from workbench.plan.experiment.optimizers import Adadelta as Adadelta
from workbench.plan.experiment.optimizers import Adagrad as Adagrad
from workbench.plan.experiment.optimizers import Adam as Adam
from workbench.plan.experiment.optimizers import Adamax as Adamax
from workbench.plan.experiment.optimizers import AdamW as AdamW
from workbench.plan.experiment.optimizers import AnyOptimizer as AnyOptimizer
from workbench.plan.experiment.optimizers import NAdam as NAdam
from workbench.plan.experiment.optimizers import NamedOptimizer as NamedOptimizer
from workbench.plan.experiment.optimizers import Optimizer as Optimizer
from workbench.plan.experiment.optimizers import ParameterGroup as ParameterGroup
from workbench.plan.experiment.optimizers import RAdam as RAdam
from workbench.plan.experiment.optimizers import RMSprop as RMSprop
from workbench.plan.experiment.optimizers import Rprop as Rprop
from workbench.plan.experiment.schedule import LRScheduler as LRScheduler
from workbench.plan.experiment.schedule import RateSchedule as RateSchedule
from workbench.plan.experiment.schedule import WarmupCosine as WarmupCosine
from workbench.plan.experiment.sync import LocalSGD as LocalSGD
from workbench.plan.experiment.sync import OwnStrategy as OwnStrategy
from workbench.plan.experiment.sync import ParameterServer as ParameterServer
from workbench.plan.experiment.sync import Pipelined as Pipelined
from workbench.plan.experiment.sync import Sync as Sync
from workbench.plan.experiment.sync import Synchronous as Synchronous
from workbench.plan.experiment.sync import check_pieces
from workbench.plan.experiment.task import CIFAR10 as CIFAR10
from workbench.plan.experiment.task import AnyLoss, as_loss, as_metrics, check_evaluated, with_steps
from workbench.plan.experiment.task import CrossEntropy as CrossEntropy
from workbench.plan.experiment.task import Data as Data
from workbench.plan.experiment.task import Digits as Digits
from workbench.plan.experiment.task import ImageFolder as ImageFolder
from workbench.plan.experiment.task import Loss as Loss
from workbench.plan.experiment.task import Metric as Metric
from workbench.plan.experiment.task import Synthetic as Synthetic
from workbench.plan.experiment.task import TorchData as TorchData
from workbench.plan.extension.user_object import foreign
from workbench.plan.graph.graph import Graph
from workbench.plan.io.errors import ExperimentError, PlanError
from workbench.plan.io.files import about, text_of, toml_of
from workbench.plan.io.html import Markup, element, save_value, table
from workbench.plan.io.value import Value, dump
from workbench.plan.machine.device import HALVES, Precision, as_precision
from workbench.plan.plans.plan import Plan


def _is_plan(value: object) -> Plan:
    if not isinstance(value, Plan):
        raise ValueError(f"plan must be a Plan, got {type(value).__name__}")
    return value


class Experiment(Value):
    """A training run, described as a value.

    The same experiment under another plan or world size is the same computation: the batch is that
    of the whole world, and so is its order.

    Every rank must have as many rows as its layers need, or for batch norm none, of every batch of
    a run: a full one, the short last one of an epoch, their micro-batches, the test split's. An
    experiment that violates this (1-D batch norm needs two rows) is refused: here, where the number
    of samples is known, or else before the first step.

    Raises:
        ExperimentError: a field has a wrong type or value, and the text names it; or a rank has too
            few rows of a batch for a layer, and the text names the three.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    plan: Annotated[Any, AfterValidator(_is_plan)]
    """How the model is split over ranks."""
    data: Data
    """The samples: "digits", "synthetic", "text", "cifar10", `ImageFolder(root)`, or one's own: a
    torch Dataset, two of them (train, test), or "module:function"."""
    loss: Annotated[AnyLoss | None, BeforeValidator(as_loss)] = None
    """(outputs, targets) -> the loss; or `wb.CrossEntropy(...)`, with the options of torch's; None:
    cross-entropy, of auxiliary heads a part."""
    metrics: Annotated[dict[str, Metric] | None, BeforeValidator(as_metrics)] = None
    """What evaluations report besides the loss, by name; None: the accuracy, and of tokens the
    perplexity, unless the loss is one's own."""
    batch_size: int = Field(default=128, ge=1)
    """Samples of one step over all ranks (the global batch)."""
    optimizer: NamedOptimizer
    """The optimizer, as `wb.SGD(0.1)`; or the name of one with all defaults, as "adamw"."""
    steps: int = Field(ge=1)
    """The number of optimizer updates."""
    epochs: int | None = Field(default=None, ge=1)
    """The same in passes over the training split, from which `steps` follow."""
    tokens: int | None = Field(default=None, ge=1)
    """The same in tokens that a language model reads, from which `steps` follow: the fewest that
    read so many."""
    sync: Sync = Synchronous()
    """When gradients are summed and used: a strategy, or its name: "synchronous", "pipelined",
    "local_sgd", "parameter_server"."""
    shard_optimizer: bool | tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...] = False
    """Shard the optimizer's state, and its work, over the ranks that hold the same parameters: the
    same weights bit by bit, in 1/n of the memory (`train/optimizer/optimizer.py`). Relative
    shares, one for each rank, shard them unequally; a rank with 0 has no state and updates nothing.

    With `Synchronous(algorithm="direct")` the update is fused into the all-reduce: the rank that
    reduces a gradient segment applies its update and sends the weights instead of the sum: two
    synchronisations, not three, and a third less traffic. `fused` says whether it is so."""
    schedule: RateSchedule | None = None
    """How the learning rate moves from step to step; None: not at all."""
    ema: float | None = Field(default=None, gt=0, lt=1)
    """The decay d of averaged weights: e = d e + (1 - d) w after each update, beginning with the
    initial weights. Evaluations use them, with batch norm's statistics of training;
    `run.state_dict(ema=True)` has them. None: there are none."""
    clip_norm: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The greatest norm of all gradients of the model together, as
    `torch.nn.utils.clip_grad_norm_` clips them: exact, however layers are cut. Of pipelined steps,
    the gradient that is applied is clipped. None: any."""
    clip_value: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The greatest magnitude of an element of a gradient, as `torch.nn.utils.clip_grad_value_`
    clips it; None: any."""
    precision: Annotated[Precision, BeforeValidator(as_precision)] = "fp32"
    """"bf16" and "fp16" are autocast: weights and sums of gradients stay in fp32."""
    loss_scale: LossScale | Scale | None = None
    """What the loss is scaled by in fp16: a `LossScale`, which follows the gradients, or a number,
    which stays; None: `LossScale()`. A step whose gradients overflow updates nothing, on any rank,
    neither weights nor averages; the schedule goes on."""
    accumulate: int = Field(default=1, ge=1)
    """The number of micro-batches that each step is computed in, to bound activation memory."""
    seed: int = Field(default=0, ge=0)
    """The seed of initial weights, data order and dropout."""
    checkpoint_every: int | None = Field(default=None, ge=1)
    """Steps between checkpoints; None: one at the end, or when stopped."""
    evaluate_every: int | None = Field(default=None, ge=1)
    """Steps between evaluations on the test split; None: one at the end."""
    keep_best: str | None = None
    """The figure of evaluations by which the best checkpoint is kept, beside the newest ones:
    "loss", of which the least is best, or a metric, of which the largest is; "-error": the least.
    It is saved behind each evaluation that is better than those before; `run.state_dict(best=True)`
    has its weights. None: none is kept."""
    trace_every: int = Field(default=20, ge=0)
    """Steps from one whose layers and collectives are timed (`run.timeline`) to the next; 0: none.
    The others have no overhead."""

    @model_validator(mode="before")
    @classmethod
    def _steps_follow(cls, given: dict[str, Any]) -> dict[str, Any]:
        return with_steps(given)

    @model_validator(mode="after")
    def _has_what_is_evaluated(self) -> Self:
        asked = [n for n in ("metrics", "evaluate_every", "keep_best") if getattr(self, n)]
        check_evaluated(self.data, asked)
        if self.keep_best is not None:
            names = ("loss", *self.figures)
            if self.keep_best.removeprefix("-") not in names:
                valid = ", ".join(map(repr, names))
                raise ValueError(
                    f"keep_best: evaluations have no {self.keep_best!r}; there are {valid}"
                )
        if self.plan.is_at_hand:
            _ = self.plan.evaluation  # refuses a choice that a layer cannot have there
        return self

    @model_validator(mode="after")
    def _batch_can_be_cut(self) -> Self:
        if self.batch_size < self.accumulate:
            raise ValueError(
                f"batch_size {self.batch_size} cannot be computed "
                f"in {self.accumulate} micro-batches"
            )
        return self

    @model_validator(mode="after")
    def _ranks_have_enough_rows(self) -> Self:
        if self.data.known_samples is not None and self.plan.is_at_hand:
            self.check_rows(self.data.known_samples)
        return self

    @model_validator(mode="after")
    def _something_is_trained(self) -> Self:
        graph = self.plan.graph
        if not graph.trainable:
            why = (
                f"all {graph.frozen:,} parameters are frozen, unused or detached"
                if graph.frozen
                else "it has no parameters"
            )
            raise ValueError(
                f"plan: there is nothing to train in {graph.source.name}: {why}; set "
                f"requires_grad on the parameters to be trained, and trace the model again"
            )
        return self

    @model_validator(mode="after")
    def _fields_fit_each_other(self) -> Self:
        if self.optimizer.groups:
            self.optimizer.check_groups(self._shapes)
        if self.schedule is not None:
            self.schedule.check(self.optimizer, self.steps)
        check_scaled(self.precision, self.loss_scale, self.sync)
        check_pieces(self.plan, self.sync)
        if isinstance(self.loss, CrossEntropy):
            self.loss.check(self.plan.graph)
        return self

    @property
    def figures(self) -> tuple[str, ...]:
        """The names of what evaluations report besides the loss."""
        if self.metrics is not None or isinstance(self.loss, Loss):
            return tuple(self.metrics or ())
        of_tokens = self.plan.graph.scores_tokens and (self.loss is None or self.loss.is_plain)
        return ("accuracy", "perplexity")[: 1 + of_tokens]

    @property
    def optimizers(self) -> Mapping[str, AnyOptimizer]:
        """The optimizer of each parameter, by name: with the options of its group."""
        return self.optimizer.of(self._shapes)

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of whole parameters."""
        weights = (weight for layer in self.plan.graph.layers for weight in layer.weights)
        shapes = {weight.name: weight.shape for weight in weights}
        return {name: shapes[name] for name in self.plan.graph.trainable}

    @model_validator(mode="after")
    def _dampening_begins_at_once(self) -> Self:
        timing = self.sync.timing
        late = timing.late > 0 or timing.adds_up
        forgets = timing.of_weights and timing.momentum == "reset"
        dampened = any(
            isinstance(value, SGD) and value.momentum > 0 and value.dampening > 0
            for value in self.optimizer.parted
        )
        if dampened and (late or forgets):
            raise ValueError(
                "optimizer: dampening leaves the first gradient whole, and under "
                f"{self.sync.title} a checkpoint may be made before a parameter has one, "
                "which momentum alone does not tell; set dampening=0, or use Synchronous"
            )
        return self

    def at_rate(self, lr: float) -> Self:
        """The same at another learning rate, to which groups and schedule keep their ratio."""
        schedule = self.schedule
        if schedule is not None:
            schedule = schedule.at_rate(self.optimizer.lr, lr)
        return self.replace(optimizer=self.optimizer.at_rate(lr), schedule=schedule)

    @model_validator(mode="after")
    def _whole_gradients_are_clipped(self) -> Self:
        named = [name for name in ("clip_norm", "clip_value") if getattr(self, name) is not None]
        if len(named) > 1:
            raise ValueError("clip_norm and clip_value exclude each other: one of them is valid")
        if named and self.sync.timing.of_weights:
            raise ValueError(
                f"{named[0]} clips the gradient of the whole batch, and under {self.sync.title} no "
                "rank has it; it is valid with Synchronous, ParameterServer and Pipelined"
            )
        if named and isinstance(self.sync, Synchronous) and self.sync.per_round:
            raise ValueError(
                f"{named[0]} clips the gradient of the whole batch, and with per_round weights "
                "behind the gather step before it is there; it is valid with per_round=False"
            )
        return self

    @property
    def half(self) -> bool:
        """Whether layers compute in 16 bits, by autocast."""
        return self.precision in HALVES

    @property
    def scaling(self) -> LossScale | float | None:
        """What the loss is scaled by; None: by nothing."""
        if self.precision != "fp16":
            return None
        return LossScale() if self.loss_scale is None else self.loss_scale

    @model_validator(mode="after")
    def _weights_are_those_of_the_batch(self) -> Self:
        if self.loss is None or not self.loss.weighs:
            return self
        alone = self.sync.timing.of_weights
        if alone or (isinstance(self.sync, Synchronous) and self.sync.per_round):
            raise ValueError(
                "loss: the weights of all rows of a batch add up, and weights step before under "
                f"{self.sync.title if alone else 'per_round=True'}; they are valid with "
                "Synchronous, ParameterServer and Pipelined"
            )
        return self

    @model_validator(mode="after")
    def _weights_that_are_averaged_move_together(self) -> Self:
        if self.ema is None:
            return self
        if self.sync.timing.of_weights:
            raise ValueError(
                f"ema averages the weights of the model, and under {self.sync.title} each rank has "
                "its own; it is valid with Synchronous, ParameterServer and Pipelined"
            )
        if isinstance(self.sync, Synchronous) and self.sync.per_round:
            raise ValueError(
                "ema takes weights after each update, and with per_round some are updated more "
                "often than others; it is valid with per_round=False"
            )
        return self

    @model_validator(mode="after")
    def _replicas_step_alike(self) -> Self:
        if self.shard_optimizer and self.sync.timing.of_weights:
            raise ValueError(
                "shard_optimizer needs ranks that update the same weights with the same "
                f"gradients, and under {self.sync.title} each has its own; "
                "it is valid with Synchronous and Pipelined"
            )
        return self

    @model_validator(mode="after")
    def _somebody_moves_every_weight(self) -> Self:
        shares, world = self.shard_optimizer, self.plan.world_size
        if isinstance(shares, bool):
            return self
        if len(shares) != world:
            raise ValueError(
                f"shard_optimizer: shares must be {world} numbers >= 0, one for each rank, "
                f"got {shares}"
            )
        for name, placed in self.plan.flow.weights.items() if self.plan.is_at_hand else ():
            k = placed.group_size
            for first in range(k) if placed.trainable and k < world else ():
                if not any(shares[first::k]):
                    raise ValueError(
                        f"shard_optimizer: ranks {list(range(first, world, k))} alone hold their "
                        f"part of {name!r} and have shares of 0; one must be larger"
                    )
        return self

    def replace(self, **fields: Any) -> Self:
        """A copy with other values in some fields, validated.

        Epochs or tokens stay, unless steps, epochs or tokens are given; a loss scale does, unless
        another precision is.

        Raises:
            ExperimentError: as the class.
        """
        counts = ("steps", "epochs", "tokens")
        given = [name for name in counts if fields.get(name) is not None]
        if given or self.epochs is not None or self.tokens is not None:
            kept = {name: getattr(self, name) for name in counts[1:]}
            fields = {**dict.fromkeys(counts), **({} if given else kept), **fields}
        if fields.get("precision", "fp16") != "fp16":
            fields = {"loss_scale": None, **fields}
        return super().replace(**fields)

    @property
    def optimizer_shares(self) -> tuple[float, ...]:
        """The relative share of each rank in the updates of shared parameters [ranks]."""
        shares = self.shard_optimizer
        return (1.0,) * self.plan.world_size if isinstance(shares, bool) else shares

    @property
    def fused(self) -> bool:
        """Whether the rank that reduces a gradient segment updates and sends its weights.

        Not so with other algorithms, whose owners hold no whole segment; with a codec, which would
        round weights; with updates within a batch, some of which change no weights; nor with late
        gradients, whose sums are kept.
        """
        sync = self.sync
        return (
            bool(self.shard_optimizer)
            and isinstance(sync, Synchronous)
            and sync.algorithm == "direct"
            and sync.codec is None
            and not sync.per_round
        )

    @model_validator(mode="after")
    def _the_server_is_there(self) -> Self:
        if isinstance(self.sync, ParameterServer):
            if self.sync.server >= self.plan.world_size:
                raise ValueError(
                    f"sync: server must be a rank of the world, 0 to {self.plan.world_size - 1}, "
                    f"got {self.sync.server}"
                )
            if self.shard_optimizer:
                raise ValueError(
                    "shard_optimizer cuts the optimizer's state over replicas, and under "
                    "ParameterServer the server alone has it; "
                    "it is valid with Synchronous and Pipelined"
                )
        return self

    @model_validator(mode="after")
    def _rounds_are_there(self) -> Self:
        if isinstance(self.sync, Synchronous) and self.sync.per_round:
            if self.plan.rounds == "BK" or (self.plan.is_at_hand and self.plan.tail is None):
                raise ValueError(
                    f"sync: per_round needs a plan that gathers rows in rounds 'B' or 'B/K', "
                    f"this one has rounds {self.plan.rounds!r}; see plan.with_rounds"
                )
            if self.accumulate > 1:
                raise ValueError(
                    f"sync: per_round steps within a batch, which cannot be accumulated over "
                    f"{self.accumulate} micro-batches; accumulate=1 is valid"
                )
        return self

    def check_rows(self, samples: tuple[int, int]) -> None:
        """Checks that every rank has enough rows of every batch for each layer.

        Args:
            samples: the samples of the training and of the test split.

        Raises:
            ExperimentError: a rank has too few rows; the text names the batch, the rank and the
                layer.
        """
        schedule = Schedule(self.batch_size, self.accumulate, self.steps, samples, self.half)
        check_rows(self.plan, schedule)

    def to_toml(self) -> str:
        """The experiment as readable, editable text, its plan included."""
        fields = self.model_dump(exclude={"plan"}, exclude_none=True)
        return f"{dump({'experiment': fields})}\n{self.plan.to_toml()}"

    @classmethod
    def from_toml(
        cls, text: str, graph: Graph | None = None, *, trust: bool = False
    ) -> "Experiment":
        """The experiment of a text written by `to_toml`.

        Args:
            text: the text, in TOML.
            graph: the model that it must be for; None: the one in the text, which lacks the
                structure of a module of one's own.
            trust: whether to import the functions and classes that the text names, which runs their
                author's code. Without it such an experiment can be shown, compared, changed and
                saved; what needs an object says which.

        Raises:
            ExperimentError: the text is not TOML, or a field is missing, unknown or wrong.
            PlanError: the plan in the text is wrong, or for another model.
        """
        content = toml_of(text, ExperimentError)
        if not isinstance(content.get("experiment"), dict):
            raise ExperimentError("no [experiment] table in this text")
        fields = content["experiment"] if trust else foreign(content["experiment"])
        return cls(**{**fields, "plan": Plan.from_toml(text, graph, trust=trust)})

    def save(self, path: str | Path) -> None:
        """Writes `to_toml()` to a file; to "x.html" or "x.csv" what is shown of it."""
        save_value(self, path, self.to_toml)

    @classmethod
    def load(
        cls, path: str | Path, graph: Graph | None = None, *, trust: bool = False
    ) -> "Experiment":
        """Reads a file written by `save`, or by hand; as `from_toml`.

        Raises:
            ExperimentError: the text is not a valid experiment.
            PlanError: the plan in the text is wrong.
        """
        with about(path, ExperimentError), about(path, PlanError):
            return cls.from_toml(text_of(path, ExperimentError), graph, trust=trust)

    def __repr__(self) -> str:
        return (
            f"<Experiment {self.plan.graph.source.name} on {self.plan.world_size} ranks: "
            f"{self.data.title}, {self.steps} steps of {self.batch_size}, "
            f"{self.optimizer.kind} lr={self.optimizer.lr:g}{self._strategy()}, "
            f"{self.precision}, seed {self.seed}>"
        )

    __str__ = __repr__

    def _repr_html_(self) -> Markup:
        """The fields that are not as they are without being given."""
        return element("div", table(("field", "value"), self._lines(), str(self)[1:-1]))

    def _strategy(self) -> str:
        """The strategy, unless it is a plain synchronous step without sharding."""
        sharded = f", sharded over replicas{' and fused' * self.fused}" * bool(self.shard_optimizer)
        return sharded + (f" ({self.sync.inexact})" if self.sync.inexact else "")
