"""Where measured machines are kept, and what must be the same for one to be used again."""

import hashlib
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

import platformdirs
import torch

from workbench.plan.io.errors import MachineError
from workbench.plan.machine.device import Precision
from workbench.plan.machine.machine import Machine
from workbench.store.cluster_spec import EngineDevice


def fingerprint(devices: Iterable[EngineDevice], hosts: object) -> str:
    """Twelve hexadecimal digits of the hardware that some ranks run on, and of what drives it.

    Also of the precisions that there are: a machine has figures of all of them.
    """
    instructions = os.environ.get("ONEDNN_MAX_CPU_ISA", "")  # those that oneDNN may use
    driven = [processor(), instructions, torch.__version__, *get_args(Precision)]
    content = [*driven, *map(repr, devices), repr(hosts)]
    return hashlib.sha256("\n".join(content).encode()).hexdigest()[:12]


def place(name: str) -> Path:
    """The file of the machine of this fingerprint, in the platform's folder for caches."""
    return platformdirs.user_cache_path("workbench") / "machines" / f"{name}.toml"


def kept(name: str) -> Machine | None:
    """The machine of this fingerprint; None where none was kept, or its file is damaged."""
    try:
        return Machine.load(place(name))
    except (OSError, UnicodeDecodeError, MachineError):
        return None


class KeptMachines:
    """The machines that are kept, each read once for as long as its file stays as it is."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[tuple[int, int], Machine | None]] = {}

    def kept(self, name: str) -> Machine | None:
        """The machine of this fingerprint; None where none was kept, or its file is damaged."""
        try:
            status = place(name).stat()
        except OSError:
            return None
        stamp = status.st_mtime_ns, status.st_ino
        if name not in self._read or self._read[name][0] != stamp:
            self._read[name] = stamp, kept(name)
        return self._read[name][1]


def keep(name: str, machine: Machine) -> None:
    """Writes a machine for the next time; whoever reads meanwhile finds the old one, or this.

    Raises:
        OSError: the platform's folder for caches cannot be written to.
    """
    path = place(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    machine.save(path)


def processor() -> str:
    """The model of this host's processor, as the system calls it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
