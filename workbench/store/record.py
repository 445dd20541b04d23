"""What is submitted, and what is known of it, of engines and of what happened: plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from workbench.store.errors import ControlMessageTooLarge
from workbench.store.process import ProcessIdentity as ProcessIdentity

JobKind = Literal["train", "call", "lease"]
JobState = Literal[
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
ENDED: frozenset[JobState] = frozenset(("finished", "stopped", "failed", "cancelled", "parked"))
RUN_STATES: Mapping[JobState, str] = {"cancelled": "stopped", "parked": "failed"}
"""States of jobs that have other names as the state of a run."""
ACTIVE: frozenset[JobState] = frozenset(("starting", "running", "stopping"))
"""States of jobs that hold engines."""

EngineState = Literal["starting", "idle", "busy", "dead", "paused"]
Level = Literal["info", "warning", "error"]
MessageDirection = Literal["sent", "received"]
"""As the job server sees it."""

LARGEST_MESSAGE_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is submitted.

    Attributes:
        kind: the kind of job: "train"; "call", which is not restarted, and cancelled when its owner
            is gone; "lease", engines for several calls, until they are released.
        name: the job's name, for people.
        task: the function that is called on every rank, "module:function".
        packed: the packed experiment, or where its file is (`messages.sendable`), at most 64 KiB.
        keywords: the packed further arguments of the ranks (`messages.pack_keywords`), at most 64
            KiB.
        places: the engines that it is to have, and no others; None: any.
        priority: the priority; higher goes first.
        seconds: the predicted duration in seconds, for backfill; None: it is not known.
        memory_bytes: the predicted memory of each rank, in bytes; None: it is not known.
        device: the kind of device that is needed; None: any.
        preemptible: whether jobs of higher priority may have it paused at a checkpoint.
        steps: the number of steps of the experiment; 0 where it has none.
        max_attempts: the number of failures at the same step after which it is parked.
        needs_weights: whether ranks begin with the model's initial weights, which the assistant
            writes before; they get the file as `weights`.

    Raises:
        ValueError: a field has no possible value.
        ControlMessageTooLarge: what is packed takes more than 64 KiB.
    """

    kind: JobKind
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
    preemptible: bool = True
    steps: int = 0
    max_attempts: int = 3
    owner: ProcessIdentity | None = None
    tag: str = ""
    needs_weights: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(JobKind):
            raise ValueError(f"a job is one of {get_args(JobKind)}, got {self.kind!r}")
        if isinstance(self.engines, bool) or not isinstance(self.engines, int) or self.engines < 1:
            raise ValueError(f"a job has a positive number of engines, got {self.engines!r}")
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
        }.items():
            if len(packed) > LARGEST_MESSAGE_BYTES:
                raise ControlMessageTooLarge(
                    f"{what} of {self.name!r}: {len(packed):,} bytes; control messages have at "
                    f"most {LARGEST_MESSAGE_BYTES:,}"
                )


@dataclass(frozen=True)
class ErrorRecord:
    """Why a job failed, as `RankError` and `EngineDied` say it.

    Attributes:
        kind: the exception's class; "EngineDied" where a process ended.
        layer: the layer in which it failed; None where that is not known.
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
        number: the attempt's number, from 1 on.
        started_at: when it began, in seconds since the epoch.
        ended_at: when it ended, in seconds since the epoch.
        reason: how it ended, for people; "" where it ended well.
        is_lost: whether a process or a connection was lost, so that the job was tried again.
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
        id: the job's number, from 1 on.
        state: the state, one of `JobState`.
        attempt: the number of the attempt that runs or ran last; 0 before the first.
        held: the engine of each rank of this attempt; () while it holds none.
        submitted_at: when it was submitted, in seconds since the epoch.
        started_at: when the first attempt began, in seconds since the epoch.
        began_at: when it was given the engines that it holds; None while it holds none.
        ran_s: the seconds for which it held engines before.
        ended_at: when it took a state of `ENDED`, in seconds since the epoch.
        reason: why it waits, or how it ended, for people.
        requested: why it is to end its attempt: "stop", "pause", "cancel" or "preempt"; "" while
            it is to go on.
    """

    id: int
    state: JobState = "queued"
    attempt: int = 0
    held: tuple[int, ...] = ()
    processes: tuple[ProcessIdentity, ...] = ()
    submitted_at: float = 0.0
    started_at: float | None = None
    began_at: float | None = None
    ran_s: float = 0.0
    ended_at: float | None = None
    step: int = 0
    reason: str = ""
    error: ErrorRecord | None = None
    checkpoint: str | None = None
    attempts: tuple[AttemptRecord, ...] = ()
    requested: str = ""

    @property
    def pids(self) -> tuple[int, ...]:
        """The process id of each rank."""
        return tuple(process.pid for process in self.processes)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will happen to it by itself."""
        return self.state in ENDED


@dataclass(frozen=True, kw_only=True)
class EngineRecord:
    """One engine.

    Attributes:
        engine_id: the number by which ipyparallel knows it; None until it has registered.
        process: its process; None until it was started.
        kind: the kind of device: "cuda" or "cpu".
        memory_bytes: the memory of the device, in bytes.
        is_assistant: whether it has all of the host, and so only serves jobs that name its place.
        state: the state, one of `EngineState`.
        since: when it took this state, in seconds since the epoch.
        cpu_share: the processor time over time, of one core.
        rss_bytes: the resident memory, in bytes.
        gpu_bytes: the memory in use on its GPU, in bytes.
    """

    index: int
    engine_id: int | None = None
    process: ProcessIdentity | None = None
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

    @property
    def pid(self) -> int | None:
        """The id of its process."""
        return None if self.process is None else self.process.pid


@dataclass(frozen=True, kw_only=True)
class EventRecord:
    """Something that people want to know of; `time` is in seconds since the epoch."""

    id: int
    time: float
    level: Level
    kind: str
    text: str
    job: int | None = None
    engine: int | None = None


@dataclass(frozen=True, kw_only=True)
class CommandRecord:
    """What the job server, or the supervisor, is asked to do.

    Attributes:
        id: the command's number; commands are carried out in this order.
        kind: what is asked: "stop", "pause", "resume", "cancel", "priority", "release",
            "expect_paused", "shutdown" and others.
        payload: the further arguments, plain values.
        at: when it was given, in seconds since the epoch.
        done_at: when it was carried out, or refused, in seconds since the epoch.
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
