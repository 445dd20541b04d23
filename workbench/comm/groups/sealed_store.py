"""The notes by which the ranks of one world find each other, under a MAC that only they can make.

The store in which ranks meet is open to all users of its host. Its notes say where a rank listens
and which memory it shares: who could write them would have ranks connect to himself.
"""

import hmac
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from workbench.comm.groups.errors import CommError

_HASH, _MAC_DIGITS = "sha256", 64


class SealedStore(Store):
    """A store whose notes nobody else has written: each is under a MAC, with its key.

    Counters (`add`) are numbers, and have none: who changes them can keep a world from opening, and
    lead no rank elsewhere. gloo calls this object from C++, and does not keep it: its owner does.

    Args:
        store: where the notes lie.
        secret: the text that the ranks of this world know, and nobody else.

    Attributes:
        inner: the store that it was given.
    """

    def __init__(self, store: Store, secret: str) -> None:
        super().__init__()
        self.inner, self._secret = store, secret.encode()

    def set(self, key: str, value: str | bytes) -> None:
        """Leaves a note."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        self.inner.set(key, self._mac(key, content) + content)  # type: ignore[arg-type]  # or bytes

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Leaves a note where there is none; `expected` is "". Returns the note that is there.

        Raises:
            ValueError: another note is expected: sealed ones are not compared.
            CommError: somebody else has written the note.
        """
        if expected:
            raise ValueError(f"a sealed note is left where there is none, not after {expected!r}")
        sealed = self._mac(key, desired.encode()).decode() + desired
        return self._opened(key, self.inner.compare_set(key, "", sealed))

    def get(self, key: str) -> bytes:
        """Waits for a note.

        Raises:
            CommError: somebody else has written it.
        """
        return self._opened(key, self.inner.get(key))

    def _opened(self, key: str, found: bytes) -> bytes:
        mac, content = found[:_MAC_DIGITS], found[_MAC_DIGITS:]
        if not hmac.compare_digest(mac, self._mac(key, content)):
            raise CommError(
                f"the note {key!r}, by which ranks find each other, was written by somebody who is "
                "no rank of this world"
            )
        return content

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter."""
        return int(self.inner.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        """Whether all of these are there."""
        return bool(self.inner.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits for all of these; no longer than for any note, whatever the timeout is.

        Groups connect through here, which have the timeout of their collectives.
        """
        longest = self.timeout
        self.inner.wait(keys, longest if timeout is None else min(timeout, longest))

    def delete_key(self, key: str) -> bool:
        """Removes a note."""
        return bool(self.inner.delete_key(key))

    def num_keys(self) -> int:
        """How many notes there are."""
        return int(self.inner.num_keys())

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long is waited for a note."""
        self.inner.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        """How long is waited for a note."""
        return self.inner.timeout  # type: ignore[attr-defined]  # stubs lack it

    def _mac(self, key: str, content: bytes) -> bytes:
        named = len(key).to_bytes(4, "big") + key.encode() + content
        return hmac.new(self._secret, named, _HASH).hexdigest().encode()
