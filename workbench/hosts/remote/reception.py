"""Where agents register, and what each then says of its host.

They register at the supervisor's host, with proof that they belong to this cluster.
"""

import os
import platform
import secrets
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any, Self

import psutil

from workbench.hosts.host import Gpu, Host, probe
from workbench.hosts.remote.wire import PATIENCE_S, Wire, welcome
from workbench.store.errors import ClusterError

# Which of its launcher's processes this is, as each launcher says it.
SLOTS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PALS_RANKID")
ENDS_AT = "WORKBENCH_ENDS_AT"
ASK_WITHIN_S = 20.0
SAME = ("torch", "ipyparallel")


@dataclass(frozen=True, kw_only=True)
class Hello:
    """One agent.

    Attributes:
        slot: the index of its process among its launcher's; None: the launcher does not say.
        versions: the versions of Python and of what has to be the same everywhere.
        ends_at: when its allocation ends, in seconds since the epoch; None: it does not know.
    """

    host: Host
    slot: int | None
    address: str
    port: int
    interface: str
    versions: Mapping[str, str]
    ends_at: float | None

    @classmethod
    def here(cls, address: str, port: int, interface: str) -> Self:
        """Returns what this process says of itself and its host."""
        host = probe()
        slots = (os.environ[name] for name in SLOTS if os.environ.get(name, "").isdecimal())
        return cls(
            # Several of Slurm's nodes may be one machine; its name of them tells them apart.
            host=replace(host, name=os.environ.get("SLURMD_NODENAME", host.name)),
            slot=next(map(int, slots), None),
            address=address,
            port=port,
            interface=interface,
            versions=versions(),
            ends_at=ends_at(os.environ),
        )

    def plain(self) -> dict[str, Any]:
        """Returns the fields as JSON has them."""
        return asdict(self)

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Self:
        """Returns the agent whose fields these are; the inverse of `plain`.

        Raises:
            KeyError, TypeError, ValueError: the fields are not those of an agent.
        """
        host = dict(plain["host"])
        host["cores"] = tuple(tuple(map(int, core)) for core in host["cores"])
        host["gpus"] = tuple(Gpu(**gpu) for gpu in host["gpus"])
        return cls(**{**plain, "host": Host(**host)})


def versions() -> dict[str, str]:
    """Returns the versions of what has to be the same on all hosts."""
    return {"Python": platform.python_version(), **{name: version(name) for name in SAME}}


def ends_at(environment: Mapping[str, str]) -> float | None:
    """Returns when this process's allocation ends, in seconds since the epoch; None: unknown.

    Slurm says it, by a variable or when it is asked; in a script for another batch system,
    `WORKBENCH_ENDS_AT` does.
    """
    for name in (ENDS_AT, "SLURM_JOB_END_TIME"):
        with suppress(KeyError, ValueError):
            return float(environment[name])
    if job := environment.get("SLURM_JOB_ID"):
        with suppress(OSError, ValueError, subprocess.SubprocessError):
            done = subprocess.run(
                ["squeue", "--noheader", "--jobs", job, "--format", "%e"],
                env={**environment, "SLURM_TIME_FORMAT": "%s"},
                capture_output=True,
                text=True,
                timeout=ASK_WITHIN_S,
                check=True,
            )
            return float(done.stdout)
    return None


def address_of(interface: str) -> str:
    """Returns the IPv4 address of an interface.

    Raises:
        ValueError: the interface has no such address; the text says which ones there are.
    """
    there = addresses()
    for address, name in there.items():
        if name == interface:
            return address
    known = ", ".join(f"{name} ({address})" for address, name in there.items())
    raise ValueError(f"no interface {interface!r} with an IPv4 address; there are {known}")


def addresses() -> dict[str, str]:
    """Returns the interface of each IPv4 address of this host; loopback is the last."""
    found = {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }
    return dict(sorted(found.items(), key=lambda each: each[0].startswith("127.")))


class Reception:
    """Listens for agents, and knows which of them are still there.

    Args:
        address: the address to listen at; "": all of this host's.
        ports: the ports to choose from; None: any.

    Attributes:
        complaint: why one of them cannot work, as somebody says who need not know the key; "" as
            long as nobody does.

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
        receiving = (self._listener, self._greet, self._register)
        threading.Thread(target=welcome, args=receiving, daemon=True).start()

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
        """Sends all other agents away, and takes no more."""
        self._listener.close()
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

    def _greet(self, wire: Wire) -> None:
        said = wire.hear(PATIENCE_S)
        if said is None or said["nonce"] != self.nonce:
            raise OSError("it is no agent of this cluster")
        if said["complaint"]:
            self.complaint = self.complaint or str(said["complaint"])
            raise OSError("it cannot work")
        wire.prove(self._key, first=False)

    def _register(self, wire: Wire) -> None:
        said = wire.hear(ASK_WITHIN_S + PATIENCE_S) or {}
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
