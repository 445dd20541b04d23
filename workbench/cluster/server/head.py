"""What a rank's answer says of itself, read without what it returned.

What a call returned may be of any class, and to load that class may load torch, which the job
server does without. So everything is unpacked but values of classes that it does not know.
"""

import io
import pickle
import zlib
from typing import Any

from workbench.cluster.answer import Answer

_KNOWN = {
    "workbench.cluster.answer": {"Answer"},
    "workbench.train.control": {"Outcome"},
    "builtins": {"set", "frozenset", "bytearray", "complex"},
}


class Unknown:
    """Something that was returned, of a class that is not loaded here."""

    def __new__(cls, *_arguments: Any, **_keywords: Any) -> "Unknown":
        """Takes whatever the real class takes."""
        return super().__new__(cls)

    def __setstate__(self, _state: Any) -> None:
        """Keeps nothing."""

    def __setitem__(self, _key: Any, _value: Any) -> None:
        """Keeps nothing."""

    def append(self, _value: Any) -> None:
        """Keeps nothing."""

    def extend(self, _values: Any) -> None:
        """Keeps nothing."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        return Unknown


def head_of(packed: bytes) -> Answer:
    """The answer; a value of a class that is not known is an `Unknown`.

    Raises:
        ValueError: this is no answer.
    """
    try:
        answer = _Reader(io.BytesIO(zlib.decompress(packed))).load()
    except (zlib.error, pickle.UnpicklingError, EOFError, AttributeError, TypeError) as error:
        raise ValueError(f"no answer of a rank: {error}") from error
    if not isinstance(answer, Answer):
        raise ValueError(f"no answer of a rank, but {type(answer).__name__}")
    return answer
