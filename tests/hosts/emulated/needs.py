"""Whether this machine can have emulated hosts, seen without our own code, and what they leave."""

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest


def why_not() -> str:
    """What keeps this process from making network namespaces and control groups; "" if nothing."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "emulated hosts need root"
    if absent := [tool for tool in ("ip", "tc", "nsenter", "taskset") if not shutil.which(tool)]:
        return f"emulated hosts need {', '.join(absent)} (packages iproute2, util-linux)"
    done = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    if done.returncode:
        return "this root may not make network namespaces"
    if not os.access("/sys/fs/cgroup", os.W_OK):
        return "this root may not make control groups"
    return ""


needs_hosts = pytest.mark.skipif(bool(why_not()), reason=why_not())


def traces(pid: int) -> list[str]:
    """Namespaces, interfaces and control groups of the emulated hosts of a process."""
    namespaces = [path.name for path in Path("/run/netns").glob(f"wb{pid}-*")]
    interfaces = [name for _, name in socket.if_nameindex() if name.startswith(f"wb{pid}-")]
    groups = [path.name for path in Path("/sys/fs/cgroup").glob(f"**/workbench-wb{pid}-*")]
    return sorted([*namespaces, *interfaces, *groups])
