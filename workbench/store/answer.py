"""How a call on an engine ended, as it travels back."""

import pickle
import time
import traceback
import zlib
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from workbench.store.errors import ControlMessageTooLarge

LARGEST_MESSAGE_BYTES = 64 << 10
_LONGEST_MESSAGE, _LONGEST_TRACEBACK = 4_000, 20_000  # characters


@dataclass(frozen=True)
class Answer:
    """How a call on an engine ended.

    Attributes:
        kind: "returned", "raised" or "interrupted" (by SIGINT).
        value: what was returned.
        error: for "raised": the exception's class and text.
        layer: the exception's attribute `layer`, if it has one.
        traceback: the exception's, as text.
        time: when, in seconds since the epoch.
        lost_rows: metric rows that could not be written; the others were before the answer was.
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
        """The answer of a call that raised, here or on an engine."""
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
        """The answer in at most 64 KiB.

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
        """The inverse of `pack`.

        Args:
            packed: the answer.
            with_value: whether to import what the value is made of; else it is None.
        """
        answer, value = pickle.loads(zlib.decompress(packed))
        assert isinstance(answer, cls)
        return replace(answer, value=pickle.loads(value)) if with_value else answer
