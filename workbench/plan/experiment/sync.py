"""Synchronisation strategies as values: when ranks exchange gradients or weights, and how."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from workbench.plan.experiment.codec import Codec, NamedCodec
from workbench.plan.value import Value, by_name

Algorithm = Literal["auto", "direct", "ring", "halving_doubling", "hierarchical", "backend"]
"""The all-reduce algorithms. All sum exactly, in different orders; "backend" is what gloo or nccl
do themselves."""

CODED: tuple[Algorithm, ...] = ("auto", "direct", "ring", "hierarchical")
"""The algorithms that can send values through a codec."""

MOST_DIRECT = 8
""""auto" with a codec is "direct" up to so many hosts, and "ring" beyond. Both send and encode the
same; "direct" rounds values less often and has 2 rounds, not 2 (k-1), but receives all at once.
Where some of several hosts have several ranks, "auto" is "hierarchical"."""


@dataclass(frozen=True)
class Thresholds:
    """The largest messages of an algorithm, where no two ranks share memory.

    Attributes:
        direct: the most bytes of a "direct" all-reduce; beyond, the backend's own is used.
    """

    direct: int


THRESHOLDS = Thresholds(direct=2**16)
"""Measured with `python -m workbench.bench collectives`, which has a row for each algorithm over
gloo. Of four ranks on four cores, medians of seven interleaved rounds, in ms:

                      1 KB    1 MB    4 MB    64 MB
    gloo's own         5.1     7.7      10      103
    direct             6.6     8.4      14      191
    ring               8.4     9.5      13      171
    halving_doubling   7.1      10      15      222

Gloo's own has fewer threads to wake, and sums in place; it stays some 10 % faster below 64 KB too,
also over a link of 1 Gbit/s (`bench hierarchical`). Small sums are direct all the same: taken in
rank order, they have the bits that they have in shared memory.
"""


def chosen(
    algorithm: Algorithm,
    hosts: Sequence[int],
    backend: str,
    nbytes: int,
    *,
    beside: bool,
    codec: str = "",
) -> Algorithm:
    """The algorithm that a group uses for `algorithm`: itself, or the one that "auto" means there.

    Args:
        algorithm: the algorithm that is asked for.
        hosts: how many of the group's ranks share the memory of each host; a rank that shares none
            is a host of its own.
        backend: the torch.distributed backend: "gloo" or "nccl".
        nbytes: the bytes that each rank contributes.
        beside: whether the data are in a rank's own memory, and are reduced while the rank
            computes.
        codec: the name of the codec that the data are compressed with; "": none.

    Raises:
        ValueError: an unknown algorithm, or one that cannot take a codec.
    """
    if algorithm not in get_args(Algorithm):
        names = ", ".join(map(repr, get_args(Algorithm)))
        raise ValueError(f"no all-reduce algorithm {algorithm!r}; there are {names}")
    if codec and algorithm not in CODED:
        names = ", ".join(map(repr, CODED))
        raise ValueError(f"algorithm {algorithm!r} cannot take codec {codec!r}; {names} can")
    if algorithm != "auto":
        return algorithm
    if codec:
        shared = 1 < len(hosts) < sum(hosts)
        return "hierarchical" if shared else "direct" if len(hosts) <= MOST_DIRECT else "ring"
    if len(hosts) == 1:
        return "backend" if beside else "direct"
    if len(hosts) < sum(hosts):
        return "hierarchical"
    if beside or backend != "gloo" or nbytes > THRESHOLDS.direct:
        return "backend"
    return "direct"


class Synchronous(Value):
    """Every step averages all gradients before the optimizer updates: exact at any world size.

    Only `per_round` and `codec` make it inexact.
    """

    kind: Literal["synchronous"] = "synchronous"
    bucket_bytes: int = Field(default=8 << 20, ge=1)
    """The approximate size of a gradient bucket in bytes; buckets are reduced during backward."""
    algorithm: Algorithm = "auto"
    """The all-reduce algorithm: all sum exactly, in different orders. "auto" is "direct" through
    shared memory within one host, "hierarchical" on several hosts of which some have several ranks,
    and otherwise "backend". That one runs on threads beside backward; the others start their next
    round whenever a gradient is ready, and take no core from it."""
    codec: NamedCodec = None
    """The compression of gradients that ranks send: inexact. A name, as "int8", or a `Codec`. Sums
    are taken in fp32 or wider, and have the same bits on all ranks; "ring", "direct" and
    "hierarchical", which encodes only between hosts, can take one, and "auto" is one of them."""
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
    def inexact(self) -> str:
        """Why the result differs from that of one process; "": it does not."""
        stepping = "weights behind the gather step after every round" if self.per_round else ""
        return "; ".join(filter(None, (stepping, _coded(self.codec))))


class LocalSGD(Value):
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
    def inexact(self) -> str:
        """Why the result differs from that of one process; "": it does not."""
        return f"local SGD averages parameters every {self.every} steps"


class Pipelined(Value):
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
    algorithm: Algorithm = "auto"
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
    def inexact(self) -> str:
        """Why the result differs from that of one process; "": it does not."""
        late = ""
        if self.width > 1:
            late = f"gradients are {self.width - 1} step{'s' if self.width > 2 else ''} late"
            late += f" after {self.warmup} steps" if self.warmup else ""
            late += ", with delay compensation" if self.compensation else ""
        return "; ".join(filter(None, (late, _coded(self.codec))))


class ParameterServer(Value):
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


Sync = Annotated[
    Annotated[Synchronous | LocalSGD | Pipelined | ParameterServer, Field(discriminator="kind")],
    by_name(
        "sync",
        {
            "synchronous": Synchronous,
            "local_sgd": LocalSGD,
            "pipelined": Pipelined,
            "parameter_server": ParameterServer,
        },
    ),
]


def _check_coded(algorithm: Algorithm, codec: Codec | None) -> None:
    """Checks that this algorithm can take this codec."""
    if codec is not None:
        chosen(algorithm, (1,), "gloo", 0, beside=True, codec=codec.name)


def _coded(codec: Codec | None) -> str:
    return "" if codec is None else f"gradients travel as {codec.inexact}"
