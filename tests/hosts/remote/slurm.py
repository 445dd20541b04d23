"""A Slurm of our own: munge, a controller and two nodes on this machine, in a temporary folder."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests import ports

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "sinfo", "scontrol")
SOON_S = 60.0
CONF = """
ClusterName=workbench
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=2
OverTimeLimit=0
NodeName=node0 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 State=UNKNOWN
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP
"""


def why_not() -> str:
    """What keeps this process from having a Slurm; "" if nothing."""
    if os.geteuid() != 0:
        return "slurmd and slurmctld need root"
    if absent := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"Slurm needs {', '.join(absent)} (packages slurm-wlm, munge)"
    return ""


@dataclass(frozen=True)
class Slurm:
    """One that runs.

    Attributes:
        folder: of its files.
        environment: what its commands need.
    """

    folder: Path
    environment: dict[str, str]

    def call(self, *command: str) -> str:
        """What one of its commands writes."""
        environment = {**os.environ, **self.environment}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout


@contextmanager
def slurm() -> Iterator[Slurm]:
    """Starts it, and ends all of it."""
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # not pytest's: munge wants it open
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.chmod(0o755)
        (folder / "state").mkdir()
        given = dict(zip(("controller", "first", "second"), ports.free(3), strict=True))
        conf = folder / "slurm.conf"
        conf.write_text(CONF.format(folder=folder, host=socket.gethostname(), **given))
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        names = {"socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        files = [f"--{name}={folder}/munge.{end}" for name, end in names.items()]
        _daemon(stack, folder, ["munged", "--foreground", "--force", f"--key-file={key}", *files])
        running = Slurm(folder, {"SLURM_CONF": str(conf)})
        _until(lambda: (folder / "munge.sock").exists(), folder)
        _daemon(stack, folder, ["slurmctld", "-D", "-c", "-f", str(conf)])
        for node in ("node0", "node1"):
            _daemon(stack, folder, ["slurmd", "-D", "-N", node, "-f", str(conf)])
        _until(lambda: _idle(running) == 2, folder)
        yield running


def _idle(running: Slurm) -> int:
    try:
        return running.call("sinfo", "-h", "-N", "-o", "%T").split().count("idle")
    except subprocess.CalledProcessError:
        return 0


def _daemon(stack: ExitStack, folder: Path, command: list[str]) -> None:
    with (folder / "daemons.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    stack.callback(_end, process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _until(true: object, folder: Path) -> None:
    deadline = time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < deadline, (folder / "daemons.log").read_text()[-3000:]
        time.sleep(0.05)
