"""Step strategies as values: when ranks exchange what they have learnt."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from workbench.plan.all_reduce import Algorithm, chosen
from workbench.plan.codec import NamedCodec
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
        if self.codec is not None:
            chosen(self.algorithm, (1,), "gloo", 0, beside=True, codec=self.codec.name)
        return self

    @property
    def inexact(self) -> str:
        """Why it computes something else than one process does; empty: it computes the same."""
        stepping = "weights behind the gather step after every round" if self.per_round else ""
        coded = f"gradients travel as {self.codec.inexact}" if self.codec is not None else ""
        return "; ".join(filter(None, (stepping, coded)))


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


Sync = Annotated[Synchronous | LocalSGD, Field(discriminator="kind")]
