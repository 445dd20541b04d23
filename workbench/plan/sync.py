"""Step strategies as values: when ranks exchange what they have learnt."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from workbench.plan.all_reduce import Algorithm, chosen
from workbench.plan.codec import Codec, NamedCodec
from workbench.plan.value import Value


class Synchronous(Value):
    """Every step averages all gradients before the optimizer moves: exact at any world size.

    Only `per_round` and `codec` make it inexact.
    """

    kind: Literal["synchronous"] = "synchronous"
    bucket_bytes: int = Field(default=8 << 20, ge=1)
    """Gradients travel in buckets of about this many bytes, while backward goes on."""
    algorithm: Algorithm = "auto"
    """How gradients are summed: exactly by all, in different orders. "auto" is "direct" through
    shared memory within one host, "hierarchical" on several of which some have several ranks, and
    otherwise "backend". That one runs on threads beside backward; the others go on to their next
    round whenever a gradient is ready, and take no core from it."""
    codec: NamedCodec = None
    """What gradients become while they travel between ranks: inexact. A name, as "int8", or a
    `Codec`. Sums are taken in fp32 or wider, and have the same bits on all ranks; "ring", "direct"
    and "hierarchical", which codes only between hosts, can take one, and "auto" is one of them."""
    per_round: bool = False
    """Step the weights behind the gather after every round, with the mean gradient of its rows,
    and the others once: inexact, for plans with rounds "B" or "B/K". A loss that is no number
    ends a run after such updates, not before.

    Source: the variable batch of One Weird Trick (arXiv:1404.5997, sec. 4.2)."""

    @model_validator(mode="after")
    def _codec_has_a_place(self) -> Self:
        _check_coded(self.algorithm, self.codec)
        return self

    @property
    def inexact(self) -> str:
        """Why it computes something else than one process does; empty: it computes the same."""
        stepping = "weights behind the gather step after every round" if self.per_round else ""
        return "; ".join(filter(None, (stepping, _coded(self.codec))))


class LocalSGD(Value):
    """Ranks step by themselves, and average their parameters every `every` steps. Inexact.

    In a step the gradient of a parameter is the mean over the rows that the rank sees with it:
    its own for a replicated layer, its shard group's for a layer in groups. No gradient
    travels between ranks. An averaging is over the ranks that hold the same piece, weighted
    with the rows that each has seen since the last one.

    Between two averagings replicas differ, and a model that is evaluated then is the ranks'
    own ones. The last step of a run ends with an averaging.

    A checkpoint holds each parameter and its optimizer state once, so saving is an averaging of
    both, in whatever step it falls, and the run goes on from what was saved. A run that is
    resumed therefore equals the one that went on, bit by bit of what was saved; runs that save
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
    """At an averaging the optimizer's state stays as it is, is averaged too, or is forgotten."""
    bucket_bytes: int = Field(default=8 << 20, ge=1)
    """Parameters travel in buckets of about this many bytes."""

    @property
    def inexact(self) -> str:
        """Why it computes something else than one process does; empty: it computes the same."""
        return f"local SGD averages parameters every {self.every} steps"


class Pipelined(Value):
    """Gradients are summed while the next steps compute, and used `width` - 1 steps late.

    With w[t] the weights that step t computes its gradient G[t] at, and S[t] the sum of G[t] over
    the ranks that hold the same piece,

        w[t+1] = w[t] - lr * S[t - (width - 1)]

    on all ranks alike, so that they stay equal bit by bit; every parameter is equally late, also
    one that has no replicas. For t < width - 1 there is no such sum, and the optimizer's step is
    skipped: with momentum or weight decay a gradient of zero would be no such thing. The last
    width - 1 sums of a run are not used; they are part of its checkpoints, as those in flight
    always are, so that a run that is resumed, also with more steps, is the one that was not
    interrupted. After a change of width the pipeline fills, or drains the oldest sums, at once.

    Width 1 is `Synchronous`, bit by bit.

    Source: Pipe-SGD (arXiv:1811.03619).
    """

    kind: Literal["pipelined"] = "pipelined"
    width: int = Field(default=2, ge=1)
    """Steps whose gradients are under way at one time, the computing one included."""
    warmup: int = Field(default=0, ge=0)
    """The first so many steps are synchronous. The width - 1 steps after them fill the pipeline."""
    algorithm: Algorithm = "auto"
    """How gradients are summed, as under `Synchronous`."""
    codec: NamedCodec = None
    """What gradients become while they travel, as under `Synchronous`; synchronous steps too.
    What error feedback keeps, it adds to the gradient `width` steps later; it is in no checkpoint,
    so that a resumed run begins without."""
    compensation: Literal["delay"] | None = None
    """"delay" corrects a late gradient g to g + compensation_lambda * g * g * (w_now - w_then),
    element by element, for the weights that it was computed at and those that it is applied to.
    It keeps a copy of the weights for each gradient in flight.

    Source: delay compensation of Zheng et al. 2017 (arXiv:1609.08326), as in SAPipe (2022)."""
    compensation_lambda: float = Field(default=0.04, ge=0)
    """How strong a compensation is."""
    bucket_bytes: int = Field(default=8 << 20, ge=1)
    """While steps are synchronous, gradients travel in buckets of about this many bytes, as under
    `Synchronous`; pipelined, all gradients of a replica group and a type travel at once."""

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
    def inexact(self) -> str:
        """Why it computes something else than one process does; empty: it computes the same."""
        late = ""
        if self.width > 1:
            late = f"gradients are {self.width - 1} step{'s' if self.width > 2 else ''} late"
            late += f" after {self.warmup} steps" if self.warmup else ""
            late += ", with delay compensation" if self.compensation else ""
        return "; ".join(filter(None, (late, _coded(self.codec))))


class ParameterServer(Value):
    """Every step all ranks send their gradients to one, which sends new weights back: PS-Sync.

    The server computes like all others, adds what it is sent in rank order, and is the only one
    with the optimizer's state. A layer that lies over groups of k ranks has as many servers as
    pieces: the ranks of the server's own group. What only one rank holds, it updates itself.

    Exact, like `Synchronous`, and bit for bit the same as with its algorithm "direct". A server of
    n bytes of parameters on p ranks receives and sends (p - 1) n of them each step.

    Source: the baseline of Pipe-SGD (arXiv:1811.03619), after Li et al. 2014.
    """

    kind: Literal["parameter_server"] = "parameter_server"
    server: int = Field(default=0, ge=0)
    """A rank of the world."""
    bucket_bytes: int = Field(default=8 << 20, ge=1)
    """Gradients travel in buckets of about this many bytes, while backward goes on; so do the
    weights that come back."""

    @property
    def inexact(self) -> str:
        """Empty: it computes the same as one process does."""
        return ""


Sync = Annotated[Synchronous | LocalSGD | Pipelined | ParameterServer, Field(discriminator="kind")]


def _check_coded(algorithm: Algorithm, codec: Codec | None) -> None:
    """Raises unless this algorithm can take this codec."""
    if codec is not None:
        chosen(algorithm, (1,), "gloo", 0, beside=True, codec=codec.name)


def _coded(codec: Codec | None) -> str:
    return "" if codec is None else f"gradients travel as {codec.inexact}"
