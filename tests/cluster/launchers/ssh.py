"""Emulated hosts that people log into: an sshd on each, with keys of its own, in one folder."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.cluster.emulated import needs
from workbench.cluster.emulated.hosts import Hosts

TOOLS = ("sshd", "ssh", "scp", "ssh-keygen", "unshare")
SOON_S = 60.0
SSHD = """
ListenAddress {address}
Port 22
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
PermitRootLogin yes
PasswordAuthentication no
StrictModes no
UsePAM no
Subsystem sftp internal-sftp
"""
SSH = """
Host {name}
    HostName {address}
    IdentityFile {folder}/key
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
"""
CONFIG = """
c = get_config()
c.Cluster.engine_launcher_class = "ssh"
c.SSHEngineSetLauncher.engines = {engines}
c.SSHEngineSetLauncher.ssh_args = c.SSHEngineSetLauncher.scp_args = ["-F", {ssh!r}]
c.SSHEngineSetLauncher.remote_python = {python!r}
c.SSHEngineSetLauncher.delay = 0
"""


def why_not() -> str:
    """What keeps this process from having such hosts; "" if nothing."""
    if said := needs.why_not():
        return said
    if absent := [tool for tool in TOOLS if _found(tool) is None]:
        return f"these hosts need {', '.join(absent)} (packages openssh-server, openssh-client)"
    return ""


@contextmanager
def ssh_hosts(hosts: Hosts, folder: Path, engines: int) -> Iterator[None]:
    """Starts an sshd on each host, and writes a profile that uses them.

    Args:
        hosts: which are there.
        folder: of the profile, and of all that is made here.
        engines: for each host.
    """
    key = folder / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    config, daemons = "", []
    try:
        for index, (name, address) in enumerate(zip(hosts.names, hosts.addresses, strict=True)):
            daemons.append(_sshd(hosts, index, folder, address))
            config += SSH.format(name=name, address=address, folder=folder)
        (folder / "ssh_config").write_text(config)
        own = {name: engines for name in hosts.names}
        told = {"engines": own, "ssh": str(folder / "ssh_config"), "python": sys.executable}
        (folder / "ipcluster_config.py").write_text(CONFIG.format(**told))
        for name in hosts.names:
            _until_it_answers(["ssh", "-F", str(folder / "ssh_config"), name, "true"])
        yield
    finally:
        for daemon in daemons:
            _end(daemon)


def _sshd(hosts: Hosts, index: int, folder: Path, address: str) -> "subprocess.Popen[bytes]":
    conf = folder / f"sshd-{index}"
    conf.write_text(SSHD.format(address=address, folder=folder))
    named = 'hostname "$1" && shift && exec "$@"'
    sshd = [_found("sshd") or "sshd", "-D", "-e", "-f", str(conf)]
    command = ["unshare", "--uts", "sh", "-c", named, "sh", hosts.names[index], *sshd]
    with (folder / f"sshd-{index}.log").open("wb") as log:
        return subprocess.Popen(hosts.command(index, command), stdout=log, stderr=log)


def _end(daemon: "subprocess.Popen[bytes]") -> None:
    for process in psutil.Process(daemon.pid).children(recursive=True):
        process.kill()
    daemon.kill()
    daemon.wait()


def _until_it_answers(command: list[str]) -> None:
    deadline = time.monotonic() + SOON_S
    while (done := subprocess.run(command, capture_output=True, check=False)).returncode:
        assert time.monotonic() < deadline, done.stderr.decode()
        time.sleep(0.05)


def _found(tool: str) -> str | None:
    """Where a tool is; that of sshd is on few people's paths."""
    return shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
