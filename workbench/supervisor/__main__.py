"""`python -m workbench.supervisor FOLDER`: keeps a cluster; see `starting.start`.

It says on standard output that it has begun, or why it has not, and nothing more.
"""

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

from workbench.store.cluster_spec import ClusterSpec
from workbench.store.cluster_store import open_store
from workbench.store.errors import ClusterError
from workbench.store.process import SUPERVISOR, FolderLock
from workbench.supervisor.starting import BEGUN


def main(folder: Path) -> None:
    """Keeps the cluster of a folder until it has ended."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(format="%(asctime)s %(message)s")
    try:
        with FolderLock(folder / SUPERVISOR, "supervisor"):
            spec, store = ClusterSpec.load(folder), open_store(folder)
            _say_so()
            from workbench.supervisor.supervisor import Supervisor  # it takes a while to import

            asyncio.run(Supervisor(folder, spec, store).run())
        # All is ended and closed; to take down what was imported would take a second, for which
        # whoever ends a cluster waits.
        os._exit(0)
    except ClusterError as error:
        print(error)  # to the caller, who may have gone on
        logging.error("%s", error)
        raise SystemExit(1) from None


def _say_so() -> None:
    """Lets the caller go on; one that has gone, or was interrupted, ends this process here."""
    os.write(sys.stdout.fileno(), BEGUN)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
