"""Messages between hosts: JSON, over connections whose two ends know the cluster's key.

Both ends prove that they know it (HMAC of a challenge, as `multiprocessing` does it); what they say
then is not encrypted. It holds no tensors, and nothing that is executed when it is read.
"""

import json
import secrets
import socket
import struct
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, Self

KEY = "launch.key"
ANY = "any"  # interface; an empty argument may be lost on its way through shells
LARGEST = 1 << 20
PATIENCE_S = 10  # for one answer, while two ends prove who they are
KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}


def new_key(folder: Path) -> bytes:
    """Writes a fresh key, which only the owner can read, and returns it."""
    path, key = folder / KEY, secrets.token_bytes(32)
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(key)
    return key


class Wire:
    """One connection; any thread may say something, one may hear.

    Args:
        link: the socket, connected.
    """

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(True)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEP_ALIVE.items():
            if hasattr(socket, name):
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            link.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", PATIENCE_S, 0))
        self.here: str = link.getsockname()[0]
        self._connection = Connection(link.detach())
        self._saying = threading.Lock()

    @classmethod
    def to(cls, address: str, port: int, within_s: float) -> Self:
        """Connects to an address.

        Raises:
            OSError: nobody answers there.
        """
        return cls(socket.create_connection((address, port), timeout=within_s))

    def prove(self, key: bytes, *, first: bool) -> None:
        """Has both ends prove that they know the key; one of them is the first to answer.

        Raises:
            OSError: the other end does not know the key, or does not answer.
        """
        try:
            if first:
                answer_challenge(self._connection, key)
                deliver_challenge(self._connection, key)
            else:
                deliver_challenge(self._connection, key)
                answer_challenge(self._connection, key)
        except (AuthenticationError, AssertionError, ValueError, EOFError) as error:
            raise OSError(f"the other end does not know the cluster's key: {error}") from error

    def say(self, **fields: Any) -> None:
        """Sends a message.

        Raises:
            OSError: nobody is there any more.
        """
        with self._saying:
            self._connection.send_bytes(json.dumps(fields).encode())

    def hear(self, within_s: float | None = None) -> dict[str, Any] | None:
        """Returns the next message; None where none came in time.

        Raises:
            OSError: nobody is there any more, or what came is no message.
        """
        if not self._connection.poll(within_s):
            return None
        try:
            found = json.loads(self._connection.recv_bytes(LARGEST))
        except (EOFError, ValueError) as error:
            raise OSError(f"the connection has ended: {error}") from error
        if not isinstance(found, dict):
            raise OSError(f"no message: {found!r}")
        return found

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()
