"""Where an engine runs: on this host, or on another that is entered by a command line."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Site:
    """Where a process runs.

    Attributes:
        enter: what its command line begins with, to get there; keeps the process' id.
        environment: what it has to know there.
    """

    enter: tuple[str, ...]
    environment: Mapping[str, str]


def of_interface(name: str) -> dict[str, str]:
    """What makes gloo and nccl talk through an interface."""
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}


HERE = Site((), of_interface("lo0" if sys.platform == "darwin" else "lo"))
