"""Where agents register: at the keeper's host, with proof that they belong to this cluster."""

import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress

from workbench.cluster.errors import ClusterError
from workbench.cluster.launchers.hello import Hello, addresses
from workbench.cluster.launchers.wire import PATIENCE_S, Wire


class Reception:
    """Listens for agents, and knows which of them are still there.

    Args:
        key: of the cluster.
        address: to listen at; "": at all.
        ports: to choose from; None: any.

    Attributes:
        nonce: what this cluster's agents say first.
        complaint: why one of them cannot work; "" as long as none has said so.

    Raises:
        ClusterError: this host has no such address, or no such port is free.
    """

    def __init__(self, key: bytes, address: str, ports: Sequence[int] | None) -> None:
        self.nonce, self.complaint = secrets.token_hex(8), ""
        self._key = key
        self._lock = threading.Lock()
        self._there: dict[Wire, Hello] = {}
        self._listener = _listener(address, [0] if ports is None else ports)
        self._address = address
        threading.Thread(target=self._receive, daemon=True).start()

    @property
    def places(self) -> str:
        """Where agents may find it, as `agent` takes it."""
        port = self._listener.getsockname()[1]
        found = [self._address] if self._address else [*addresses()]
        return ",".join(f"{address}:{port}" for address in found)

    @property
    def there(self) -> list[tuple[Hello, str]]:
        """What those agents said that are there now, and the address of ours that each reached."""
        with self._lock:
            return [(hello, wire.here) for wire, hello in self._there.items()]

    def dismiss(self, wanted: Sequence[Hello]) -> None:
        """Sends all other agents away."""
        with self._lock:
            others = [wire for wire, hello in self._there.items() if hello not in wanted]
        for wire in others:
            with suppress(OSError):
                wire.say(leave=True)

    def close(self) -> None:
        """Lets all agents go; they end."""
        self._listener.close()
        with self._lock:
            for wire in self._there:
                with suppress(OSError):
                    wire.say(leave=True)

    def _receive(self) -> None:
        for link in _links(self._listener):
            threading.Thread(target=self._welcome, args=(link,), daemon=True).start()

    def _welcome(self, link: socket.socket) -> None:
        with suppress(OSError, KeyError, TypeError, ValueError):  # it is none of ours, or has gone
            wire = Wire(link)
            said = wire.hear(PATIENCE_S)
            if said is None or said["nonce"] != self.nonce:
                return
            if said["complaint"]:
                self.complaint = self.complaint or str(said["complaint"])
                return
            wire.prove(self._key, first=False)
            if (said := wire.hear(2 * PATIENCE_S)) is None:
                return
            with self._lock:
                self._there[wire] = Hello.read(said)
            try:
                wire.hear()  # nothing: until it ends
            finally:
                with self._lock:
                    del self._there[wire]


def _listener(address: str, ports: Sequence[int]) -> socket.socket:
    reason: OSError | None = None
    for port in ports:
        try:
            return socket.create_server((address, port))
        except OSError as error:
            reason = error
    raise ClusterError(
        f"this host cannot listen at {address or 'its addresses'}, ports {ports[0]} to "
        f"{ports[-1]}: {reason}; it has {', '.join(addresses())}"
    )


def _links(listener: socket.socket) -> Iterator[socket.socket]:
    with suppress(OSError):  # it was closed
        while True:
            yield listener.accept()[0]
