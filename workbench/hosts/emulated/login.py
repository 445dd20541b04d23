"""An sshd on each emulated host, with keys of its own, and the profile that uses them."""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from workbench.hosts.emulated.measuring import CommandLine
from workbench.hosts.processes import until
from workbench.store.cluster_spec import CONFIG
from workbench.store.errors import HostsError

PACKAGES = {
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "scp": "openssh-client",
    "ssh-keygen": "openssh-client",
    "unshare": "util-linux",
}
ANSWER_WITHIN_S = 30.0
TICK_S = 0.05
SEPARATED = Path("/run/sshd")  # an empty folder, in which sshd locks up whoever has not logged in
NAMED = 'hostname "$1" && shift && exec "$@"'
SSHD = """\
ListenAddress {address}
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
PermitRootLogin yes
PasswordAuthentication no
StrictModes no
Subsystem sftp internal-sftp
"""
SSH = """\
Host {name}
    HostName {address}
    IdentityFile {folder}/key
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
    ServerAliveInterval 3
    ServerAliveCountMax 2
"""
SHARED = """\
    ControlMaster auto
    ControlPath {folder}/%h
    ControlPersist 10
"""
# A socket's path has at most 107 bytes, of which ssh adds 17 while it makes it.
LONGEST = 107 - 17
PROFILE = """\
c = get_config()
c.Cluster.engine_launcher_class = "ssh"
c.SSHEngineSetLauncher.engines = {engines}
c.SSHEngineSetLauncher.ssh_args = c.SSHEngineSetLauncher.scp_args = ["-F", {config!r}]
c.SSHEngineSetLauncher.remote_python = {python!r}
"""


def serve(
    run: CommandLine, names: Sequence[str], addresses: Sequence[str], folder: Path, engines: int
) -> "list[subprocess.Popen[bytes]]":
    """Starts an sshd on each host and writes a profile; see `Hosts.ssh`.

    Args:
        run: a function that makes a command line run on the host of an index.
        folder: the folder of the profile, the keys and the configuration.

    Returns:
        The processes, which end with their hosts.

    Raises:
        HostsError: a tool is not there, a host does not answer, or others can look into the folder.
    """
    tools = {tool: _found(tool) for tool in PACKAGES}
    if absent := [tool for tool, path in tools.items() if path is None]:
        packages = " ".join(sorted({PACKAGES[tool] for tool in absent}))
        raise HostsError(
            f"hosts that are logged into need {', '.join(absent)}: install {packages} (Debian, "
            f"Ubuntu: apt-get install {packages})"
        )
    make_private(folder)
    SEPARATED.mkdir(exist_ok=True)
    key, config = folder / "key", folder / "ssh_config"
    for old in (key, folder / "key.pub"):
        old.unlink(missing_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    told = list(zip(names, addresses, strict=True))
    config.write_text("".join(entry(name, address, folder) for name, address in told))
    dealt = dict.fromkeys(names, engines)
    written = PROFILE.format(engines=dealt, config=str(config), python=sys.executable)
    (folder / CONFIG).write_text(written)
    daemons = []
    for index, (name, address) in enumerate(told):
        own = folder / f"sshd-{name}"
        own.write_text(SSHD.format(address=address, folder=folder))
        sshd = [tools["sshd"] or "sshd", "-D", "-e", "-f", str(own)]
        command = ["unshare", "--uts", "sh", "-c", NAMED, "sh", name, *sshd]
        with (folder / f"sshd-{name}.log").open("wb") as log:
            started = subprocess.Popen(
                run(index, command), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            daemons.append(started)
    for name in names:
        _wait(name, config, folder / f"sshd-{name}.log")
    return daemons


def make_private(folder: Path) -> None:
    """Makes a folder for keys, which its owner alone can enter.

    The daemons do not look themselves (`StrictModes no`): above it, folders may be anybody's.

    Raises:
        HostsError: it is there, and not so.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
        raise HostsError(
            f"{folder} is to hold the keys of hosts, and is somebody else's or open to others: "
            "give a folder that is not there yet"
        )


def entry(name: str, address: str, folder: Path) -> str:
    """Returns a host's entry in an ssh_config; connections are shared if a socket fits."""
    shared = len(os.fsencode(folder / address)) <= LONGEST
    return (SSH + SHARED * shared).format(name=name, address=address, folder=folder)


def _wait(name: str, config: Path, log: Path) -> None:
    command = ["ssh", "-F", str(config), name, "true"]
    said = ""

    def answers() -> bool:
        nonlocal said
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
        said = asked.stderr
        return not asked.returncode

    if not until(answers, ANSWER_WITHIN_S, TICK_S):
        raise HostsError(
            f"nobody can log into {name}; ssh says:\n{said}\nits sshd says:\n{log.read_text()}"
        )


def _found(tool: str) -> str | None:
    """Returns where a tool is; that of sshd is on few people's paths."""
    return shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
