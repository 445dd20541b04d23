"""Strategies: when ranks exchange gradients or weights, and what is made of what they exchanged.

The built-in ones (`sync.py`) are such strategies, and so is one of a person's own. What happens in
a step follows from a strategy's `Timing` alone, which is text: the program of a step is written
from it, and traffic, memory and time are predicted, wherever the strategy itself is not there.

    exchanges   every   late   a step
    gradients   1       0      sums gradients over replicas, and uses them
    gradients   n       0      adds its gradient up; each n-th sums all over replicas and uses them
    gradients   1       n      starts a sum, and uses the one that was started n steps ago
    weights     n       0      uses its own gradients; each n-th averages weights over replicas

What a strategy computes itself, it computes element by element, and of what all ranks that hold
the same piece have alike. So the result of a piece is the piece of the result, however layers are
cut, and replicas stay equal bit by bit.

Synchronisation strategies as values: when ranks exchange gradients or weights, and how.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, FiniteFloat, field_validator, model_validator

from workbench.plan.collective.algorithm import Algorithm, NamedAlgorithm, algorithm_of, chosen
from workbench.plan.collective.codec import AnyCodec, NamedCodec, OwnCodec
from workbench.plan.extension.extension import Extension, extension_of, installed, name_of, named
from workbench.plan.extension.user_object import Own, OwnObject
from workbench.plan.io.errors import ExperimentError
from workbench.plan.io.value import Value, by_name
from workbench.plan.placement.rules import read_whole
from workbench.plan.plans.plan import Plan

Exchanges = Literal["gradients", "weights"]
Momentum = Literal["keep", "average", "reset"]
First = FiniteFloat | Literal["weight"]
"""What a state begins with: this number in every element, or the weights as they are then."""


class Timing(Value):
    """When ranks exchange what, when it is used, and what a strategy remembers: see `Strategy`."""

    exchanges: Exchanges = "gradients"
    every: int = Field(default=1, ge=1)
    late: int = Field(default=0, ge=0)
    warmup: int = Field(default=0, ge=0)
    momentum: Momentum = "keep"
    keeps_weights: bool = False
    remembers: dict[str, First] = Field(default_factory=dict)
    temporaries: int = Field(default=3, ge=0)
    adjusts: bool = False
    """Whether gradients go through `Strategy.gradient`."""
    corrects: bool = False
    """Whether averaged weights go through `Strategy.averaged`."""

    @classmethod
    def of(cls, strategy: "Strategy") -> Self:
        """That of a strategy.

        Raises:
            ExperimentError: an attribute has a wrong type or value, or two exclude each other.
        """
        own = type(strategy)
        try:
            return cls(
                **{name: getattr(strategy, name) for name in _STATED},
                remembers=dict(strategy.remembers),
                adjusts=own.gradient is not Strategy.gradient,
                corrects=own.averaged is not Strategy.averaged,
            )
        except ExperimentError as error:
            raise ExperimentError(f"strategy {strategy.name!r}: {error}") from None

    def __hash__(self) -> int:
        return hash((self.exchanges, self.every, self.late, *self.remembers.items()))

    @property
    def of_weights(self) -> bool:
        """Whether ranks move weights by themselves, and average them."""
        return self.exchanges == "weights"

    @property
    def adds_up(self) -> bool:
        """Whether gradients of several steps are added up before they are summed."""
        return self.every > 1 and not self.of_weights

    def begins(self, step: int) -> bool:
        """Whether nothing of the steps before is added up when a step begins."""
        return step <= self.warmup or step % self.every == 0

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        for name in self.remembers:
            if not name.isidentifier():
                raise ValueError(f"remembers: a state is called like a variable, got {name!r}")
        if self.of_weights and (self.late or self.keeps_weights):
            raise ValueError(
                "late and keeps_weights are about sums of gradients, and exchanges='weights' "
                "sums none; they are valid with exchanges='gradients'"
            )
        if self.late and self.every > 1:
            raise ValueError(
                f"late={self.late} and every={self.every} exclude each other: sums are used late "
                "where each step starts one; every=1 is valid, or late=0"
            )
        if self.keeps_weights and not self.late:
            raise ValueError("keeps_weights is about gradients that are late; late >= 1 is valid")
        if self.momentum != "keep" and not self.of_weights:
            raise ValueError(
                f"momentum={self.momentum!r} is about ranks whose optimizers differ; it is valid "
                "with exchanges='weights'"
            )
        if self.corrects and not self.of_weights:
            raise ValueError(
                "averaged() is called where weights are averaged: with exchanges='weights'"
            )
        if self.remembers and not (self.adjusts or self.corrects):
            raise ValueError("remembers names states, and no method of the strategy uses one")
        return self


class Strategy(Extension):
    """When gradients are summed and used: the base class of all strategies, also of your own.

    Attributes are set in the class, or on the object. For example, local SGD with an outer
    momentum (SlowMo, Wang et al. 2020, arXiv:1910.00643; DiLoCo, arXiv:2311.08105):

        class SlowMo(wb.extend.Strategy):
            exchanges = "weights"
            every = 8
            remembers = {"slow": "weight", "speed": 0.0}

            def averaged(self, step, mean, state):
                state["speed"].mul_(0.7).add_(state["slow"] - mean)
                state["slow"].sub_(state["speed"])
                return state["slow"]

    Both methods are called for each parameter, with this rank's piece of it, and work element by
    element: they do not look at shapes, sums or indices. They may change a state in place, or put
    another tensor of the same shape there. What they return is used instead of the gradient, or of
    the weights; it may be an argument, changed in place. They are called without autograd.

    Attributes:
        exchanges: "gradients" are summed over the ranks that hold the same piece, or "weights" are
            averaged over them, weighted by the rows that each has seen.
        every: the steps from one exchange to the next. Gradients in between are added up (a sum,
            not a mean), and weights move once in so many steps. Weights that are averaged move in
            every step, by the rank's own gradients.
        late: how many steps after its own a sum of gradients is used.
        warmup: the number of first steps that are those of `Synchronous`; methods are not called
            in them, and states begin after them.
        momentum: the optimizer's state when weights are averaged: unchanged, averaged too, or
            forgotten.
        keeps_weights: whether the weights are kept that a late gradient was computed at.
        remembers: the states of each parameter, by name, and what they begin with: a number, or
            "weight". They are saved, and cut like the parameter.
        temporaries: the tensors as large as a parameter that a method makes at one time at most,
            for the prediction of memory.
        inexact: why the result differs from that of one process; "": it does not; None: nothing is
            claimed, and that it is one's own is said.

    Gradients that are added up are summed when a checkpoint is written between two exchanges, and
    weights are then averaged, without `averaged`: runs that save at other steps differ, and one
    that is resumed equals the uninterrupted one.
    """

    kind: ClassVar[str] = "strategies"
    exchanges: Exchanges = "gradients"
    every: int = 1
    late: int = 0
    warmup: int = 0
    momentum: Momentum = "keep"
    keeps_weights: bool = False
    remembers: Mapping[str, First] = {}
    temporaries: int = 3
    inexact: str | None = None

    def gradient(self, step: int, grad: Any, weight: Any, then: Any, state: dict[str, Any]) -> Any:
        """The gradient that a weight moves by: clipped afterwards, and given to the optimizer.

        With exchanges="weights" it is the rank's own, and states are only read: else they would
        differ between ranks.

        Args:
            step: the step that moves the weights.
            grad: the sum over the batch, of this step or of a late one.
            weight: the weights that are to move.
            then: the weights that a late gradient was computed at, with `keeps_weights`; else
                `weight`.
            state: the states of the parameter, by name.
        """
        return grad

    def averaged(self, step: int, mean: Any, state: dict[str, Any]) -> Any:
        """The weights to go on from after an averaging.

        Args:
            step: the step that ends with it.
            mean: the mean over the replicas.
            state: the states of the parameter, by name.
        """
        return mean


_STATED = ("exchanges", "every", "late", "warmup", "momentum", "keeps_weights", "temporaries")


class Averaging(Strategy):
    """Local SGD as a strategy."""

    exchanges: Exchanges = "weights"

    def __init__(self, every: int, momentum: Momentum) -> None:
        self.every, self.momentum = every, momentum


class Late(Strategy):
    """Pipelined steps as a strategy.

    Args:
        late: how many steps later a sum is used.
    """

    def __init__(self, late: int, warmup: int) -> None:
        self.late, self.warmup = late, warmup


class Compensated(Late):
    """The same with delay compensation.

    Source: Zheng et al. 2017 (arXiv:1609.08326), as in SAPipe (2022).
    """

    keeps_weights = True

    def __init__(self, late: int, warmup: int, strength: float) -> None:
        super().__init__(late, warmup)
        self.strength = strength

    def gradient(self, step: int, grad: Any, weight: Any, then: Any, state: dict[str, Any]) -> Any:
        """Corrected, element by element, for how far the weights have moved since."""
        return grad.add_(self.strength * grad * grad * (weight - then))


class SyncValue(Value):
    """What all strategies' values have in common."""

    @property
    def strategy(self) -> Strategy:
        """The strategy itself; it sums gradients in every step and uses them, if not said."""
        return Strategy()

    @property
    def timing(self) -> Timing:
        """When ranks exchange what, and when it is used."""
        return Timing.of(self.strategy)

    @property
    def summing(self) -> tuple[Algorithm, AnyCodec | None]:
        """The algorithm by which gradients are summed, and the codec through which they travel."""
        return "auto", None

    @property
    def title(self) -> str:
        """What it is called in errors."""
        return type(self).__name__

    @property
    def shown(self) -> str:
        """What it is called where it is drawn."""
        return str(getattr(self, "kind", "")).replace("_", " ")


class Synchronous(SyncValue):
    """Every step averages all gradients before the optimizer updates: exact at any world size.

    Only `per_round` and `codec` make it inexact.
    """

    kind: Literal["synchronous"] = "synchronous"
    bucket_bytes: int = Field(default=8 << 20, ge=1)
    """The approximate size of a gradient bucket in bytes; buckets are reduced during backward."""
    algorithm: NamedAlgorithm = "auto"
    """The all-reduce algorithm: all sum exactly, in different orders. "auto" is "direct" through
    shared memory within one host, "hierarchical" on several hosts of which some have several ranks,
    and otherwise "backend". That one runs on threads beside backward; the others start their next
    round whenever a gradient is ready, and take no core from it. Or an algorithm of your own, which
    extends `wb.extend.Algorithm`: what it sends is predicted by running it without data."""
    codec: NamedCodec = None
    """The compression of gradients that ranks send: inexact. A name, as "int8", a `Codec`, or one
    of your own, which extends `wb.extend.Codec`. Sums are taken in fp32 or wider, and have the same
    bits on all ranks; "ring", "direct" and "hierarchical", which encodes only between hosts, can
    take one, and "auto" is one of them."""
    per_round: bool = False
    """Update the weights behind the gather after every round, with the mean gradient of its rows,
    and the others once: inexact, for plans with rounds "B" or "B/K". A loss that is not a number
    ends a run after such updates, not before.

    Source: the variable batch of One Weird Trick (arXiv:1404.5997, sec. 4.2)."""

    @model_validator(mode="after")
    def _codec_has_a_place(self) -> Self:
        _check_coded(self.algorithm, self.codec)
        return self

    @property
    def summing(self) -> tuple[Algorithm, AnyCodec | None]:
        """The algorithm and the codec of its fields."""
        return self.algorithm, self.codec

    @property
    def inexact(self) -> str:
        """Why the result differs from that of one process; "": it does not."""
        stepping = "weights behind the gather step after every round" if self.per_round else ""
        return "; ".join(filter(None, (stepping, _coded(self.codec))))


class LocalSGD(SyncValue):
    """Ranks update by themselves, and average their parameters every `every` steps. Inexact.

    In a step the gradient of a parameter is the mean over the rows of the ranks that share its
    piece: the rank's own for a replicated layer, its shard group's for a sharded layer. No gradient
    is sent between replicas. An averaging is over the ranks that hold the same piece, weighted by
    the rows that each has processed since the last one.

    Between two averagings replicas differ, and a model that is evaluated then is each rank's own.
    The last step of a run ends with an averaging.

    A checkpoint holds each parameter and its optimizer state once, so saving is an averaging of
    both, in whatever step it falls, and the run continues from the saved state. A run that is
    resumed therefore equals an uninterrupted one, bit by bit of the saved state; runs that save
    at other steps differ. Let `checkpoint_every` be a multiple of `every` to add no averaging
    of parameters.

    With every=1 and SGD this is `Synchronous` to rounding (momentum "keep" needs the ranks'
    parts of the batch to be the same in every step, an epoch's short last one included).

    Source: the averaging of SplitBrain (arXiv:2112.15317), in the style of MALT (Li et al.,
    EuroSys 2015); local SGD with momentum: Yu, Jin and Yang 2019 (arXiv:1905.03817).
    """

    kind: Literal["local_sgd"] = "local_sgd"
    every: int = Field(default=5, ge=1)
    """Steps between two averagings."""
    momentum: Literal["keep", "average", "reset"] = "keep"
    """The optimizer's state at an averaging: unchanged, averaged too, or forgotten."""
    bucket_bytes: int = Field(default=8 << 20, ge=1)
    """The approximate size of a bucket of parameters in bytes."""

    @property
    def strategy(self) -> Strategy:
        """The averaging."""
        return Averaging(self.every, self.momentum)

    @property
    def inexact(self) -> str:
        """Why the result differs from that of one process; "": it does not."""
        return f"local SGD averages parameters every {self.every} steps"


class Pipelined(SyncValue):
    """Gradients are reduced while the next steps compute, and used `width` - 1 steps late.

    With w[t] the weights that step t computes its gradient G[t] at, and S[t] the sum of G[t] over
    the ranks that hold the same piece,

        w[t+1] = w[t] - lr * S[t - (width - 1)]

    on all ranks alike, so that they stay equal bit by bit; every parameter is equally late, also
    one that has no replicas. For t < width - 1 there is no such sum, and the optimizer's step is
    skipped, since with momentum or weight decay a zero gradient would change weights. The last
    width - 1 sums of a run are not used; they are part of its checkpoints, as all gradients in
    flight are, so that a run that is resumed, also with more steps, equals the uninterrupted one.
    After a change of width the pipeline fills, or drains the oldest sums, at once.

    Width 1 is `Synchronous`, bit by bit.

    Source: Pipe-SGD (arXiv:1811.03619).
    """

    kind: Literal["pipelined"] = "pipelined"
    width: int = Field(default=2, ge=1)
    """The number of steps whose gradients are in flight, the computing one included."""
    warmup: int = Field(default=0, ge=0)
    """The number of first steps that are synchronous. The width - 1 steps after them fill the
    pipeline."""
    algorithm: NamedAlgorithm = "auto"
    """The all-reduce algorithm, as for `Synchronous`."""
    codec: NamedCodec = None
    """The compression of gradients, as for `Synchronous`; also in synchronous steps. Error feedback
    adds its residual to the gradient `width` steps later."""
    compensation: Literal["delay"] | None = None
    """"delay" corrects a late gradient g to g + compensation_lambda * g * g * (w_now - w_then),
    element by element, for the weights that it was computed at and those that it is applied to.
    It keeps a copy of the weights for each gradient in flight.

    Source: delay compensation of Zheng et al. 2017 (arXiv:1609.08326), as in SAPipe (2022)."""
    compensation_lambda: float = Field(default=0.04, ge=0)
    """The strength of a compensation."""
    bucket_bytes: int = Field(default=8 << 20, ge=1)
    """The approximate size of a gradient bucket in bytes, while steps are synchronous; pipelined,
    all gradients of a replica group and a type are reduced at once."""

    @model_validator(mode="before")
    @classmethod
    def _has_no_rounds_of_its_own(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and fields.get("per_round"):
            raise ValueError(
                "per_round steps the weights behind the gather within a step, and Pipelined "
                "steps all weights together, a step or more late; it is valid with Synchronous"
            )
        return fields

    @model_validator(mode="after")
    def _codec_has_a_place(self) -> Self:
        _check_coded(self.algorithm, self.codec)
        return self

    @model_validator(mode="after")
    def _something_is_late(self) -> Self:
        if self.compensation is not None and self.width == 1:
            raise ValueError(
                "compensation corrects gradients that are late, and with width 1 none is; "
                "it is valid with width >= 2"
            )
        return self

    @property
    def strategy(self) -> Strategy:
        """Steps whose gradients are late, corrected where that is wanted."""
        if self.width == 1:
            return Strategy()
        if self.compensation is None:
            return Late(self.width - 1, self.warmup)
        return Compensated(self.width - 1, self.warmup, self.compensation_lambda)

    @property
    def summing(self) -> tuple[Algorithm, AnyCodec | None]:
        """The algorithm and the codec of its fields."""
        return self.algorithm, self.codec

    @property
    def inexact(self) -> str:
        """Why the result differs from that of one process; "": it does not."""
        late = ""
        if self.width > 1:
            late = f"gradients are {self.width - 1} step{'s' if self.width > 2 else ''} late"
            late += f" after {self.warmup} steps" if self.warmup else ""
            late += ", with delay compensation" if self.compensation else ""
        return "; ".join(filter(None, (late, _coded(self.codec))))


class ParameterServer(SyncValue):
    """Every step all ranks send their gradients to one, which sends new weights back: PS-Sync.

    The server computes like all others, adds the gradients in rank order, and is the only one with
    the optimizer's state. A layer that is sharded over groups of k ranks has as many servers as
    pieces: the ranks of the server's own group. Parameters that only one rank holds are updated
    there.

    Exact, like `Synchronous`, and bit for bit the same as with its algorithm "direct". A server of
    n bytes of parameters on p ranks receives and sends (p - 1) n bytes each step.

    Source: the baseline of Pipe-SGD (arXiv:1811.03619), after Li et al. 2014.
    """

    kind: Literal["parameter_server"] = "parameter_server"
    server: int = Field(default=0, ge=0)
    """The server's number in the world."""
    bucket_bytes: int = Field(default=8 << 20, ge=1)
    """The approximate size of a gradient bucket in bytes; gradients are sent in buckets during
    backward, and weights are sent back in the same buckets."""

    @property
    def inexact(self) -> str:
        """Why the result differs from that of one process: "", it does not."""
        return ""


class OwnStrategy(SyncValue):
    """A strategy of your own: an object of a class that extends `wb.extend.Strategy`.

    Raises:
        ExperimentError: it is none, or what it states excludes each other.
    """

    kind: Literal["own"] = "own"
    given: OwnObject
    """The object or its class, "module:attribute" of either, or the name of an installed one."""
    bucket_bytes: int = Field(default=8 << 20, ge=1)
    """The approximate size of a bucket of gradients, or of parameters that are averaged."""
    algorithm: NamedAlgorithm = "auto"
    """The all-reduce algorithm of gradients, as for `Synchronous`."""
    codec: NamedCodec = None
    """The compression of gradients, as for `Synchronous`."""
    states: Timing | None = None
    """What the strategy states, so that its text says it where the object is not there."""
    claims: str | None = None
    """Its own `inexact`."""

    def __init__(self, /, *given: Any, **fields: Any) -> None:
        if len(given) > 1:
            raise TypeError("OwnStrategy takes its strategy alone without a name")
        super().__init__(**dict(zip(("given",), given, strict=False)), **fields)

    @field_validator("given", mode="before")
    @classmethod
    def _named(cls, given: object) -> object:
        return named(given, Strategy.kind, ())

    @model_validator(mode="after")
    def _stated(self) -> Self:
        own: Own = self.given
        if own.held is not None or self.states is None:
            strategy = extension_of(own, Strategy.kind)
            timing = Timing.of(strategy)
            if self.states not in (None, timing):
                raise ValueError(
                    f"{self.title} states other things here than in the experiment's text: "
                    f"{timing!r}, not {self.states!r}; it was changed since"
                )
            self.__dict__["states"], self.__dict__["claims"] = timing, strategy.inexact
        return self

    @model_validator(mode="after")
    def _codec_has_a_place(self) -> Self:
        _check_coded(self.algorithm, self.codec)
        if self.codec is not None and (self.timing.of_weights or self.timing.adds_up):
            raise ValueError(
                f"codec: {self.title} sums no gradients in every step, and what a codec leaves out "
                "of one is added to the next; it is valid with exchanges='gradients' and every=1"
            )
        return self

    @property
    def strategy(self) -> Strategy:
        """The object."""
        found: Strategy = extension_of(self.given, Strategy.kind)
        return found

    @property
    def timing(self) -> Timing:
        """What the strategy states.

        Raises:
            ExperimentError: the strategy has no `states`.
        """
        if self.states is None:
            raise ExperimentError(f"nothing is known of {self.title}")
        return self.states

    @property
    def summing(self) -> tuple[Algorithm, AnyCodec | None]:
        """The algorithm and the codec of its fields."""
        return self.algorithm, self.codec

    @property
    def title(self) -> str:
        """Its own name."""
        return name_of(self.given)

    @property
    def shown(self) -> str:
        """Its own name."""
        return self.title

    @property
    def inexact(self) -> str:
        """What the strategy states; if nothing, that it is one's own."""
        own = f"by a strategy of one's own, {self.title}" if self.claims is None else self.claims
        return "; ".join(filter(None, (own, _coded(self.codec))))


_BUILT_IN: dict[str, type[Value]] = {
    "synchronous": Synchronous,
    "local_sgd": LocalSGD,
    "pipelined": Pipelined,
    "parameter_server": ParameterServer,
}


def _own_strategy(given: object) -> object:
    """A strategy of one's own, or its place, for the value of it."""
    is_place = False
    if isinstance(given, str) and given not in _BUILT_IN:
        is_place = ":" in given or given in installed(Strategy.kind)
    is_class = isinstance(given, type) and issubclass(given, Strategy)
    return OwnStrategy(given) if is_place or is_class or isinstance(given, Strategy) else given


AnySync = Synchronous | LocalSGD | Pipelined | ParameterServer | OwnStrategy

Sync = Annotated[
    Annotated[AnySync, Field(discriminator="kind")],
    by_name(
        "sync",
        _BUILT_IN,
        "a wb.extend.Strategy, 'module:attribute' of one, and the name of an installed one",
    ),
    BeforeValidator(_own_strategy),
]


def check_own(sync: Sync) -> None:
    """Loads what is a person's own in a strategy, and checks that it goes together."""
    algorithm, codec = sync.summing
    if isinstance(algorithm, Own):
        algorithm_of(algorithm)
    if isinstance(codec, OwnCodec):
        extension_of(codec.own, "codecs")
    if codec is not None:
        chosen(algorithm, (1,), "gloo", 0, beside=True, codec=codec.name)


def warm(sync: Sync) -> Pipelined:
    """What a strategy's first steps are, if these are unlike the others: synchronous."""
    algorithm, codec = sync.summing
    return Pipelined(width=1, algorithm=algorithm, codec=codec, bucket_bytes=sync.bucket_bytes)


def check_pieces(plan: Plan, sync: Sync) -> None:
    """Checks that no weight steps by a piece of other ranks' rows alone: some tokens, or heads."""
    per_round = isinstance(sync, Synchronous) and sync.per_round
    if not (sync.timing.of_weights or per_round) or not plan.is_at_hand:
        return
    learns = plan.graph.learning
    for layer in plan.graph.layers:
        way = plan.flow.ways.get(layer.name)
        if way is None:
            continue
        # What only this operation reads has a gradient that is summed over its group at once.
        summed = set() if way[0].of_tokens else {one.name for one in read_whole(plan.graph, layer)}
        read = {name for name in layer.inputs if name in learns and not plan.graph.rows_of(name)}
        if layer.parameters > 0 or read - summed:
            what, remedy = "heads", "keep the linear layers before it whole (scheme='replicate')"
            if way[0].of_tokens:
                what, remedy = "tokens", "use rows instead (plan.with_shard_tokens(False))"
            raise ValueError(
                f"layer {layer.name!r} has some {what} of all rows of its group, so that a rank's "
                f"gradient is a summand, and under {sync.title}{', per_round=True' * per_round} "
                f"weights step before these are summed: {remedy}, or Synchronous, "
                "ParameterServer or Pipelined"
            )


def _check_coded(algorithm: Algorithm, codec: AnyCodec | None) -> None:
    """Checks that this algorithm can take this codec, where that is known without loading one."""
    if codec is not None and (not isinstance(algorithm, Own) or algorithm.held is not None):
        chosen(algorithm, (1,), "gloo", 0, beside=True, codec=codec.name)


def _coded(codec: AnyCodec | None) -> str:
    return "" if codec is None else f"gradients travel as {codec.inexact}"
