"""The system's own tools that make and enter emulated hosts, and the right to use them."""

import os
import shutil
import subprocess
import sys

from workbench.store.errors import HostsError

PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "taskset": "util-linux",
    "sh": "dash",
    "env": "coreutils",
}


def require() -> None:
    """Raises HostsError unless this process may make emulated hosts, as far as one can see."""
    if not sys.platform.startswith("linux"):
        raise HostsError(_needs(f"this system is {sys.platform}"))
    if os.geteuid() != 0:
        raise HostsError(_needs(f"this process has the user id {os.geteuid()}"))
    if absent := [tool for tool in PACKAGES if shutil.which(tool) is None]:
        packages = " ".join(dict.fromkeys(PACKAGES[tool] for tool in absent))
        raise HostsError(
            f"emulated hosts need {', '.join(absent)}, which cannot be found: install {packages} "
            f"(Debian, Ubuntu: apt-get install {packages})"
        )


def call(*command: str) -> str:
    """What a tool writes.

    Raises:
        HostsError: it failed; the text holds its words.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip() or f"exit status {done.returncode}"
        raise HostsError(f"`{' '.join(command)}` failed: {said}{_hint(said)}")
    return done.stdout


def _needs(but: str) -> str:
    return (
        "emulated hosts need root on Linux, for network namespaces, tc and control groups; "
        f"{but}. Without them wb.Cluster(n) still works: all its engines are on this one host, "
        "equally fast, with no shaped links between them, and train, verify and bench run on it"
    )


def _hint(said: str) -> str:
    if "not permitted" in said or "denied" in said:
        return (
            ". This root lacks capabilities: a container needs CAP_SYS_ADMIN and CAP_NET_ADMIN "
            "(docker run --privileged)"
        )
    if "qdisc kind is unknown" in said or "qdisc not found" in said:
        return ". This kernel lacks the module sch_tbf"
    return ""
