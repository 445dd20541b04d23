"""A keeper, started from a notebook, which it outlives."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from workbench.cluster.errors import ClusterError
from workbench.cluster.jobs.owner import Owner
from workbench.cluster.keeper.spec import Spec

MODULE = "workbench.cluster.keeper"
PID, LOG = "keeper.pid", "keeper.log"
LONGEST_TEXT = 2000


def start(folder: Path, spec: Spec | None = None) -> None:
    """Starts a keeper; returns when it has the folder, before its engines are ready.

    Args:
        folder: the cluster's; made here, and open to nobody else.
        spec: what to keep; None: what the folder says, where a keeper has ended before its work.

    Raises:
        ClusterError: another keeper has the folder, or none could start; the text says why.
    """
    folder = folder.absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if spec is None:
        spec = Spec.load(folder)
    else:
        spec.save(folder)
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    with (folder / LOG).open("ab") as log:
        done = subprocess.run(
            [sys.executable, "-P", "-m", MODULE, str(folder)],
            # What can be imported here can be imported there: the user's own modules too.
            env={**os.environ, "PYTHONPATH": path, **spec.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # closed by the keeper when it has the folder
            stderr=log,
            start_new_session=True,  # a notebook's interrupt is not for it
            check=False,
        )
    if done.stdout or done.returncode:
        raise ClusterError(f"no keeper for {folder}: {done.stdout.decode() or said(folder)}")


def keeper_of(folder: Path) -> Owner | None:
    """The process that keeps a cluster; None where none does."""
    with suppress(OSError, ValueError):
        pid, started, host = (folder / PID).read_text().split()
        owner = Owner(int(pid), int(started), host)
        return owner if owner.is_alive else None
    return None


def said(folder: Path) -> str:
    """The last that a keeper, and the server that it started, wrote into its log."""
    with suppress(OSError):
        return (folder / LOG).read_text(errors="replace")[-LONGEST_TEXT:]
    return ""
