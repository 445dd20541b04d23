"""What an agent says of its host when it registers."""

import os
import platform
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any, Self

import psutil

from workbench.cluster.host import Gpu, Host, probe

# Which of its launcher's processes this is, as each launcher says it.
SLOTS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PALS_RANKID")
ENDS_AT = "WORKBENCH_ENDS_AT"
ASK_WITHIN_S = 20.0
SAME = ("torch", "ipyparallel")


@dataclass(frozen=True, kw_only=True)
class Hello:
    """One agent.

    Attributes:
        host: what its host offers to it.
        slot: which of its launcher's processes it is; None: that says nothing.
        address: on which it listens.
        port: likewise.
        interface: which has that address.
        versions: of Python and of what has to be the same everywhere.
        ends_at: when its allocation ends, in seconds since the epoch; None: not that it knew.
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
        """What this process would say."""
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
        """As JSON has it."""
        return asdict(self)

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Self:
        """The opposite of `plain`.

        Raises:
            KeyError, TypeError, ValueError: it is no such thing.
        """
        host = dict(plain["host"])
        host["cores"] = tuple(tuple(map(int, core)) for core in host["cores"])
        host["gpus"] = tuple(Gpu(**gpu) for gpu in host["gpus"])
        return cls(**{**plain, "host": Host(**host)})


def versions() -> dict[str, str]:
    """Of what has to be the same on all hosts."""
    return {"Python": platform.python_version(), **{name: version(name) for name in SAME}}


def ends_at(environment: Mapping[str, str]) -> float | None:
    """When the allocation ends that this process is in, in seconds since the epoch.

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
    """The IPv4 address of an interface.

    Raises:
        ValueError: it has none; the text says which ones there are.
    """
    there = addresses()
    for address, name in there.items():
        if name == interface:
            return address
    known = ", ".join(f"{name} ({address})" for address, name in there.items())
    raise ValueError(f"no interface {interface!r} with an IPv4 address; there are {known}")


def addresses() -> dict[str, str]:
    """The interface of each IPv4 address of this host; loopback is the last."""
    found = {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }
    return dict(sorted(found.items(), key=lambda each: each[0].startswith("127.")))
