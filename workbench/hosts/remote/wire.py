"""Messages between hosts: JSON, over connections whose two ends know the cluster's key.

Both ends prove that they know it (HMAC of a challenge, as `multiprocessing` does it). What they say
then is not encrypted, and each message is under a MAC with its number: none is changed, left out,
said twice or by somebody else. It holds no tensors, no secrets, and nothing that is executed when
it is read.
"""

import hmac
import json
import math
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, Self

KEY = "launch.key"
ANY = "any"  # interface; an empty argument may be lost on its way through shells
LARGEST, LARGEST_OF_STRANGERS = 1 << 20, 1 << 14
MOST_STRANGERS = 32
"""Connections at one time whose other end has proved nothing yet; the oldest makes room."""
TRIES, TRY_AGAIN_S = 5, 1.0
HASH, MAC_BYTES = "sha256", 32
SLICE_S = 0.25
PATIENCE_S = 10  # until two ends have proved who they are, and then for the rest of a message
# Five minutes: a link that is down for less is not lost; who says something all the time is missed
# sooner, when its lease is over.
KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 19}
# TCP sends again after pauses that double, and the next try may fall into the next time that a link
# is down. Linux 6.15 and later has a limit for them (tcp(7)), for which Python has no name yet.
RTO_MAX_MS, SEND_AGAIN_MS = 44, 1000


def new_key(folder: Path) -> bytes:
    """Writes a fresh key, which only the owner can read, and returns it."""
    path, key = folder / KEY, secrets.token_bytes(32)
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(key)
    return key


class _Numbered:
    """One direction of a connection: the MACs of its messages, in their order."""

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def next(self, content: bytes) -> bytes:
        """Returns the MAC of the next message."""
        mac = hmac.digest(self._key, self._number.to_bytes(8, "big") + content, HASH)
        self._number += 1
        return mac


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
        with suppress(OSError):  # an older kernel, or another one
            link.setsockopt(socket.IPPROTO_TCP, RTO_MAX_MS, SEND_AGAIN_MS)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            link.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", PATIENCE_S, 0))
        self.here: str = link.getsockname()[0]
        self._connection = Connection(link.detach())
        self._saying = threading.Lock()
        self._out: _Numbered | None = None
        self._in: _Numbered | None = None

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
            mine = secrets.token_bytes(MAC_BYTES)
            self._connection.send_bytes(mine)
            theirs = self._connection.recv_bytes(MAC_BYTES)
        except (AuthenticationError, AssertionError, ValueError, EOFError) as error:
            raise OSError(f"the other end does not know the cluster's key: {error}") from error
        # Of this connection alone: what was said on another means nothing here.
        first_s, second_s = (mine, theirs) if first else (theirs, mine)
        keys = [hmac.digest(key, who + first_s + second_s, HASH) for who in (b"first", b"second")]
        own, other = keys if first else reversed(keys)
        self._out, self._in = _Numbered(own), _Numbered(other)

    def say(self, **fields: Any) -> None:
        """Sends a message.

        Raises:
            OSError: nobody is there any more.
        """
        content = json.dumps(fields).encode()
        with self._saying:
            mac = b"" if self._out is None else self._out.next(content)
            self._connection.send_bytes(mac + content)

    def hear(self, within_s: float | None = None) -> dict[str, Any] | None:
        """Returns the next message; None where none came in time.

        Raises:
            OSError: nobody is there any more, or what came is no message of the other end.
        """
        if not self._connection.poll(within_s):
            return None
        try:
            content = self._connection.recv_bytes(LARGEST if self._in else LARGEST_OF_STRANGERS)
            if self._in is not None:
                mac, content = content[:MAC_BYTES], content[MAC_BYTES:]
                if not hmac.compare_digest(mac, self._in.next(content)):
                    raise OSError("a message was changed, or is not from the other end")
            found = json.loads(content)
        except (EOFError, ValueError, RecursionError) as error:
            raise OSError(f"the connection has ended: {error}") from error
        if not isinstance(found, dict):
            raise OSError(f"no message: {found!r}")
        return found

    def hear_awake(self, within_s: float) -> dict[str, Any] | None:
        """Does as `hear`, and does not count the time in which this process stood still itself."""
        for _ in range(math.ceil(within_s / SLICE_S)):
            if (said := self.hear(SLICE_S)) is not None:
                return said
        return None

    def end(self) -> None:
        """Ends the connection for a thread that waits for the other end."""
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as link:
            link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()


def introduced(connect: Callable[[], Wire], greet: Callable[[Wire], None]) -> Wire:
    """Returns a connection whose ends have greeted; tries again, as it may have had to make room.

    Raises:
        OSError: the other end does not know the key, or is not there.
    """
    for left in reversed(range(TRIES)):
        wire = connect()
        try:
            greet(wire)
            return wire
        except OSError:
            wire.close()
            if not left:
                raise
            time.sleep(TRY_AGAIN_S)
    raise AssertionError("unreachable")


def welcome(
    listener: socket.socket, greet: Callable[[Wire], object], take: Callable[[Wire], object]
) -> None:
    """Takes connections until the listener is closed, each in a thread of its own.

    Args:
        greet: has the other end prove that it knows the key; it has `PATIENCE_S` in all.
    """
    strangers: dict[Wire, float] = {}  # and how long they are waited for, the oldest first
    lock = threading.Lock()

    def meet(wire: Wire) -> None:
        with suppress(OSError, KeyError, TypeError, ValueError):  # it is none of ours, or has gone
            greet(wire)
            with lock:
                del strangers[wire]
            take(wire)
            return
        with lock:
            strangers.pop(wire, None)
        wire.close()

    listener.settimeout(SLICE_S)
    while listener.fileno() >= 0:
        try:
            wire = Wire(listener.accept()[0])
        except TimeoutError:
            pass
        except OSError:  # it was closed, or too many files are open
            time.sleep(SLICE_S)
        else:
            with lock:
                strangers[wire] = time.monotonic() + PATIENCE_S
            threading.Thread(target=meet, args=(wire,), daemon=True).start()
        with lock:
            over = [wire for wire, until in strangers.items() if until < time.monotonic()]
            over += [*strangers][: max(0, len(strangers) - MOST_STRANGERS)]
            for wire in over:
                strangers.pop(wire, None)
                wire.end()
