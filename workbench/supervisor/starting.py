"""A supervisor, started from a notebook, which it outlives; and what it writes for people."""

import os
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

from workbench.store.cluster_spec import ClusterSpec, key_of
from workbench.store.cluster_store import open_store, sign
from workbench.store.errors import ClusterError
from workbench.store.process import SUPERVISOR, ProcessIdentity, holder

MODULE = "workbench.supervisor"
# A child of nobody: whoever starts a supervisor has no process to wait for, and none to take along.
GO_BETWEEN = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
BEGUN = b"begun\n"  # what a supervisor says when it has the folder, and before it starts anything
MEETING = "meeting"  # the note in that store that says where ranks meet: "address:port"


def start(folder: Path, spec: ClusterSpec | None = None) -> None:
    """Starts a supervisor; returns when it has the folder, before its engines are ready.

    This process is attached to the cluster then (`Store.attach`).

    Args:
        folder: the cluster's folder; made here, and open to nobody else.
        spec: the cluster to keep; None: the one that the folder describes, where a supervisor
            ended before its work.

    Raises:
        ClusterError: another supervisor has the folder, or none could start; the text says why.
        StoreError: the folder's store cannot be used.
    """
    folder = folder.absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if spec is None:
        spec = ClusterSpec.load(folder)
    else:
        spec.save(folder)
    key_of(folder)  # made before anybody wants it
    # Closed here: an interrupt while the interpreter closes it would be lost.
    with closing(open_store(folder, create=True)) as store:
        store.attach(ProcessIdentity.here())
        sign(folder, store)
    supervisor = [sys.executable, "-P", "-m", MODULE, str(folder)]
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    with (folder / LOG).open("ab") as log:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", GO_BETWEEN, *supervisor],
            # What can be imported here can be imported there: the user's own modules too.
            env={**os.environ, "PYTHONPATH": path, **spec.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # until the supervisor has said so
            stderr=log,
            check=False,
        )
    if done.stdout != BEGUN:
        raise ClusterError(f"no supervisor for {folder}: {done.stdout.decode() or said(folder)}")


def supervisor_of(folder: Path) -> ProcessIdentity | None:
    """The process that keeps a cluster; None where none does."""
    return holder(folder / SUPERVISOR)


LOG = "supervisor.log"
LONGEST_TEXT = 2000
MOST_BYTES, KEPT_BYTES = 8 << 20, 1 << 20


def said(folder: Path) -> str:
    """The last that a supervisor, and the server that it started, wrote into its log."""
    return _end(folder / LOG, LONGEST_TEXT).decode(errors="replace")


def shorten(folder: Path, most: int = MOST_BYTES, kept: int = KEPT_BYTES) -> None:
    """Leaves the last whole lines of a log that has become long, at most `kept` bytes of them.

    Its writers go on: they append. What they write at that very moment may be lost.
    """
    path = folder / LOG
    with suppress(OSError):
        if path.stat().st_size > most:
            lines = _end(path, kept)
            lines = lines[lines.find(b"\n") + 1 :]
            os.truncate(path, 0)
            with path.open("ab") as log:
                log.write(lines)


def _end(path: Path, most: int) -> bytes:
    with suppress(OSError), path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - most))
        return log.read()
    return b""
