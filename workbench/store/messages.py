"""What travels to engines and back: an experiment, keywords, how a call or training ended.

The envelopes are TOML and JSON, so that whoever reads one executes nothing. What may hold code, the
user's own module, arguments and what a call returned, is in them under a MAC (`sealed`), and is
opened by who has the cluster's key: engines, and for what a call returned, who has called.

An experiment that is too large for a message lies in a file of the cluster's folder, and its
message names that file and says what is in it:

    small:  0 or 1 | MAC where that is 1 | lengths | compressed TOML | skeletons
    large:  2 | SHA-256 of the file | its path              the file: as a small one

A message is trusted by who has the key and finds the MAC right: only there is what an experiment
names imported, and are skeletons, which are code, unpacked.
"""

import base64
import hashlib
import json
import os
import struct
import time
import traceback
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.extension import sealed
from workbench.plan.extension.user_object import mapped
from workbench.plan.graph.graph import Graph
from workbench.plan.io.files import write_whole
from workbench.plan.plans.plan import Plan
from workbench.store.errors import ClusterError, ControlMessageTooLarge
from workbench.store.record import LARGEST_MESSAGE_BYTES

LARGEST_INLINE_BYTES = LARGEST_MESSAGE_BYTES // 2
"""Of an experiment in a message: its arguments travel to engines in the same one."""

_HEAD = struct.Struct("=II")
_OPEN, _SEALED, _REFERENCE = b"\0", b"\1", b"\2"
_DIGEST_BYTES = hashlib.sha256().digest_size


def pack(experiment: Experiment, key: bytes = b"") -> bytes:
    """Returns the experiment's TOML, compressed, then its module's skeletons where it has some.

    One is of the module in training, the other in evaluation, if it takes another way then.

    Args:
        key: the cluster's key, for the MAC; b"": nobody trusts the message, and there are no
            skeletons.

    Raises:
        OwnObjectError: the experiment was itself read from a text that is not trusted.
        ValueError: there are skeletons, and no key.
    """
    text = zlib.compress(experiment.to_toml().encode(), 9)
    graph: Graph = experiment.plan.graph
    training = graph.source.skeleton or b""
    evaluating = graph.evaluation.source.skeleton or b"" if graph.evaluation else b""
    packed = _HEAD.pack(len(text), len(training)) + text + training + evaluating
    if not (key or training):
        return _OPEN + packed
    mapped(experiment, lambda own, _: own.trusted)
    return _SEALED + sealed.seal(packed, key)


def sendable(packed: bytes, folder: Path) -> bytes:
    """Returns a packed experiment as a message: itself, or what refers to a file that has it.

    A file is named by its content, so that equal experiments have one. It stays for as long as the
    folder does, as the store's jobs do, which may name it.

    Args:
        folder: the folder of such files, in the cluster's; it is made where there is a first one.

    Raises:
        OSError: the disk is full, or the cluster's folder is gone.
    """
    if len(packed) <= LARGEST_INLINE_BYTES:
        return packed
    digest = hashlib.sha256(packed).digest()
    path = folder.absolute() / f"{digest.hex()}.packed"
    folder.mkdir(mode=0o700, exist_ok=True)
    write_whole(path, packed)  # also in the place of a damaged one
    return _REFERENCE + digest + os.fsencode(path)


def unpack(message: bytes, key: bytes = b"") -> Experiment:
    """Returns the experiment in a message; the inverse of `pack`, and of `sendable` after it.

    Args:
        key: the cluster's key; b"": the message is not trusted, and skeletons are left out.

    Raises:
        ClusterError: the file to which the message refers is missing, or damaged.
        SealError: it is not as the owner of the key has left it.
    """
    message = _whole(message)
    packed, trust = message[1:], message.startswith(_SEALED) and bool(key)
    if message.startswith(_SEALED):
        packed = sealed.unseal(packed, key) if key else packed[sealed.MAC_BYTES :]
    length, of_training = _HEAD.unpack_from(packed)
    text, skeletons = packed[_HEAD.size :][:length], packed[_HEAD.size + length :]
    experiment = Experiment.from_toml(zlib.decompress(text).decode(), trust=trust)
    if not skeletons or not trust:
        return experiment
    plan: Plan = experiment.plan
    graph = _with_skeleton(plan.graph, skeletons[:of_training])
    if graph.evaluation is not None:
        there = _with_skeleton(graph.evaluation, skeletons[of_training:])
        graph = replace(graph, evaluation=there)
    return experiment.replace(plan=replace(plan, graph=graph))


def _whole(message: bytes) -> bytes:
    """What `sendable` was given; raises ClusterError where its file does not have it."""
    if not message.startswith(_REFERENCE):
        return message
    digest, name = message[1:][:_DIGEST_BYTES], message[1 + _DIGEST_BYTES :]
    path = Path(os.fsdecode(name))
    try:
        packed = path.read_bytes()
    except OSError as error:
        raise ClusterError(
            f"the experiment is too large for a message, and its file {path} cannot be read: "
            f"{error.strerror}; submit it again, which writes the file anew"
        ) from error
    if hashlib.sha256(packed).digest() != digest:
        raise ClusterError(
            f"the experiment is too large for a message, and its file {path} is damaged: what it "
            "has is not what was submitted; submit it again, which writes the file anew"
        )
    return packed


def _with_skeleton(graph: Graph, skeleton: bytes) -> Graph:
    return replace(graph, source=replace(graph.source, skeleton=skeleton))


def pack_keywords(keywords: Mapping[str, Any], key: bytes) -> bytes:
    """Packs further arguments of a call: small ones, of classes that engines can import."""
    return zlib.compress(sealed.pack(dict(keywords), key))


def unpack_keywords(packed: bytes, key: bytes) -> dict[str, Any]:
    """Returns the arguments that were packed; none for b"".

    Raises:
        SealError: they are not as the owner of the key has left them.
    """
    keywords: dict[str, Any] = sealed.unpack(zlib.decompress(packed), key) if packed else {}
    return keywords


_LONGEST_MESSAGE, _LONGEST_TRACEBACK = 4_000, 20_000  # characters


@dataclass(frozen=True)
class Answer:
    """How a call on an engine ended.

    Attributes:
        kind: how it ended: "returned", "raised" or "interrupted" (by SIGINT).
        error: the exception's class and text, for "raised".
        layer: the exception's attribute `layer`, if it has one.
        traceback: the exception's traceback, as text.
        time: when it ended, in seconds since the epoch.
        lost_rows: the number of metric rows that could not be written; the others were before the
            answer was.
    """

    kind: Literal["returned", "raised", "interrupted"]
    value: Any = None
    error: tuple[str, str] = ("", "")
    layer: str | None = None
    traceback: str = ""
    time: float = field(default_factory=time.time)
    lost_rows: int = 0

    @classmethod
    def of(cls, error: BaseException) -> "Answer":
        """Returns the answer of a call that raised, here or on an engine."""
        # What was raised before the rank could say so itself, as by an interrupt, comes in
        # ipyparallel's RemoteError.
        kind = getattr(error, "ename", type(error).__name__)
        text = getattr(error, "evalue", str(error))
        if kind == "KeyboardInterrupt":
            return cls("interrupted")
        layer = getattr(error, "layer", None)
        return cls(
            "raised",
            error=(kind, text[:_LONGEST_MESSAGE]),
            layer=str(layer) if layer else None,
            traceback="".join(traceback.format_exception(error))[-_LONGEST_TRACEBACK:],
        )

    def pack(self, key: bytes = b"") -> bytes:
        """Returns the answer in at most 64 KiB.

        Args:
            key: the cluster's key, for a value that is neither plain nor an outcome.

        Raises:
            ControlMessageTooLarge: it takes more.
            ValueError: the value wants a key.
        """
        told = {**vars(self), "value": _told(self.value, key)}
        packed = zlib.compress(json.dumps(told).encode())
        if len(packed) > LARGEST_MESSAGE_BYTES:
            raise ControlMessageTooLarge(
                f"an answer of {len(packed):,} bytes: control messages have at most "
                f"{LARGEST_MESSAGE_BYTES:,}. Write large results to a file and return its path"
            )
        return packed

    @classmethod
    def unpack(cls, packed: bytes, key: bytes = b"") -> "Answer":
        """Returns the answer that was packed.

        Args:
            key: the cluster's key; b"": a value that is under its MAC is left out.

        Raises:
            ControlMessageTooLarge: it has more than 64 KiB.
            SealError: the value is not as the owner of the key has left it.
            ValueError: it is no answer.
        """
        if len(packed) > LARGEST_MESSAGE_BYTES:
            raise ControlMessageTooLarge(f"an answer of {len(packed):,} bytes")
        try:
            told = json.loads(zlib.decompress(packed))
            value = _meant(told["value"], key)
            return _ANSWER.validate_python({**told, "value": value})
        except (zlib.error, KeyError, TypeError) as error:
            raise ValueError(f"it is no answer of a rank: {error!r}") from error


@dataclass(frozen=True)
class Assignment:
    """What the job server assigns to one rank of one attempt.

    Attributes:
        task: the function, as `tasks.call` takes it. It gets `experiment`, `keywords` and `own`.
        experiment: the experiment, as `sendable` gives it.
        keywords: further arguments, packed by `pack_keywords`.
        own: arguments that differ by rank or attempt; they go before `keywords`.
        trains: whether the function also gets `control`, whose `stop_requested` SIGUSR1 sets, and
            `emit`, which takes a row of metrics.
    """

    task: str
    experiment: bytes
    keywords: bytes
    own: Mapping[str, Any]
    folder: Path
    rank: int
    trains: bool


EndReason = Literal["finished", "stopped", "diverged"]


@dataclass
class StopRequest:
    """What is asked of a rank from outside; read once a step, set from a signal handler.

    Attributes:
        stop_requested: whether training is to end at the next step boundary.
        renew: says that the rank lives though it makes no step: it waits for a disk.
    """

    stop_requested: bool = False
    renew: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class TrainingOutcome:
    """How training ended on one rank.

    Attributes:
        reason: why it ended: "finished", "stopped" (as asked) or "diverged" (the loss is NaN or
            infinite).
        checkpoint: the directory of the newest checkpoint, or None.
        evaluation: the loss and the metrics on the test split; empty where it was not evaluated.
        message: the step and the layer, for "diverged".
        traffic: (group, operation, layer, phase, calls, messages, bytes, seconds, rounds,
            additions) of each row of the record.
        notes: notes on steps and figures that were unlike others, for people.
        given: (operation, phase, rank, bytes that came from that rank in `steps_counted`).
    """

    reason: EndReason
    step: int
    checkpoint: str | None
    evaluation: dict[str, float] = field(default_factory=dict)
    message: str = ""
    traffic: tuple[tuple[str, str, str, str, int, int, int, float, int, int], ...] = ()
    notes: tuple[str, ...] = ()
    given: tuple[tuple[str, str, int, int], ...] = ()
    steps_counted: int = 0


_ANSWER, _OUTCOME = TypeAdapter(Answer), TypeAdapter(TrainingOutcome)
_PLAIN = (type(None), bool, int, float, str)


def _told(value: Any, key: bytes) -> dict[str, Any]:
    """What a call returned, as JSON: what the job server reads is plain."""
    if type(value) in _PLAIN:
        return {"plain": value}
    if isinstance(value, TrainingOutcome):
        return {"outcome": asdict(value)}
    if isinstance(value, Path):
        return {"path": str(value)}
    return {"sealed": base64.b64encode(sealed.pack(value, key)).decode()}


def _meant(told: Mapping[str, Any], key: bytes) -> Any:
    """What a call returned; None where it is sealed, and there is no key."""
    ((kind, value),) = told.items()
    if kind == "outcome":
        return _OUTCOME.validate_python(value)
    if kind == "path":
        return Path(value)
    if kind == "sealed":
        return sealed.unpack(base64.b64decode(value), key) if key else None
    return value
