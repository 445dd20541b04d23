"""The user's own code and objects on their way to engines: pickled, under a MAC with a key.

To unpickle is to execute. This is the only module that does, and for three things: what carries
the MAC of a cluster's key, which only its owner's processes can read; what this process has pickled
itself; and pickles of which every name is looked at before it is taken (`loaded`).
"""

import hmac
import os
import pickle
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

KEY_BYTES = 32
KEY_FILE = "WORKBENCH_KEY"
"""The variable that tells an engine the file of its cluster's key."""
_MAC_BYTES = 32

Find = Callable[[str, str], Any]
"""(module, name) -> what a pickle means by them."""


class SealError(ValueError):
    """Bytes without the MAC of the key: another cluster's, damaged, or somebody else's."""


def own_key() -> bytes:
    """Returns the key of the cluster that this process is an engine of.

    Raises:
        SealError: it is an engine of none, so that it opens nothing.
    """
    path = os.environ.get(KEY_FILE)
    if not path:
        raise SealError("only engines open what was submitted to their cluster, and this is none")
    return Path(path).read_bytes()


def seal(content: bytes, key: bytes) -> bytes:
    """Returns bytes under their MAC.

    Raises:
        ValueError: the key is none.
    """
    return _mac(content, key) + content


def unseal(sealed: bytes, key: bytes) -> bytes:
    """Returns the bytes under a MAC; the inverse of `seal`.

    Raises:
        SealError: they are not as the owner of the key has left them.
        ValueError: the key is none.
    """
    mac, content = sealed[:_MAC_BYTES], sealed[_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(content, key)):
        raise SealError("it was not written under this cluster's key, so that nobody loads it")
    return content


def pack(value: object, key: bytes) -> bytes:
    """Returns a value, pickled, under its MAC.

    Raises:
        ValueError: the key is none.
    """
    return seal(pickle.dumps(value), key)


def unpack(sealed: bytes, key: bytes) -> Any:
    """Returns the value that was packed, which may execute what its owner wrote.

    Raises:
        SealError: it is not as the owner of the key has left it.
        ValueError: the key is none.
    """
    return pickle.loads(unseal(sealed, key))


def loaded(content: bytes | BinaryIO, find: Find) -> Any:
    """Returns what a pickle holds.

    Args:
        content: the pickle: one whose every name `find` looks at, or one of this process's own, or
            that was unsealed.
        find: says what each name means, or raises.
    """
    file = BytesIO(content) if isinstance(content, bytes) else content
    return _Finding(file, find).load()


_MEMORY_FORMATS = {
    f"torch.{name}"
    for name in ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
}


def imported(module: str, name: str) -> Any:
    """Returns what a name means to pickle itself, which imports it.

    A dotted name is that of a class in a class, or of something in one; it leads into nothing else,
    but for torch's memory formats, which pickle finds in whatever module has imported torch.

    Raises:
        AttributeError: there is no such thing.
    """
    if name in _MEMORY_FORMATS:
        module, name = name.split(".")
    outer, *inner = name.split(".")
    found = pickle.Unpickler(BytesIO()).find_class(module, outer)
    for part in inner:
        if not isinstance(found, type):
            raise AttributeError(f"{module}.{outer} is no class, of which {name} could be a part")
        found = getattr(found, part)
    return found


class _Finding(pickle.Unpickler):
    def __init__(self, file: BinaryIO, find: Find) -> None:
        super().__init__(file)
        self._find = find

    def find_class(self, module: str, name: str, /) -> Any:
        return self._find(module, name)


def _mac(content: bytes, key: bytes) -> bytes:
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, got {len(key)}")
    return hmac.digest(key, content, "sha256")
