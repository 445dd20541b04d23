"""What is submitted, and what is known of it, of engines and of what happened: plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from workbench.store.errors import ControlMessageTooLarge
from workbench.store.owner import Owner as Owner

Kind = Literal["train", "call", "lease"]
State = Literal[
    "queued",
    "starting",
    "running",
    "stopping",
    "paused",
    "finished",
    "stopped",
    "failed",
    "cancelled",
    "parked",
]
ENDED: frozenset[State] = frozenset(("finished", "stopped", "failed", "cancelled", "parked"))
ACTIVE: frozenset[State] = frozenset(("starting", "running", "stopping"))
"""States of jobs that hold engines."""

EngineState = Literal["starting", "idle", "busy", "dead", "paused"]
Level = Literal["info", "warning", "error"]
Direction = Literal["sent", "received"]
"""As the job server sees it."""

LARGEST_MESSAGE_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is submitted.

    Attributes:
        kind: "train"; "call": not restarted, and cancelled when its owner is gone; "lease":
            engines for several calls, until they are released.
        name: what it is, for people.
        task: "module:function", called on every rank.
        packed: the experiment (`cluster.message.pack`), at most 64 KiB.
        keywords: packed further arguments of the ranks, at most 64 KiB.
        engines: ranks that are wanted.
        places: these engines and no others.
        lease: the lease that a call runs under.
        directory: the job's folder.
        priority: higher goes first.
        seconds: predicted duration, for backfill.
        memory_bytes: predicted of each rank.
        device: kind of device that is needed.
        min_engines: fewest ranks that an elastic job goes on with; None: `engines`.
        max_engines: most ranks that it grows to; None: `engines`.
        variants: the packed experiment for each other number of ranks.
        preemptible: whether jobs of higher priority may have it paused at a checkpoint.
        steps: of the experiment; 0 where it has none.
        max_attempts: failures at the same step after which it is parked.
        owner: who waits for it.
        tag: the sweep that it is part of.

    Raises:
        ValueError: a field has no possible value.
        ControlMessageTooLarge: what is packed takes more than 64 KiB.
    """

    kind: Kind
    name: str
    task: str
    packed: bytes = b""
    keywords: bytes = b""
    engines: int
    places: tuple[int, ...] | None = None
    lease: int | None = None
    directory: str = ""
    priority: int = 0
    seconds: float | None = None
    memory_bytes: int | None = None
    device: Literal["cuda", "cpu"] | None = None
    min_engines: int | None = None
    max_engines: int | None = None
    variants: Mapping[int, bytes] = field(default_factory=dict)
    preemptible: bool = True
    steps: int = 0
    max_attempts: int = 3
    owner: Owner | None = None
    tag: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"a job is one of {get_args(Kind)}, got {self.kind!r}")
        if isinstance(self.engines, bool) or not isinstance(self.engines, int) or self.engines < 1:
            raise ValueError(f"a job has a positive number of engines, got {self.engines!r}")
        if not 1 <= self._fewest <= self.engines <= self._most:
            raise ValueError(
                f"an elastic job has 1 <= min_engines <= engines <= max_engines, got "
                f"{self.min_engines}, {self.engines}, {self.max_engines}"
            )
        if self.places is not None and (
            len(self.places) != self.engines or len(set(self.places)) != self.engines
        ):
            raise ValueError(
                f"{self.engines} different places are needed for {self.engines} engines, "
                f"got {self.places}"
            )
        if self.seconds is not None and not self.seconds >= 0:
            raise ValueError(f"predicted seconds are not negative, got {self.seconds!r}")
        if self.max_attempts < 1:
            raise ValueError(f"a job has at least one attempt, got {self.max_attempts!r}")
        for what, packed in {
            "the experiment": self.packed,
            "the arguments": self.keywords,
            **{f"the experiment for {n} ranks": one for n, one in self.variants.items()},
        }.items():
            if len(packed) > LARGEST_MESSAGE_BYTES:
                raise ControlMessageTooLarge(
                    f"{what} of {self.name!r}: {len(packed):,} bytes; control messages have at "
                    f"most {LARGEST_MESSAGE_BYTES:,}"
                )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of ranks that there is a plan for, in rising order."""
        planned = {n for n in self.variants if self._fewest <= n <= self._most}
        return tuple(sorted({self.engines, *planned}))

    @property
    def _fewest(self) -> int:
        return self.engines if self.min_engines is None else self.min_engines

    @property
    def _most(self) -> int:
        return self.engines if self.max_engines is None else self.max_engines


@dataclass(frozen=True)
class ErrorRecord:
    """Why a job failed, as `RankError` and `EngineDied` say it.

    Attributes:
        kind: the exception's class; "EngineDied" where a process ended.
        text: what people read.
        rank: the rank that failed first.
        layer: the layer in which it did.
        remote_traceback: its traceback.
        death: how its process ended, "was ended by SIGKILL".
    """

    kind: str
    text: str
    rank: int = 0
    layer: str | None = None
    remote_traceback: str = ""
    death: str = ""


@dataclass(frozen=True)
class AttemptRecord:
    """An attempt that is over.

    Attributes:
        number: from 1 on.
        places: the engine of each rank.
        started_at: seconds since the epoch.
        ended_at: likewise.
        step: updates that were done when it ended.
        reason: how it ended, for people; "" where it ended well.
        resumed: updates that were done when it began.
        is_lost: whether a process or a connection was lost, so that it was tried again.
    """

    number: int
    places: tuple[int, ...]
    started_at: float
    ended_at: float
    step: int = 0
    reason: str = ""
    resumed: int = 0
    is_lost: bool = False


@dataclass(frozen=True, kw_only=True)
class JobRecord(Request):
    """What was submitted, and how it goes.

    Attributes:
        id: its number, from 1 on.
        state: one of `State`.
        attempt: number of the attempt that runs or ran last; 0 before the first.
        held: the engine of each rank of this attempt; () while it holds none.
        pids: the process of each.
        submitted_at: seconds since the epoch.
        started_at: when the first attempt began.
        began_at: when it was given the engines that it holds; None while it holds none.
        ran_s: for how long it held engines before.
        ended_at: when it took a state of `ENDED`.
        step: updates that are done.
        reason: why it waits, or how it ended, for people.
        error: why it failed.
        checkpoint: the newest whole one.
        predicted_start: seconds since the epoch, while it is queued.
        attempts: those that are over.
        wish: what it ends its attempt for: "stop", "pause", "cancel", "preempt" or "resize"; ""
            while it is to go on.
    """

    id: int
    state: State = "queued"
    attempt: int = 0
    held: tuple[int, ...] = ()
    pids: tuple[int, ...] = ()
    submitted_at: float = 0.0
    started_at: float | None = None
    began_at: float | None = None
    ran_s: float = 0.0
    ended_at: float | None = None
    step: int = 0
    reason: str = ""
    error: ErrorRecord | None = None
    checkpoint: str | None = None
    predicted_start: float | None = None
    attempts: tuple[AttemptRecord, ...] = ()
    wish: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will happen to it by itself."""
        return self.state in ENDED


@dataclass(frozen=True, kw_only=True)
class EngineRecord:
    """One engine.

    Attributes:
        index: its place in the cluster.
        engine_id: ipyparallel's number of it; None until it has registered.
        pid: its process.
        name: the device's product name.
        kind: "cuda" or "cpu".
        memory_bytes: of the device.
        is_assistant: whether it has all of the host, and so only serves jobs that name its place.
        state: one of `EngineState`.
        job: what it is held by.
        since: when it took this state, in seconds since the epoch.
        death: how its last process ended.
        cpu_share: processor time over time, of one core.
        rss_bytes: resident memory.
        gpu_bytes: memory in use on its GPU.
    """

    index: int
    engine_id: int | None = None
    pid: int | None = None
    name: str = ""
    kind: Literal["cuda", "cpu"] = "cpu"
    memory_bytes: int = 0
    is_assistant: bool = False
    state: EngineState = "starting"
    job: int | None = None
    since: float = 0.0
    death: str = ""
    cpu_share: float = 0.0
    rss_bytes: int = 0
    gpu_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that people want to know of; `time` is in seconds since the epoch."""

    id: int
    time: float
    level: Level
    kind: str
    text: str
    job: int | None = None
    engine: int | None = None


@dataclass(frozen=True, kw_only=True)
class Command:
    """What the job server, or the supervisor, is asked to do.

    Attributes:
        id: its number; commands are carried out in this order.
        kind: "stop", "pause", "resume", "cancel", "priority", "release", "expect_paused",
            "shutdown" and others.
        job: what it is about.
        payload: further arguments, plain values.
        at: when it was given, in seconds since the epoch.
        done_at: when it was carried out, or refused.
        error: why it was refused; "" where it was not.
    """

    id: int
    kind: str
    job: int | None = None
    payload: Mapping[str, Any] = field(default_factory=dict)
    at: float = 0.0
    done_at: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Tally:
    """Messages, and their bytes."""

    messages: int = 0
    bytes: int = 0
