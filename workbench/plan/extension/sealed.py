"""The user's own code and objects on their way to engines: pickled, under a MAC with a key.

To unpickle is to execute. This is the only module that does. It takes what carries the MAC of a
cluster's key, which only its owner's processes can read, and what this process has pickled itself.
"""

import hmac
import os
import pickle
from io import BytesIO
from pathlib import Path
from typing import Any

KEY_BYTES = 32
KEY_FILE = "WORKBENCH_KEY"
"""The variable that tells an engine the file of its cluster's key."""
MAC_BYTES = 32


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
    """Returns bytes under their MAC."""
    return _mac(content, key) + content


def unseal(sealed: bytes, key: bytes) -> bytes:
    """Returns the bytes under a MAC; the inverse of `seal`.

    Raises:
        SealError: they are not as the owner of the key has left them.
        ValueError: the key is none.
    """
    mac, content = sealed[:MAC_BYTES], sealed[MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(content, key)):
        raise SealError("it was not written under this cluster's key, so that nobody loads it")
    return content


def pack(value: object, key: bytes) -> bytes:
    """Returns a value, pickled, under its MAC."""
    return seal(pickle.dumps(value), key)


def unpack(sealed: bytes, key: bytes) -> Any:
    """Returns the value that was packed, which may execute what its owner wrote."""
    return loads(unseal(sealed, key))


def loads(content: bytes) -> Any:
    """Returns what was pickled, which may execute what its author wrote.

    Args:
        content: a pickle that was unsealed, or that this process has made.
    """
    return _Unpickler(BytesIO(content)).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        """As usual, but for torch's memory formats: any module may have them, as `torch.NAME`."""
        if name.startswith("torch."):
            module, name = name.split(".", 1)
        return super().find_class(module, name)


def _mac(content: bytes, key: bytes) -> bytes:
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, got {len(key)}")
    return hmac.digest(key, content, "sha256")
