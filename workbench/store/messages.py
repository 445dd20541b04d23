"""What travels to engines and back: an experiment, keywords, how a call or training ended."""

import pickle
import struct
import time
import traceback
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from workbench.plan.experiment.experiment import Experiment
from workbench.plan.graph import Graph
from workbench.plan.plan import Plan
from workbench.store.errors import ControlMessageTooLarge
from workbench.store.record import LARGEST_MESSAGE_BYTES

_HEAD = struct.Struct("=II")


def pack(experiment: Experiment) -> bytes:
    """Returns the experiment's TOML, compressed, then its module's skeletons where it has some.

    One is of the module in training, the other in evaluation, if it takes another way then.
    """
    text = zlib.compress(experiment.to_toml().encode(), 9)
    graph: Graph = experiment.plan.graph
    training = graph.source.skeleton or b""
    evaluating = graph.evaluation.source.skeleton or b"" if graph.evaluation else b""
    return _HEAD.pack(len(text), len(training)) + text + training + evaluating


def unpack(message: bytes) -> Experiment:
    """Returns the experiment in a message; the inverse of `pack`."""
    length, of_training = _HEAD.unpack_from(message)
    text, skeletons = message[_HEAD.size :][:length], message[_HEAD.size + length :]
    experiment = Experiment.from_toml(zlib.decompress(text).decode())
    if not skeletons:
        return experiment
    plan: Plan = experiment.plan
    graph = _with_skeleton(plan.graph, skeletons[:of_training])
    if graph.evaluation is not None:
        there = _with_skeleton(graph.evaluation, skeletons[of_training:])
        graph = replace(graph, evaluation=there)
    return experiment.replace(plan=replace(plan, graph=graph))


def _with_skeleton(graph: Graph, skeleton: bytes) -> Graph:
    return replace(graph, source=replace(graph.source, skeleton=skeleton))


def pack_keywords(keywords: Mapping[str, Any]) -> bytes:
    """Packs further arguments of a call: small ones, of classes that engines can import."""
    return zlib.compress(pickle.dumps(dict(keywords)))


def unpack_keywords(packed: bytes) -> dict[str, Any]:
    """Returns the arguments that were packed; none for b""."""
    keywords: dict[str, Any] = pickle.loads(zlib.decompress(packed)) if packed else {}
    return keywords


_LONGEST_MESSAGE, _LONGEST_TRACEBACK = 4_000, 20_000  # characters


@dataclass(frozen=True)
class Answer:
    """How a call on an engine ended.

    Attributes:
        kind: how it ended: "returned", "raised" or "interrupted" (by SIGINT).
        value: the value that was returned.
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
        # A rank that was interrupted before it could say so itself raised it in ipyparallel.
        if "KeyboardInterrupt" in (type(error).__name__, getattr(error, "ename", "")):
            return cls("interrupted")
        layer = getattr(error, "layer", None)
        return cls(
            "raised",
            error=(type(error).__name__, str(error)[:_LONGEST_MESSAGE]),
            layer=str(layer) if layer else None,
            traceback="".join(traceback.format_exception(error))[-_LONGEST_TRACEBACK:],
        )

    def pack(self) -> bytes:
        """Returns the answer in at most 64 KiB.

        Raises:
            ControlMessageTooLarge: it takes more.
        """
        packed = zlib.compress(pickle.dumps((replace(self, value=None), pickle.dumps(self.value))))
        if len(packed) > LARGEST_MESSAGE_BYTES:
            raise ControlMessageTooLarge(
                f"an answer of {len(packed):,} bytes: control messages have at most "
                f"{LARGEST_MESSAGE_BYTES:,}. Write large results to a file and return its path"
            )
        return packed

    @classmethod
    def unpack(cls, packed: bytes, *, with_value: bool = True) -> "Answer":
        """Returns the answer that was packed.

        Args:
            packed: the packed answer.
            with_value: whether to import what the value is made of; else it is None.
        """
        answer, value = pickle.loads(zlib.decompress(packed))
        assert isinstance(answer, cls)
        return replace(answer, value=pickle.loads(value)) if with_value else answer


EndReason = Literal["finished", "stopped", "diverged"]


@dataclass
class StopRequest:
    """What is asked of a rank from outside; read once a step, set from a signal handler.

    Attributes:
        stop_requested: whether training is to end at the next step boundary.
    """

    stop_requested: bool = False


@dataclass(frozen=True)
class TrainingOutcome:
    """How training ended on one rank.

    Attributes:
        reason: why it ended: "finished", "stopped" (as asked) or "diverged" (the loss is NaN or
            infinite).
        step: the number of optimizer updates made in all.
        checkpoint: the directory of the newest checkpoint, or None.
        evaluation: the loss and the metrics on the test split; empty where it was not evaluated.
        message: the step and the layer, for "diverged".
        traffic: (group, operation, layer, phase, calls, messages, bytes, seconds, rounds,
            additions) of each row of the record.
        notes: notes on steps that were unlike others, for people.
        given: (operation, phase, rank, bytes that came from that rank in `steps_counted`).
        steps_counted: the number of steps of this attempt.
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
